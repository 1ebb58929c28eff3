"""Steps that every replica computes from the whole global batch, as one device does.

Some steps cannot be split over replicas without another result: a decision by the mean of the
batch, for example. Each replica then gathers all rows and runs the user's step on them, while the
strategy counts one replica and nothing in the step is reduced. The result is that of one device,
and so is the speed.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.step import gradients, local_steps, model_contents
from tfmulti.step import logs as logs_lib
from tfmulti.step import rows as rows_lib
from tfmulti.step.dense_parts import to_dense
from tfmulti.step.first_replica import as_first_replica_step, of_first_replica, replica_number
from tfmulti.step.gathering import gather_batch, row_positions
from tfmulti.step.rows import ReplicaBatch, as_current
from tfmulti.step.sums import add_by_dtype

_NEEDS_PARTS = (
    "sharded state or weights, stages, tensor parallelism and synchronize_every need the part of "
    "each replica"
)
# Seen on three parts of an H200; on CPUs that reduce with the same code the weights are right.
_EAGER_ON_GPUS = "with run_eagerly=True several GPUs came to other weights; compile without it"


def replicate(model, kind: str) -> None:
    """Makes every replica compute a kind of step from the whole batch, until the next `compile`.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    marks.REPLICATED.set(model, (keras_compat.compiled_state(model), _kinds(model) | {kind}))
    # It may have been traced for other data.
    setattr(model, f"{kind}_function", None)


def distribute_again(model, kind: str) -> None:
    """Undoes `replicate`."""
    marks.REPLICATED.set(model, (keras_compat.compiled_state(model), _kinds(model) - {kind}))


def is_replicated(model, kind: str | None) -> bool:
    """Whether every replica computes a kind of step of a model from the whole batch."""
    return model is not None and kind in _kinds(model)


def why_not_replicated(model) -> str:
    """Returns why no replica can compute a model's step from the whole batch, or ""."""
    optimizers = model_contents.optimizers_of(model, nested=True)
    variables = [*model.variables, *(v for optimizer in optimizers for v in optimizer.variables)]
    if (
        marks.MICRO_BATCHES_ON_DEVICES.get(model) > 1
        or local_steps.steps_of(model) > 1
        or any(hasattr(variable, "is_here") for variable in variables)
    ):
        return _NEEDS_PARTS
    strategy = model.distribute_strategy
    several = topology.on_gpus(strategy) and topology.num_local_replicas(strategy) > 1
    return _EAGER_ON_GPUS if several and model.run_eagerly else ""


def _kinds(model) -> frozenset:
    compiled, kinds = marks.REPLICATED.get(model)
    return kinds if compiled is keras_compat.compiled_state(model) else frozenset()


class ReplicatedStep:
    """A step that every replica computes from all rows.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        step: The step, a function of one batch.
        are_undivided: Whether every local replica is given all rows of its worker.
    """

    def __init__(self, model, kind: str, step, are_undivided: bool):
        self._model, self._kind, self._step = model, kind, step
        self._are_undivided = are_undivided
        self._sizes: list[int | None] | None = None
        requests = getattr(model.distribute_strategy, "requests", None)
        self._requests = requests if kind == "train" else None

    def run(self, run, data):
        """Returns what the step returns: logs, or on each replica predictions for its own rows.

        Args:
            run: `tf.distribute.Strategy.run` of the strategy.
            data: The replica batches.
        """
        if not isinstance(data, (rows_lib.Counted, rows_lib.Padded)):
            self._sizes = _known_sizes(data, self._model.distribute_strategy)
        rows, before = run(self._gather, args=(data,))
        # Only the step itself: what comes before and after it communicates.
        with keras_compat.as_one_device(self._model.distribute_strategy):
            whole = gradients.with_step_state(as_first_replica_step(self._step), reduced=True)
            outputs = run(whole, args=(rows,))
        finish = _own_rows if self._kind == "predict" else self._finish
        return run(finish, args=(outputs, before))

    def _gather(self, data):
        """Returns all rows, and what is needed after the step.

        That is where this replica's rows of `predict` are, else the state of its metrics.
        """
        data = self._own_part(data)
        num_rows = rows_lib.num_rows(data)
        with as_current(ReplicaBatch(num_rows, num_rows)):
            whole = _gather_any(data, self._sizes)
        if self._kind == "predict":
            [start], _ = row_positions([num_rows])
            return whole, (start, num_rows)
        if self._requests is not None:
            # In other steps they travel with the logs, which are not added in this one.
            self._requests.note(add_by_dtype([self._requests.part_of_step()])[0])
        return whole, [state.read_value() for state in _states_of_metrics(self._model)]

    def _own_part(self, data):
        """Returns this replica's rows, without padding."""
        data = rows_lib.without_padding(rows_lib.without_count(data))
        if rows_lib.parts_of(data) is None:
            raise rows_lib.missing_rows_error(data)
        if not self._are_undivided:
            return data
        context = tf.distribute.get_replica_context()
        count = topology.num_local_replicas(context.strategy)
        return rows_lib.take_replica_rows(data, topology.local_replica_index(context), count)

    def _finish(self, logs, before):
        """Gives all replicas the first one's logs and state; it alone counts in metrics."""
        states = keras_compat.states_from_rows(self._model, every=True, synchronized=True)
        states = [state.value for state in states] if self._kind == "train" else []
        flat = tf.nest.flatten(logs_lib.as_numbers(logs))
        places = [place for place, log in enumerate(flat) if _is_number(log)]
        values = [*(state.read_value() for state in states), *(flat[place] for place in places)]
        values = of_first_replica(values)
        for state, value in zip(states, values):
            state.assign(value)
        for place, value in zip(places, values[len(states) :]):
            flat[place] = value
        # The states are added over replicas, and all replicas have counted the same rows.
        is_first = replica_number() == 0
        for state, value in zip(_states_of_metrics(self._model), before):
            state.assign(tf.where(is_first, state.read_value(), value))
        return tf.nest.pack_sequence_as(logs, flat)


def _gather_any(data, sizes):
    """Gathers the rows of a batch, which may hold strings, ragged and sparse tensors.

    Args:
        data: A replica batch.
        sizes: The numbers of rows of all its parts, as far as known; or None.
    """
    parts = tf.nest.flatten(data, expand_composites=False)
    dense = [None if part is None else to_dense(part) for part in parts]
    gathered = iter(gather_batch([tensors for tensors, _ in filter(None, dense)]))
    whole = [None if each is None else each[1](*next(gathered)) for each in dense]
    for place, size in enumerate(sizes or ()):
        if size is not None and isinstance(whole[place], tf.Tensor):
            whole[place] = tf.ensure_shape(whole[place], [size, *whole[place].shape[1:]])
    return tf.nest.pack_sequence_as(data, whole, expand_composites=False)


def _known_sizes(data, strategy) -> list[int | None]:
    """Returns the numbers of rows of the parts of a batch where the graph knows them.

    Some steps can be traced for a known number only.
    """
    sizes = []
    for part in tf.nest.flatten(data, expand_composites=False):
        local = [part]
        if isinstance(part, tf.distribute.DistributedValues):
            local = strategy.experimental_local_results(part)
        known = [each.shape[0] if isinstance(each, tf.Tensor) else None for each in local]
        sizes.append(None if None in known or topology.num_workers(strategy) > 1 else sum(known))
    return sizes


def _states_of_metrics(model) -> list:
    """Returns the states of metrics that are added over replicas when they are read."""
    return [v.value for v in keras_compat.metric_variables(model) if v.aggregation == "sum"]


def _own_rows(outputs, row_range):
    start, count = row_range

    def own(part):
        has_rows = isinstance(part, (tf.Tensor, tf.RaggedTensor)) and part.shape.rank != 0
        return part[start : start + count] if has_rows else part

    return tf.nest.map_structure(own, outputs, expand_composites=False)


def _is_number(value) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)
