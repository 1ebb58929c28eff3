"""Surrounds Keras's steps, so that shares without a row do no harm and logs are global."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.shares.share import Share, holding, regularization

_NEGATIVE_ZERO = -(2**31)


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
        share = _measure(data, model, fill, padded)
        if share is None:
            return fn(data)
        share.averages = averages
        if averages and kind == "train":
            # Here and now, not within a branch of the step's own.
            share.count_globally()
        if share.may_be_empty and not share.is_padded:
            data = _fill(data)
        counted = share.may_be_empty and kind != "predict"
        trackers = _output_losses(share) if counted else []
        state = _local_state(model, trackers) if counted else []
        before = [variable.read_value() for variable in state]
        totals = [tracker.total.value.read_value() for tracker in trackers]
        with holding(share):
            outputs = fn(data)
            if kind == "predict":
                return tf.nest.map_structure(lambda rows: _cut(rows, share), outputs)
            if share.is_padded:
                _correct_loss_log(share)
            if state:
                _restore(state, before, share)
            for tracker, total in zip(trackers, totals):
                _per_step(tracker, total, share)
            if kind == "train":
                _average_statistics(share)
            return _average_logs(outputs, share)

    return step


def _measure(data, model, fill, padded) -> Share | None:
    tensors = tf.nest.flatten(data, expand_composites=False)
    tensors = [t for t in tensors if t is not None]
    if not all(isinstance(t, tf.Tensor) and t.shape.rank for t in tensors) or not tensors:
        return None
    static = tensors[0].shape[0]
    num_rows = tf.shape(tensors[0])[0] if static is None else tf.constant(static)
    weights = _padding_weights(data) if padded else None
    if weights is not None:
        filler = tf.bitcast(weights, tf.int32) == _NEGATIVE_ZERO
        num_real = num_rows - tf.reduce_sum(tf.cast(filler, tf.int32))
        return Share(num_rows, num_real, may_be_empty=True, is_padded=True, model=model)
    if fill and not static:
        return Share(tf.maximum(num_rows, 1), num_rows, may_be_empty=True, model=model)
    return Share(num_rows, num_rows, model=model)


def _padding_weights(data):
    weights = data[2] if isinstance(data, tuple) and len(data) == 3 else None
    if isinstance(weights, tf.Tensor) and weights.dtype == tf.float32 and weights.shape.rank == 1:
        return weights
    return None


def _fill(data):
    tensors = tf.nest.flatten(data)

    def filler_row(tensor):
        shape = tf.concat([[1], tf.shape(tensor)[1:]], axis=0)
        row = tf.fill(shape, "") if tensor.dtype == tf.string else tf.zeros(shape, tensor.dtype)
        return tf.ensure_shape(row, [None, *tensor.shape[1:]])

    filled = tf.cond(
        tf.shape(tensors[0])[0] > 0,
        lambda: [tf.identity(tensor) for tensor in tensors],
        lambda: [filler_row(tensor) for tensor in tensors],
    )
    for tensor, original in zip(filled, tensors):
        tensor.set_shape([None, *original.shape[1:]])
    return tf.nest.pack_sequence_as(data, filled)


def _output_losses(share) -> list:
    """The trackers of several outputs' own losses."""
    if share.model is None or not share.averages:
        return []
    return keras_compat.output_loss_trackers(share.model)


def _local_state(model, trackers) -> list:
    """Metric states but those of `trackers`, and layer states that each replica keeps."""
    if model is None:
        return []
    apart = {variable.path for tracker in trackers for variable in tracker.variables}
    shared = keras_compat.synchronized_variables(model)
    own = [v for v in model.non_trainable_variables if v.aggregation == "none"]
    own = [v for v in own if v.path not in shared and keras.backend.is_float_dtype(v.dtype)]
    metrics = [v for v in model.metrics_variables if v.path not in apart]
    return [v.value for v in [*metrics, *own]]


def _restore(state, before, share):
    def put_back():
        for variable, value in zip(state, before):
            variable.assign(value)
        return tf.constant(True)

    tf.cond(share.num_real > 0, lambda: tf.constant(False), put_back)


def _per_step(tracker, before, share):
    """Makes a step count once over all replicas, with the mean over their rows.

    Keras counts every call alike in the running mean of an output's own loss: as one or, where
    it knows them, as its rows.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    part = (tracker.total - before) * share.weight * num_replicas
    part = tf.where(share.num_real > 0, part, tf.zeros_like(part))
    tracker.total.assign(before + part)


def _average_statistics(share):
    """Keeps the moving statistics of all replicas alike: their mean, by rows.

    Each replica normalizes with the statistics of its own rows, and what it learned of them is
    averaged at once, so that no replica evaluates or saves another model than the others.
    """
    statistics = keras_compat.local_statistics(share.model) if share.model else []
    if not statistics or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return
    parts = [v.value * tf.cast(share.weight, v.dtype) for v in statistics]
    for variable, mean in zip(
        statistics, tf.distribute.get_replica_context().all_reduce("SUM", parts)
    ):
        variable.value.assign(mean)


def _average_logs(logs, share):
    """Averages over all replicas, by rows, what Keras takes for the epoch's logs as it is.

    It does so with the last step's where their names are not those of the metrics.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if num_replicas == 1 or not share.averages or not isinstance(logs, dict):
        return logs
    if set(logs) == set(share.model.get_metrics_result()):
        return logs
    logs = {name: tf.convert_to_tensor(value) for name, value in logs.items()}
    means = {n: v for n, v in logs.items() if v.shape.rank == 0 and v.dtype.is_floating}
    if not means:
        return logs
    stacked = tf.stack([tf.cast(value, tf.float32) for value in means.values()])
    stacked = tf.where(share.num_real > 0, stacked * share.weight, tf.zeros_like(stacked))
    stacked = tf.distribute.get_replica_context().all_reduce("SUM", stacked)
    averaged = zip(means, tf.unstack(stacked))
    return {**logs, **{name: tf.cast(value, logs[name].dtype) for name, value in averaged}}


def _cut(rows, share):
    if not isinstance(rows, tf.Tensor) or not rows.shape.rank or not share.may_be_empty:
        return rows
    return rows[: share.num_real]


def _correct_loss_log(share):
    """Takes filler rows out of the running mean that Keras shows as `loss`."""
    trackers = [m for m in share.model.metrics if m.name == "loss"] if share.model else []
    filler = tf.cast(share.num_rows - share.num_real, tf.float32)
    penalty = regularization(share.model) if share.penalty is None else share.penalty
    for tracker in trackers:
        tracker.count.assign_sub(tf.cast(filler, tracker.count.dtype))
        tracker.total.assign_sub(penalty * filler)
