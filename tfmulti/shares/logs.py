"""Logs of a step: without filler rows, and the same on all replicas and workers."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.shares.share import current_share, regularization


def loss_trackers(model) -> list:
    """The running mean that Keras shows as `loss`, in a list that can be empty."""
    return [metric for metric in model.metrics if metric.name == "loss"] if model else []


def output_losses(share) -> list:
    """The trackers of several outputs' own losses."""
    if share.model is None or not share.averages:
        return []
    return keras_compat.output_loss_trackers(share.model)


def take_out_filler(share) -> None:
    """Takes filler rows out of the running mean of the loss."""
    filler = tf.cast(share.num_rows - share.num_real, tf.float32)
    penalty = regularization(share.model) if share.penalty is None else share.penalty
    for tracker in loss_trackers(share.model):
        tracker.count.assign_sub(tf.cast(filler, tracker.count.dtype))
        tracker.total.assign_sub(penalty * filler)


def count_once(tracker, before, share) -> None:
    """Makes a step count once over all replicas, with the mean over their rows.

    Keras counts every call alike in the running mean of an output's own loss: as one or, where
    it knows them, as its rows.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    part = (tracker.total - before) * share.weight * num_replicas
    part = tf.where(share.num_real > 0, part, tf.zeros_like(part))
    tracker.total.assign(before + part)


def weigh_mean(metric, value):
    """Returns a mean over this replica's rows, and its weight among all; None outside of a step.

    The weights of all replicas add to one, so that a running mean counts the step once.
    """
    share = current_share()
    if share is None or not share.averages or any(metric is m for m in output_losses(share)):
        return None
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return None
    real = tf.cast(share.num_real, tf.float32)
    filled = tf.math.divide_no_nan(tf.cast(share.num_rows, tf.float32), real)
    scale = filled if share.is_padded else tf.ones([])
    part = tf.where(real > 0, value * tf.cast(scale, value.dtype), tf.zeros_like(value))
    return part, tf.math.divide_no_nan(real, share.count_globally())


def make_global(logs, share, signals=None, beside=()):
    """Makes a step's logs those of all replicas, and adds other tensors on the way.

    The metrics' are computed from the metrics' states added up over all replicas, as Keras
    does at the end of an epoch; so a callback that decides on a batch's logs decides the same on
    every worker. Logs of other names are averaged by rows.

    Args:
        logs: What the step returned.
        share: The replica's share of it.
        signals: What workers want of one another, which goes with the same reduction; or None.
        beside: Tensors to add over all replicas with the same reduction.

    Returns:
        The logs, and the sums of `beside`.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return logs, list(beside)
    result = _result_of_metrics(logs, share) if isinstance(logs, dict) else None
    variables = [] if result is None else share.model.metrics_variables
    variables = [v for v in variables if v.aggregation == "sum"]
    states = [variable.value.read_value() for variable in variables]
    wishes = [] if signals is None else [signals.part_of_step()]
    added = _add_by_dtype([*states, *beside, *wishes])
    if signals is not None:
        signals.note(added.pop())
    sums = added[len(states) :]
    if result is None:
        return (_average(logs, share) if isinstance(logs, dict) else logs), sums
    with keras.StatelessScope(state_mapping=list(zip(variables, added))):
        return result(), sums


def _result_of_metrics(logs, share):
    """Returns what computes logs from the metrics' states, or None for logs of another kind."""
    if share.model is None or not logs:
        return None
    if set(logs) == set(share.model.get_metrics_result()):
        return share.model.get_metrics_result
    metrics = {metric.name: metric for metric in share.model.metrics}
    if set(logs) <= set(metrics):
        return lambda: {name: metrics[name].result() for name in logs}
    return None


def _add_by_dtype(values) -> list[tf.Tensor]:
    """Adds values over all replicas; workers pack what goes together, of one dtype only."""
    added: list = [None] * len(values)
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [i for i, value in enumerate(values) if value.dtype == dtype]
        sums = tf.distribute.get_replica_context().all_reduce("SUM", [values[i] for i in places])
        for place, value in zip(places, sums):
            added[place] = value
    return added


def _average(logs, share):
    values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(logs)]
    places = [i for i, v in enumerate(values) if v.shape.rank == 0 and v.dtype.is_floating]
    if not places:
        return logs
    stacked = tf.stack([tf.cast(values[i], tf.float32) for i in places])
    stacked = tf.where(share.num_real > 0, stacked * share.weight, tf.zeros_like(stacked))
    stacked = tf.distribute.get_replica_context().all_reduce("SUM", stacked)
    for place, value in zip(places, tf.unstack(stacked)):
        values[place] = tf.cast(value, values[place].dtype)
    return tf.nest.pack_sequence_as(logs, values)
