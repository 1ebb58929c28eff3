"""Replaces a model's call by a pass through the stages of a pipeline, wherever these are.

`StagedCall` is the model's call, `StageRun` what one stage computes in it: one micro-batch after
another, forward and backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel.connections import Connections
from tfmulti.parallel.cutting import Cut
from tfmulti.parallel.stages import (
    Boundary,
    Stage,
    StageTrace,
    added_up,
    stages_of,
    trace_stages,
)
from tfmulti.step import normalization
from tfmulti.step.sums import values_of_gradient, with_values


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call of the model passes through the stages; the same on all workers.

    Attributes:
        stages: The stages.
        traces: What tracing each stage has shown.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps only its inputs, and runs again for gradients.
        training: As in a layer's call.
        context: Function that restores the context in which the model was called.
        connections: Which weights have a gradient.
    """

    stages: list[Stage]
    traces: list[StageTrace]
    num_micro_batches: int
    recomputes: bool
    training: bool | None
    context: Callable
    connections: Connections

    @property
    def outputs(self) -> Boundary:
        """Describes the outputs of the last stage."""
        return self.traces[-1].after


class StageRun:
    """Runs one stage on the micro-batches of one batch.

    Args:
        plan: The plan.
        number: The number of the stage.
        total: The rows of all micro-batches.
        rows_before: The rows of the global batch that other copies of the stages have before these.

    Attributes:
        previous: Tensors that exist once the previous micro-batch is computed, and sent if it is
            sent; the next one waits for them.
        updates: The values, after the latest micro-batch, of the variables that the stage updates.
    """

    def __init__(self, plan: Plan, number: int, total: tf.Tensor, rows_before=0):
        self._plan, self._number = plan, number
        self._stage, self._trace = plan.stages[number], plan.traces[number]
        self._total, self._rows_before = total, rows_before
        self._is_last = number == len(plan.stages) - 1
        updated = self._trace.updated
        self._state = list(zip(updated, keras_compat.values_of(updated)))
        # For each micro-batch, a function that returns a tape, its sources and its outputs.
        self._recorded: list[Callable] = []
        self.previous: list = []
        self.updates: list[tf.Tensor] = []

    def bounds(self, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the first row of a micro-batch, and the row after its last one."""
        number = self._plan.num_micro_batches
        return index * self._total // number, (index + 1) * self._total // number

    def micro_batch(self, flat, index: int) -> list[tf.Tensor]:
        """Takes the rows of one micro-batch out of tensors with all rows."""
        begin, end = self.bounds(index)
        # A micro-batch without rows gets one of the others', whose outputs are dropped.
        begin = tf.minimum(begin, self._total - 1)
        return [tensor[begin : tf.maximum(end, begin + 1)] for tensor in flat]

    def forward(self, index: int, taken, weights) -> list[tf.Tensor]:
        """Computes the stage on one micro-batch, and keeps what its gradient needs.

        Args:
            index: The number of the micro-batch.
            taken: The outputs of the stage before.
            weights: The values of the stage's weights.

        Returns:
            The outputs of this stage.
        """
        before, after, state = self._trace.before, self._trace.after, self._state
        taken = self._after_previous(taken)
        sources = [*before.floats(taken), *weights]
        if self._plan.recomputes:
            flat, new = self._compute(index, taken, weights, state)

            def recorded(upstream):
                return self._recompute(index, upstream, taken, weights, state)
        else:
            # A step may take several gradients of one computation.
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(sources)
                flat, new = self._compute(index, taken, weights, state)

            def recorded(upstream):
                return tape, sources, after.floats(flat)

        self._recorded.append(recorded)
        new = self._of_rows(index, state, new)
        self._state = [
            old if keras_compat.is_seed_state(old[0]) else changed
            for old, changed in zip(state, new, strict=True)
        ]
        self.updates, self.previous = [value for _, value in new], flat
        return flat

    def backward(self, index: int, upstream) -> tuple[list, list]:
        """Returns the gradients of one micro-batch's inputs, and of the stage's weights.

        Args:
            index: The number of the micro-batch.
            upstream: Gradients of the floating-point tensors that `forward` returned.
        """
        upstream = self._after_previous(upstream)
        tape, sources, outputs = self._recorded[index](upstream)
        gradients = tape.gradient(
            outputs, sources, output_gradients=upstream, unconnected_gradients="zero"
        )
        number = len(self._trace.before.floats(self._trace.before.specs))
        of_weights = gradients[number:]
        self.previous = tf.nest.flatten(of_weights, expand_composites=True)
        return [tf.convert_to_tensor(grad) for grad in gradients[:number]], of_weights

    def _of_rows(self, index, state, new):
        """Returns the new state, which a micro-batch without rows leaves as it was."""
        begin, end = self.bounds(index)
        return [
            pair
            if keras_compat.is_seed_state(pair[0])
            else (pair[0], tf.where(end > begin, pair[1], old))
            for pair, (_, old) in zip(new, state, strict=True)
        ]

    def _after_previous(self, tensors) -> list[tf.Tensor]:
        """Makes a micro-batch wait for the previous one.

        TensorFlow would compute them side by side, or in any order: all would be finished late.
        """
        with tf.control_dependencies(self.previous):
            return [tf.identity(tensor) for tensor in tensors]

    def _compute(self, index, taken, weights, state):
        begin, end = self.bounds(index)
        drawn = sum(trace.num_draws for trace in self._plan.traces[: self._number])
        with keras_compat.draws_of() as draws:
            number = draws.number + drawn if draws is not None else None

        def rows():
            return self._rows_before + begin, tf.shape(taken[0])[0]

        # Each micro-batch draws its own random numbers, as each replica does.
        draws, stream = keras_compat.draws_of(rows, number), keras_compat.random_stream(index)
        with draws, stream, self._plan.context():
            before, after = self._trace.before, self._trace.after
            training = self._plan.training
            _, flat, new = self._stage.run(before, taken, weights, state, training, after)
        if self._is_last:
            # Drops the row that a micro-batch without rows was given.
            flat = [tensor[: end - begin] for tensor in flat]
        return flat, new

    def _recompute(self, index, upstream, taken, weights, state):
        # Otherwise TensorFlow would see that this repeats the first run, and keep its activations.
        with tf.control_dependencies(upstream):
            taken, weights = [tf.identity(x) for x in taken], [tf.identity(x) for x in weights]
            state = [(variable, tf.identity(value)) for variable, value in state]
        sources = [*self._trace.before.floats(taken), *weights]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            flat, _ = self._compute(index, taken, weights, state)
        return tape, sources, self._trace.after.floats(flat)


class StagedCall:
    """Replaces a model's call; subclasses know where the stages are.

    Args:
        model: A built Functional or Sequential model.
        starts: Positions, in the order of the model's layer calls, at which the second and later
            stages begin.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps only its inputs, and runs again for gradients.
    """

    def __init__(self, model, starts: list[int], num_micro_batches: int, recomputes: bool):
        self._model, self._strategy = model, model.distribute_strategy
        self._cut = Cut(model, starts)
        self._num_micro_batches, self._recomputes = num_micro_batches, recomputes
        self._original_call = model.call

    def install(self) -> None:
        """Places each weight with its stage, and replaces the model's call."""
        if self._may_share_state():
            inputs = self._cut.inputs
            specs = tuple(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in inputs)
            none = (None,) * len(inputs)
            before = Boundary(tuple(map(id, inputs)), (False,) * len(inputs), none, specs)
            _refuse_shared_state(trace_stages(stages_of(self._cut), before, True))
        self._place_weights()
        self._stages = stages_of(self._cut)
        self._variables = [part.model.variables for part in self._cut.parts]
        self._model.call = self.call
        marks.MICRO_BATCHES.set(self._model, self._num_micro_batches)
        # A function that `predict` has already traced reads the weights where they were before.
        self._model.predict_function = None

    def call(self, inputs, training=None, mask=None, **kwargs):
        """Passes a batch through the stages within a step; elsewhere runs the model's own call."""
        self._cut.refuse_changed()
        self._refuse_new_weights()
        if not self._is_step() or keras_compat.is_symbolic(inputs):
            return self._original_call(inputs, training=training, mask=mask, **kwargs)
        _refuse_inputs(keras.tree.flatten(self._cut.taken(inputs)))
        values = self._cut.values_of(inputs, mask)
        before, flat = Boundary.of(list(values), values, [])
        plan = self._plan(before, training)
        results = plan.connections.watch(self._run_stages(plan, before, flat))
        values, losses = plan.outputs.values(results)
        for loss in losses:
            keras.layers.Layer.add_loss(self._model, added_up(loss))
        return self._cut.pack_outputs(values)

    def _refuse_new_weights(self) -> None:
        """Raises ValueError if layers have other variables than when the model was cut."""
        for part, variables in zip(self._cut.parts, self._variables):
            known = set(map(id, variables))
            new = [v.path for v in part.model.variables if id(v) not in known]
            if new or len(part.model.variables) != len(variables):
                raise ValueError(
                    "A model that `pipeline` has cut must keep its weights. Received: "
                    f"{self._model.name!r}, whose layers now have "
                    f"{', '.join(new) or 'fewer weights'}. "
                    "Enable LoRA or quantize before `pipeline`."
                )

    def _may_share_state(self) -> bool:
        """Whether two stages have a non-trainable variable in common; most never change it."""
        models = [part.model for part in self._cut.parts]
        own = [{id(v) for v in model.non_trainable_variables} for model in models]
        return len(set().union(*own)) < sum(map(len, own))

    def _place_weights(self) -> None:
        """Moves each weight to the worker or device of its stage."""
        raise NotImplementedError

    def _is_step(self) -> bool:
        """Whether this is a step, in which rows pass through the stages."""
        raise NotImplementedError

    def _run_stages(self, plan: Plan, before: Boundary, flat) -> list[tf.Tensor]:
        """Returns the outputs of the last stage.

        Args:
            plan: The plan.
            before: Describes `flat`.
            flat: The model's inputs, with their masks.
        """
        raise NotImplementedError

    def _plan(self, before, training) -> Plan:
        context, stages = keras_compat.call_context(), self._stages
        # At each call: layers may be unfrozen, or get another penalty or rate of dropout. In the
        # step's graph each stage is traced once for each micro-batch anyway.
        with context():
            traces = trace_stages(stages, before, training, recomputes=self._recomputes)
        _refuse_shared_state(traces)
        needs_whole = training and normalization.synchronized_layers(self._model)
        number = 1 if needs_whole else self._num_micro_batches
        connections = Connections(stages, traces)
        return Plan(stages, traces, number, self._recomputes, training, context, connections)


def concat_rows(parts) -> list[tf.Tensor]:
    """Concatenates the rows of several lists of tensors, one list for each micro-batch."""
    return [tf.concat(each, axis=0) for each in zip(*parts)]


def add_gradients(some, others) -> list:
    """Adds two lists of gradients, dense or sparse."""
    return [_add(a, b) for a, b in zip(some, others)]


def _add(a, b):
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, rows = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, rows, a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


@tf.custom_gradient
def link(value):
    """Returns a tensor without elements that hands its gradient on to a value unchanged.

    As an argument of a custom gradient in place of the value, it copies nothing to another device.
    """
    return tf.zeros([0], value.dtype), lambda upstream: upstream


def refuse_second_derivative(gradients, links) -> list:
    """Returns the same gradients, and makes differentiating them again an error.

    MPI calls have no gradient, and stages run on values that no tape has watched: a second
    derivative would silently leave the stages out.

    Args:
        gradients: Gradients that have passed through the stages; some may be `tf.IndexedSlices`,
            or None.
        links: The links of the floating-point tensors that they depend on.
    """
    flat = [values_of_gradient(each) for each in gradients if each is not None]

    @tf.custom_gradient
    def once(*tensors):
        def gradient(*upstream):
            raise RuntimeError(
                "A pipeline does not support second derivatives. Received: the gradient of a "
                "gradient through its stages, as in a gradient penalty. Use shard='parameters' "
                "without tfmulti.pipeline."
            )

        return [tf.identity(tensor) for tensor in tensors[: len(flat)]], gradient

    flat = iter(once(*flat, *links) if flat else [])
    return [None if old is None else with_values(old, next(flat)) for old in gradients]


def only_reached(gradients, reached: list[bool]) -> list:
    """Returns the gradients of weights, but None for those that no loss depends on."""
    return [grad if is_reached else None for grad, is_reached in zip(gradients, reached)]


def spread_over(before: Boundary, of_floats, are_wanted: bool) -> list:
    """Returns a gradient, or None, for each input tensor of the first stage.

    Args:
        before: Describes these tensors.
        of_floats: The gradients of the floating-point ones.
        are_wanted: Whether anyone asks for them.
    """
    gradients = iter(of_floats)
    return [next(gradients) if each and are_wanted else None for each in before.is_float]


def _refuse_shared_state(traces):
    shared = [variable.path for trace in traces for variable in trace.shared]
    if shared:
        raise ValueError(
            "Stages of a pipeline cannot update the same state, such as batch-normalization "
            f"statistics or a shared seed generator. Received: {', '.join(shared)}. Choose "
            "`stages` so that all calls of that layer are in one stage, or give each layer its own "
            "seed."
        )


def _refuse_inputs(flat):
    for value in flat:
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise ValueError(
                "The inputs of a pipeline must be dense tensors of numbers. Received: a "
                f"{getattr(value, 'dtype', '')} {type(value).__name__} as an input of the model. "
                "Convert it in the dataset."
            )
