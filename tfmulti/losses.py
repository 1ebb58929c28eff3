"""Makes each replica's loss its part of the one that a single device would have.

Keras divides a loss by the replica's own count of elements, of valid steps under a mask, or of
sample weights. `DistributedOptimizer` then averages the replicas by their rows. Where the right
denominator is not in proportion to rows, the loss is corrected here by the ratio.
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfmulti import shares

_local = threading.local()


def keeps_means() -> bool:
    """Whether losses of the step being traced stay means, undivided by the replicas."""
    share = shares.current_share()
    return share is not None and share.averages


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
    numbers = getattr(_local, "numbers", None)
    if numbers is not None and tf.convert_to_tensor(values).shape.rank == 0:
        numbers.append(values)
    share = shares.current_share()
    if _is_padded(share):
        _refuse_weights_of_rows(values, sample_weight)
    loss = reduce(values, sample_weight, mask, reduction, dtype)
    context = tf.distribute.get_replica_context()
    if not keeps_means() or context is None:
        return loss
    if context.num_replicas_in_sync == 1 and not share.is_padded:
        return loss
    if reduction == "sum":
        return loss * tf.cast(_inverse(share.weight), loss.dtype)
    counted = _denominator(sample_weight, mask, reduction)
    if counted is None:
        return loss
    counted = tf.where(share.num_real > 0, counted, 0.0)
    part = tf.math.divide_no_nan(counted, context.all_reduce("SUM", counted))
    return loss * tf.cast(part * _inverse(share.weight), loss.dtype)


@contextlib.contextmanager
def noting_single_numbers():
    """Collects, in this thread, what losses give that return one number for a batch."""
    _local.numbers = []
    try:
        yield _local.numbers
    finally:
        _local.numbers = None


def _is_padded(share) -> bool:
    if share is not None:
        return share.is_padded
    # Keras tries a loss while it builds a model, with no share.
    return getattr(tf.distribute.get_strategy(), "marks_padding", False)


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


def _inverse(value):
    return tf.math.divide_no_nan(1.0, value)


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
