"""Wraps Keras's steps so that empty replica batches have no effect, and logs are global."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.step import assignments, local_steps
from tfmulti.step import logs as logs_lib
from tfmulti.step import rows as rows_lib
from tfmulti.step.rows import ReplicaBatch, as_current


def wrap_step(fn, kind: str, model: keras.Model | None):
    """Wraps a Keras step so that it counts its rows, and an empty replica batch has no effect.

    Padding rows are cut off.

    Args:
        fn: The step, a function of one batch.
        kind: `"train"`, `"test"` or `"predict"`.
        model: The model, or None.

    Returns:
        A function of one batch.
    """

    def step(data):
        num_global = None
        if isinstance(data, rows_lib.Counted):
            data, num_global = data
        was_padded = isinstance(data, rows_lib.Padded)
        data = rows_lib.without_padding(data)
        replica_batch = _measure(data, model)
        if replica_batch is None:
            if kind == "train":
                raise rows_lib.missing_rows_error(data)
            return fn(data)
        replica_batch.was_padded = was_padded
        if num_global is not None:
            replica_batch.num_global = tf.cast(num_global, tf.float32)
        if kind == "train" or kind == "test" and _has_custom_test_step(model):
            # Count here: a collective is not allowed in a branch of the step.
            replica_batch.count_globally()
        if not tf.executing_eagerly() and kind in marks.ANY_ROWS.get(model):
            # The graph is what verification has seen: code that reads the number of rows, and
            # what is concluded from shapes, may come to something else for one number.
            data = rows_lib.with_any_number(data)
            replica_batch.num_rows = rows_lib.num_rows(data)
        if replica_batch.may_be_empty:
            on_gpus = topology.on_gpus(tf.distribute.get_strategy())
            data = rows_lib.fill_if_empty(data, of_ones=on_gpus)
        with as_current(replica_batch), _explaining_values(model, kind):
            return (
                _predict(fn, data, replica_batch)
                if kind == "predict"
                else _learn(fn, data, replica_batch, kind)
            )

    return step


def _explaining_values(model, kind):
    def holds_parts():
        return any(
            isinstance(v, keras_compat.HeldVariable) for v in getattr(model, "variables", ())
        )

    reason = "Of a sharded or split weight"
    return assignments.explaining_values(f"`{kind}_step`", reason, holds_parts)


def _has_custom_test_step(model) -> bool:
    return model is not None and keras_compat.has_custom_step(model, "test")


def _predict(fn, data, replica_batch):
    outputs = fn(data)
    _refuse_to_gather(outputs, replica_batch.model)
    return tf.nest.map_structure(
        lambda part: _cut(part, replica_batch), outputs, expand_composites=False
    )


def _refuse_to_gather(outputs, model):
    """Raises ValueError for predictions of `predict` that workers cannot send each other."""
    call, _ = marks.CALL.get(model)
    if call != "predict" or topology.num_workers(tf.distribute.get_strategy()) == 1:
        return
    for part in tf.nest.flatten(outputs, expand_composites=False):
        if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
            raise ValueError(
                "Predictions on several workers must be dense tensors, which the workers gather. "
                f"Received: a {type(part).__name__} of shape {part.shape}. Return .to_tensor() or "
                "tf.sparse.to_dense of it, or predict in a program without workers."
            )


def _learn(fn, data, replica_batch, kind):
    # Keras weights the losses of outputs by their rows where it knows the number of rows, as in
    # every eager step.
    static = rows_lib.parts_of(data)[0].shape[0]
    is_unknown = static is None and not tf.executing_eagerly()
    trackers = logs_lib.output_losses(replica_batch) if is_unknown else []
    metrics = _metrics_of(replica_batch.model, trackers) if replica_batch.may_be_empty else []
    is_local = kind == "train" and local_steps.steps_of(replica_batch.model) > 1
    # In local steps each worker has its own states until the next average.
    states = _states_from_rows(replica_batch) if kind == "train" and not is_local else []
    before = [variable.read_value() for variable in [*(v.value for v in metrics), *states]]
    totals = [tracker.total.value.read_value() for tracker in trackers]
    logs_lib.forget_results()
    with local_steps.keeping_weights(replica_batch) if is_local else contextlib.nullcontext():
        logs = logs_lib.as_numbers(fn(data))
    differing = logs_lib.compare_with_metrics(logs, replica_batch)
    _restore_if_empty(metrics, before, replica_batch)
    for tracker, total in zip(trackers, totals):
        logs_lib.count_once(tracker, total, replica_batch)
    if kind != "train":
        return logs_lib.make_global(logs, replica_batch, differing)[0]
    begin = before[len(metrics) :]
    changes = [replica_batch.weighted(state - old) for state, old in zip(states, begin)]
    values = [replica_batch.weighted(state) for state in states]
    requests = getattr(tf.distribute.get_strategy(), "requests", None)
    beside = [*changes, *values]
    # Together with the logs, which saves a collective in each step.
    logs, beside = logs_lib.make_global(logs, replica_batch, differing, requests, beside)
    for state, old, change, value in zip(states, begin, beside, beside[len(states) :]):
        # A number that replaces a far larger one, as a first loss does 1e9, is lost in the change.
        changed = old + change
        # The change of an infinite number, as a mask has, is NaN.
        is_replaced = (tf.abs(value) < 0.5 * tf.abs(old)) | ~tf.math.is_finite(changed)
        state.assign(tf.where(is_replaced, value, changed))
    return logs


def divide_whole_batch(step):
    """Makes each local replica take its part of a batch that all received whole.

    `train_on_batch` and `test_on_batch` do not split their arguments.
    """

    def take_part(data):
        if rows_lib.parts_of(data) is None:
            return step(data)
        context = tf.distribute.get_replica_context()
        index = topology.local_replica_index(context)
        count = topology.num_local_replicas(context.strategy)
        return step(rows_lib.take_replica_rows(data, index, count))

    return take_part


def _measure(data, model) -> ReplicaBatch | None:
    parts = rows_lib.parts_of(data)
    if parts is None:
        return None
    num_rows = rows_lib.count_rows(parts[0])
    # All replicas must judge alike: an eager tensor's shape is only that of this replica's batch.
    static = parts[0].shape[0] and not tf.executing_eagerly()
    if tf.distribute.get_strategy().num_replicas_in_sync == 1 or static:
        return ReplicaBatch(num_rows, num_rows, model=model)
    return ReplicaBatch(tf.maximum(num_rows, 1), num_rows, may_be_empty=True, model=model)


def _metrics_of(model, trackers) -> list:
    """Returns the variables of all metrics except `trackers`."""
    if model is None:
        return []
    apart = {variable.path for tracker in trackers for variable in tracker.variables}
    metrics = [v for v in keras_compat.metric_variables(model) if v.path not in apart]
    # A whole-batch metric has seen rows of other replicas, even if this replica has none.
    return [v for v in metrics if v.aggregation != "only_first_replica"]


def _restore_if_empty(variables, before, replica_batch):
    of_stages = {id(variable) for variable in replica_batch.of_stages}
    pairs = [(v, value) for v, value in zip(variables, before) if id(v) not in of_stages]

    def put_back():
        for variable, value in pairs:
            variable.value.assign(value)
        return tf.constant(True)

    if pairs:
        tf.cond(replica_batch.num_real > 0, lambda: tf.constant(False), put_back)


def _states_from_rows(replica_batch) -> list:
    """Returns the layer state that each replica updates from its local rows.

    Each state changes by the mean of the replicas' changes, weighted by rows, so that all
    replicas train, evaluate and save the same model.
    """
    if replica_batch.model is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return []
    states = keras_compat.states_from_rows(replica_batch.model, every=replica_batch.may_be_empty)
    return [variable.value for variable in states]


def _cut(part, replica_batch):
    if not isinstance(part, (tf.Tensor, tf.RaggedTensor)) or not part.shape.rank:
        return part
    return part[: replica_batch.num_real] if replica_batch.may_be_empty else part
