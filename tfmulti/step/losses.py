"""Makes each replica's loss its part of the one that a single device would have.

Keras divides a loss by the replica's own count of elements, of valid steps under a mask, or of
sample weights. Tapes then average the replicas by their rows. Where the right denominator is not
in proportion to rows, the loss is corrected here: see `tfmulti.step.weighting`.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfmulti import step
from tfmulti.step import weighting

_local = threading.local()


def keeps_means() -> bool:
    """Whether losses of the step being traced stay means, undivided by the replicas."""
    return has_whole_batch() or step.current_replica_batch() is not None


def reduce_loss(reduce, values, sample_weight=None, mask=None, reduction="mean", dtype=None):
    """Reduces the losses of a replica's rows, to be averaged over replicas by rows.

    Args:
        reduce: Keras's own reduction, of the other arguments.
        values: Losses of the replica's rows.
        sample_weight: Their weights, or None.
        mask: Which of them are valid, or None.
        reduction: Keras's name of the reduction.
        dtype: The loss's dtype.

    Returns:
        A scalar tensor, or what Keras gives for `reduction=None`.
    """
    if has_whole_batch():
        return reduce(values, sample_weight, mask, reduction, dtype)
    replica_batch = step.current_replica_batch()
    if replica_batch is None and getattr(tf.distribute.get_strategy(), "marks_padding", False):
        # Keras tries a loss while it builds a model, with no share.
        _refuse_weights_of_rows(values, sample_weight)
    loss = reduce(values, sample_weight, mask, reduction, dtype)
    if _share_of_many() is None:
        return loss
    if reduction == "sum":
        return loss * tf.cast(weighting.part_of_sum(replica_batch), loss.dtype)
    count = _denominator(sample_weight, mask, reduction)
    if count is None:
        return loss
    return loss * tf.cast(weighting.part_of_count(count, replica_batch), loss.dtype)


def average_loss(average, per_example_loss, sample_weight=None, global_batch_size=None):
    """Returns what `tf.nn.compute_average_loss` gives on one device, for tapes that weigh.

    Args:
        average: TensorFlow's own function.
        per_example_loss: Losses of this replica's rows.
        sample_weight: Their weights, or None.
        global_batch_size: What to divide their sum by; None for this replica's rows.
    """
    if getattr(tf.distribute.get_strategy(), "repairs_keras", False):
        if tf.distribute.in_cross_replica_context():
            # Keras tries a loss while it builds a model; TensorFlow refuses there.
            return tf.reduce_mean(per_example_loss)
    loss = average(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        return _undivided(loss)
    replica_batch = _share_of_many()
    return (
        loss
        if replica_batch is None
        else loss * tf.cast(weighting.part_of_sum(replica_batch), loss.dtype)
    )


def regularization_loss(scale, loss):
    """Returns what `tf.nn.scale_regularization_loss` gives on one device.

    Args:
        scale: TensorFlow's own function.
        loss: The penalties.
    """
    return _undivided(scale(loss))


def _undivided(loss):
    """Takes back TensorFlow's division by the replicas, whose weights add to one here."""
    if not has_whole_batch() and _share_of_many() is None:
        return loss
    return loss * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, loss.dtype)


def _share_of_many():
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or has_whole_batch():
        return None
    return step.current_replica_batch()


@contextlib.contextmanager
def of_whole_batch():
    """Has what this thread computes be computed as on one device: it has the rows of all."""
    before = has_whole_batch()
    _local.has_whole_batch = True
    try:
        with step.as_current(None):
            yield
    finally:
        _local.has_whole_batch = before


def has_whole_batch() -> bool:
    """Whether this thread computes with the rows of all replicas."""
    return getattr(_local, "has_whole_batch", False)


def _refuse_weights_of_rows(values, sample_weight):
    """Keras's own words are about two shapes."""
    rank = tf.convert_to_tensor(values).shape.rank
    given = None if sample_weight is None else tf.convert_to_tensor(sample_weight).shape
    if rank is not None and given is not None and rank > 1 and given.rank < rank:
        raise ValueError(
            'With `remainder="pad"` sample weights must have the shape of the losses. '
            f"Received: weights of shape {given}, losses of {rank} dimensions. "
            'Give weights of your own in (x, y, sample_weight), or use remainder="uneven".'
        )


def _denominator(sample_weight, mask, reduction):
    """What Keras divides by, where that is not in proportion to rows; float32 scalar or None."""
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = None if sample_weight is None else tf.cast(sample_weight, tf.float32)
        valid = None if mask is None else tf.cast(mask, tf.float32)
        if weights is None or valid is None:
            return tf.reduce_sum(valid if weights is None else weights)
        while weights.shape.rank < valid.shape.rank:
            weights = weights[..., None]
        return tf.reduce_sum(weights * valid)
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, tf.float32))
    return None
