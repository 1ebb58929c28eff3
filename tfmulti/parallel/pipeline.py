"""Pipelines: the layers of a model are on several workers, and micro-batches go through them."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.parallel import schedule
from tfmulti.parallel.cutting import Cut, even_starts, starts_at
from tfmulti.parallel.layer_costs import estimated_costs, measured_costs
from tfmulti.parallel.stages import Boundary, stages_of, trace_stages
from tfmulti.step import current_replica_batch, normalization, parameters, split_weights


def pipeline(
    model: keras.Model,
    stages: int | list[str] | None = None,
    micro_batches: int = 4,
    checkpoint_activations: bool = False,
    measure_rows: int | None = None,
) -> keras.Model:
    """Cuts a model into stages, one for each worker, which pass micro-batches on to each other.

    Each worker holds the weights of its stage alone, with their gradients and slots. The rows of
    the stages' workers together are cut into micro-batches; while one stage computes the second,
    the next one computes the first. Losses, gradients and metrics are those of the whole batch.
    With more workers than stages there are copies of the stages, which share the rows. With one
    replica in all nothing happens.

    Args:
        model: A built Functional or Sequential model, created in the strategy's scope. Created
            within `tfmulti.sharded_parameters()`, no worker ever has the whole model.
        stages: The number of stages, of which the number of workers is a multiple; None for the
            number of workers. The model is then cut where stages compute about as much as each
            other. Or the names of the layers at which stages begin, without the first.
        micro_batches: In how many parts the rows of a step pass through. The more there are, the
            less the stages wait: of s stages and m parts, (s - 1) / (m + s - 1) of the time.
        checkpoint_activations: Whether each stage keeps its inputs alone, and runs again for the
            gradients of a micro-batch.
        measure_rows: How many rows worker 0 times each layer on, to cut the model where the times
            are even; take those of a micro-batch. None estimates them from the weights.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is not Functional or Sequential, cannot be cut so, has been
            compiled, or has synchronized batch normalization with several micro-batches; if
            workers are no multiple of stages, have several replicas, or have no MPI.

    Example:
        >>> import tfmulti
        >>> strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
        >>> with strategy.scope():
        ...     hidden = [keras.layers.Dense(4) for _ in range(3)]
        ...     model = keras.Sequential([keras.Input((4,)), *hidden])
        ...     model = tfmulti.pipeline(model, micro_batches=2)

    Sources: Huang et al., 2019, "GPipe: Efficient Training of Giant Neural Networks using
    Pipeline Parallelism".
    """
    strategy = model.distribute_strategy
    stages = [stages] if isinstance(stages, str) else stages
    _refuse_model(model, micro_batches)
    _refuse_rows(measure_rows, stages)
    if strategy.num_replicas_in_sync == 1:
        return model
    is_named = stages is not None and not isinstance(stages, int)
    starts = starts_at(model, stages) if is_named else None
    number = _number_of_stages(strategy, stages)
    if starts is None:
        costs = measured_costs(model, measure_rows) if measure_rows else estimated_costs(model)
        starts = even_starts(model, costs, number)
    _Pipeline(model, strategy, starts, micro_batches, checkpoint_activations).install()
    return model


class _Pipeline:
    """A model's call as a pass through stages."""

    def __init__(self, model, strategy, starts, num_micro_batches, recomputes):
        self._model, self._strategy = model, strategy
        self._worker = topology.worker_index(strategy)
        self._num_workers = topology.num_workers(strategy)
        self._cut = Cut(model, starts)
        self._num_micro_batches, self._recomputes = num_micro_batches, recomputes
        self._call, self._plans = model.call, {}

    def install(self):
        """Gives each weight to the worker of its stage, and takes the place of the model's call."""
        sharded = parameters.of_strategy(self._strategy)
        for stage, part in enumerate(self._cut.parts):
            for weight in _weights_of(part.model):
                if getattr(weight, "stages", None) is None:
                    sharded.place(weight, stage, len(self._cut.parts))
        inputs, outputs = [id(x) for x in self._model.inputs], [id(x) for x in self._cut.outputs]
        self._stages = stages_of(self._cut, inputs, outputs)
        count = {}
        for stage in self._stages:
            for weight in stage.weights:
                count.setdefault(id(weight), [weight, 0])[1] += 1
        self._weights = [(weight, number > 1) for weight, number in count.values()]
        self._model.call = self.call
        if self._num_micro_batches == 1 and len(self._stages) == self._num_workers:
            for layer in keras_compat.all_layers(self._model):
                marks.SEES_BATCH.set(layer, True)

    def call(self, inputs, training=None, mask=None, **kwargs):
        """Passes a batch through the stages in a step; elsewhere it is the model's own call."""
        is_step = parameters.in_replica() and current_replica_batch() is not None
        if not is_step or keras_compat.is_symbolic(inputs):
            return self._call(inputs, training=training, mask=mask, **kwargs)
        _refuse_inputs(keras.tree.flatten(inputs))
        values = self._cut.values_of(inputs, mask)
        before, flat = Boundary.of(list(values), values, [])
        plan = self._plan(before, training)
        weights = [
            parameters.gather(each, each.held(), for_stages=True) if is_shared else each.held()
            for each, is_shared in self._weights
        ]
        outputs = self._passed(plan, before, flat, weights)
        values, losses = plan.outputs.values(outputs)
        for loss in losses:
            keras.layers.Layer.add_loss(self._model, tf.reduce_mean(loss))
        return self._cut.packed(values)

    def _plan(self, before, training):
        context = keras_compat.call_context()
        with keras_compat.draws_of() as draws:
            key = (before, training, draws is None)
        if key not in self._plans:
            with context():
                self._plans[key] = trace_stages(self._stages, before, training)
        whole = training and normalization.synchronized_layers(self._model)
        return schedule.Plan(
            self._strategy,
            self._worker,
            self._stages,
            self._plans[key],
            1 if whole else self._num_micro_batches,
            self._recomputes,
            training,
            context,
        )

    def _passed(self, plan, before, flat, weights):
        batch, number = current_replica_batch(), len(flat)
        num_rows = tf.where(batch.num_real > 0, tf.shape(flat[0])[0], 0)
        wants_inputs = keras_compat.is_recorded(before.floats(flat))
        places = {id(each): place for place, (each, _) in enumerate(self._weights)}
        mine = [places[id(each)] for each in self._stages[plan.me].weights]
        one = None

        @tf.custom_gradient
        def compute(*tensors):
            nonlocal one
            tensors = [tf.stop_gradient(each) for each in tensors]
            own = [tensors[number + place] for place in mine]
            one = schedule.Pass(plan, num_rows, wants_inputs)
            results = one.forward(tensors[:number], own)

            def gradient(*upstream):
                upstream = [tf.convert_to_tensor(each) for each in plan.outputs.floats(upstream)]
                of_inputs, of_weights = one.backward(upstream)
                of_inputs = _differentiated_once(of_inputs, [*flat, *weights])
                found, of_weights = iter(of_inputs), dict(zip(mine, of_weights))
                own = [place for place in of_weights if not self._weights[place][1]]
                added = one.of_copies([of_weights[place] for place in own])
                of_weights.update(zip(own, added))
                of_inputs = [
                    next(found) if is_float and wants_inputs else None
                    for is_float in before.is_float
                ]
                return [*of_inputs, *self._of_weights(plan, of_weights)]

            return results, gradient

        results = compute(*flat, *weights)
        schedule.updated_everywhere(plan, one)
        return results

    def _of_weights(self, plan, gradients):
        for place, (weight, is_shared) in enumerate(self._weights):
            own = gradients.get(place)
            if not is_shared:
                yield schedule.whole_or_held(plan, weight, own)
            else:
                yield tf.zeros(weight.shape, weight.dtype) if own is None else own


def _weights_of(model):
    """Yields the numbers that a model's layers learn or are given, without what calls change."""
    for layer in keras_compat.all_layers(model):
        for weight in keras_compat.own_weights(layer):
            is_float = keras.backend.is_float_dtype(weight.dtype)
            if is_float and not parameters.is_state(weight, layer):
                yield weight


def _differentiated_once(gradients, sources):
    """Has a second derivative, which MPI's calls would leave out in silence, be an error.

    Args:
        gradients: Gradients that have passed through the stages.
        sources: What they depend on.
    """

    @tf.custom_gradient
    def once(*tensors):
        def gradient(*upstream):
            raise RuntimeError(
                "A pipeline has first derivatives alone. Received: a gradient of a gradient that "
                "passed through its stages, as for a penalty on gradients. Use "
                "shard='parameters' without tfmulti.pipeline."
            )

        return [tf.identity(tensor) for tensor in tensors[: len(gradients)]], gradient

    return list(once(*gradients, *sources)) if gradients else []


def _refuse_model(model, micro_batches):
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(
            "`micro_batches` must be a whole number of at least 1. "
            f"Received: micro_batches={micro_batches!r}. Use 4 for each stage."
        )
    if not model.built or keras_compat.nodes_of(model) is None:
        raise ValueError(
            "`pipeline` needs a built Functional or Sequential model, whose graph it cuts. "
            f"Received: {model.name!r}, a {type(model).__name__} that "
            f"{'is neither' if model.built else 'has not been built'}. Give it an `Input`; "
            "for a subclassed model use shard='parameters'."
        )
    strange = [x for x in model.inputs if _is_strange(x)]
    if strange:
        raise ValueError(
            "Workers of a pipeline send dense numbers to each other. Received: the input "
            f"{strange[0].name}, of strings, sparse or ragged. Turn it into a dense tensor of "
            "numbers in the dataset."
        )
    if getattr(model, "optimizer", None) is not None:
        raise ValueError(
            "`pipeline` must be called before `compile`. Received: "
            f"{model.name!r}, which is compiled. Call it first."
        )
    split = [v.path for v in model.weights if isinstance(v, split_weights.SplitParameter)]
    if split:
        raise ValueError(
            "`pipeline` cannot cut a model whose layers are split. Received: "
            f"{model.name!r}, of which {split[0]} is. Use tfmulti.tensor_parallel or this."
        )
    together = [layer.name for layer in normalization.synchronized_layers(model)]
    if together and micro_batches > 1:
        raise ValueError(
            "Synchronized batch normalization needs the rows of the whole batch at once. "
            f"Received: {', '.join(together)}, micro_batches={micro_batches}. Use "
            "micro_batches=1, synchronized=False for the statistics of each micro-batch, or "
            "keras.layers.GroupNormalization."
        )


def _refuse_rows(measure_rows, stages):
    if measure_rows is None:
        return
    is_number = isinstance(measure_rows, int) and measure_rows > 0 and measure_rows is not True
    if not is_number or not (stages is None or isinstance(stages, int)):
        raise ValueError(
            "`measure_rows` is the number of rows to time layers on, for cuts that are not named. "
            f"Received: measure_rows={measure_rows!r}, stages={stages!r}. Use the rows of a "
            "micro-batch, for example 8, or leave it out."
        )


def _is_strange(given):
    is_sparse = getattr(given, "sparse", False) or getattr(given, "ragged", False)
    return is_sparse or given.dtype == "string"


def _refuse_inputs(flat):
    for value in flat:
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise ValueError(
                "Workers of a pipeline send dense numbers to each other. Received: a "
                f"{getattr(value, 'dtype', '')} {type(value).__name__} as an input of the model. "
                "Turn it into a dense tensor of numbers in the dataset."
            )


def _number_of_stages(strategy, stages) -> int:
    workers = topology.num_workers(strategy)
    parameters.refuse_several_replicas(strategy)
    number = stages if isinstance(stages, int) else workers if stages is None else len(stages) + 1
    if number < 2:
        raise ValueError(
            "`stages` must be two or more, or the names of the layers at which all stages but the "
            f"first begin. Received: stages={stages!r}. Leave it out for one stage a worker."
        )
    if workers % number:
        raise ValueError(
            "The number of workers must be a multiple of `stages`. "
            f"Received: {number} stages, {workers} workers. Start {number} workers, or "
            f"twice as many: python -m tfmulti.launch --num_workers {number} --mpi."
        )
    if getattr(strategy.extended, "send", None) is None:
        raise ValueError(
            "`pipeline` needs MPI, by which one worker sends to another. Received: "
            f"communication {strategy.communication}. Start the workers with python -m "
            "tfmulti.launch --mpi, after pip install tfmulti[mpi]."
        )
    return number
