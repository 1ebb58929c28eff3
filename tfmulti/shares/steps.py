"""Surrounds Keras's steps, so that shares without a row do no harm and logs are global."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.shares import logs as logs_lib
from tfmulti.shares import rows as rows_lib
from tfmulti.shares.share import Share, holding


def guard(fn, kind: str, model: keras.Model | None, *, fill: bool, padded: bool, averages: bool):
    """Wraps one of Keras's steps so that shares without a row do no harm.

    Args:
        fn: The step, a function of one batch.
        kind: `"train"`, `"test"` or `"predict"`.
        model: The model, or None.
        fill: Whether to give an empty share a filler row.
        padded: Whether the batch's sample weights can mark filler rows.
        averages: Whether the model's optimizers are distributed.

    Returns:
        A function of one batch.
    """

    def step(data):
        num_global = None
        if isinstance(data, rows_lib.Counted):
            data, num_global = data
        share = _measure(data, model, fill, padded)
        if share is None:
            if averages and kind == "train":
                _refuse_without_rows(data)
            return fn(data)
        share.averages = averages
        if num_global is not None:
            share.num_global = tf.cast(num_global, tf.float32)
        if averages and kind == "train":
            # Here and now, not within a branch of the step's own.
            share.count_globally()
        if share.may_be_empty and not share.is_padded:
            data = rows_lib.fill_if_empty(data)
        with holding(share):
            return _predict(fn, data, share) if kind == "predict" else _learn(fn, data, share, kind)

    return step


def _predict(fn, data, share):
    outputs = fn(data)
    return tf.nest.map_structure(lambda part: _cut(part, share), outputs, expand_composites=False)


def _learn(fn, data, share, kind):
    trackers = logs_lib.output_losses(share) if share.may_be_empty else []
    state = _local_state(share.model, trackers) if share.may_be_empty else []
    before = [variable.read_value() for variable in state]
    totals = [tracker.total.value.read_value() for tracker in trackers]
    logs = fn(data)
    if share.is_padded:
        logs_lib.take_out_filler(share)
    if state:
        _restore(state, before, share)
        _follow_others(share)
    for tracker, total in zip(trackers, totals):
        logs_lib.count_once(tracker, total, share)
    strategy = tf.distribute.get_strategy()
    if kind != "train":
        return logs_lib.make_global(logs, share)[0]
    statistics = _statistics(share)
    parts = [v.value * tf.cast(share.weight, v.dtype) for v in statistics]
    signals = getattr(strategy, "signals", None)
    logs, means = logs_lib.make_global(logs, share, signals, parts)
    for variable, mean in zip(statistics, means):
        variable.value.assign(mean)
    return logs


def share_whole_batch(step, num_local_replicas: int):
    """Has each local replica take its share of a batch that all were given whole.

    `train_on_batch` and `test_on_batch` do not split their arguments.
    """

    def share_of(data):
        if rows_lib.parts_of(data) is None:
            return step(data)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.cast(replica, tf.int32) % num_local_replicas
        return step(rows_lib.take_share(data, number, num_local_replicas))

    return share_of


def _measure(data, model, fill, padded) -> Share | None:
    parts = rows_lib.parts_of(data)
    if parts is None:
        return None
    static, num_rows = parts[0].shape[0], rows_lib.count_rows(parts[0])
    filler = rows_lib.filler_rows(data) if padded else None
    if filler is not None:
        num_real = num_rows - tf.reduce_sum(tf.cast(filler, tf.int32))
        return Share(num_rows, num_real, may_be_empty=True, is_padded=True, model=model)
    if fill and not static:
        return Share(tf.maximum(num_rows, 1), num_rows, may_be_empty=True, model=model)
    return Share(num_rows, num_rows, model=model)


def _refuse_without_rows(data):
    raise ValueError(
        "Every tensor of a batch must have rows, so that replicas can be weighed by theirs. "
        f"Received: {tf.nest.map_structure(lambda part: getattr(part, 'shape', part), data)}. "
        "Give numbers that belong to no row to the model as attributes."
    )


def _local_state(model, trackers) -> list:
    """Metric states but those of `trackers`, and layer states that each replica keeps."""
    if model is None:
        return []
    apart = {variable.path for tracker in trackers for variable in tracker.variables}
    metrics = [v for v in model.metrics_variables if v.path not in apart]
    return [v.value for v in [*metrics, *_own_states(model)]]


def _restore(state, before, share):
    def put_back():
        for variable, value in zip(state, before):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(share.num_real > 0, lambda: tf.constant(False), put_back)


def _follow_others(share):
    """Gives a replica without a row the layer state that the others have come to.

    Some of it, as the vector of spectral normalization, comes from weights and not from rows, and
    must be the same on all.
    """
    if share.model is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return
    apart = {v.path for v in keras_compat.local_statistics(share.model)}
    own = [v.value for v in _own_states(share.model) if v.path not in apart]
    if not own:
        return
    counted = share.num_real > 0
    parts = [tf.where(counted, v * tf.cast(share.weight, v.dtype), tf.zeros_like(v)) for v in own]
    for variable, mean in zip(own, tf.distribute.get_replica_context().all_reduce("SUM", parts)):
        variable.assign(tf.where(counted, variable, mean))


def _own_states(model) -> list:
    """Layer states that each replica keeps by itself, but for those that all compute alike."""
    shared = keras_compat.synchronized_variables(model)
    own = [v for v in model.non_trainable_variables if v.aggregation == "none"]
    own = [v for v in own if keras.backend.is_float_dtype(v.dtype)]
    return [v for v in own if v.path not in shared]


def _statistics(share) -> list:
    """Returns moving statistics whose mean over all replicas, by rows, each replica is to keep.

    Each normalizes with the statistics of its own rows, and what it learned of them is averaged
    at once, so that no replica evaluates or saves another model than the others.
    """
    if share.model is None or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return []
    return keras_compat.local_statistics(share.model)


def _cut(part, share):
    if not isinstance(part, (tf.Tensor, tf.RaggedTensor)) or not part.shape.rank:
        return part
    return part[: share.num_real] if share.may_be_empty else part
