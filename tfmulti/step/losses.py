"""Scales each replica's loss so that the replicas together give the loss of a single device.

Keras divides a loss by the replica's local number of elements, of valid steps under a mask, or by
the sum of its sample weights. Tapes then average over replicas, weighted by rows. Where the
correct denominator is not proportional to rows, this module corrects the loss: see
`tfmulti.step.weighting`.
"""

from __future__ import annotations

import contextlib
import weakref

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.runtime.scoped import Scoped
from tfmulti.step import local_steps, weighting
from tfmulti.step.rows import ReplicaBatch, as_current, current_replica_batch, distributed_batch

_whole_batch = Scoped(False)
# In a custom training loop: a replica batch with weight 1 / replicas.
_in_loop = Scoped(None)
# The losses that are computed in such loops, by their ids.
_means_of_loops: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def keep_means(scale, value):
    """Keeps Keras from dividing losses by the number of replicas, which tfmulti averages itself.

    Args:
        scale: Keras's own function.
        value: A loss.
    """
    is_mean = has_whole_batch() or current_replica_batch() is not None or is_loop()
    # Outside of replicas, as in a callback, nothing will be added over them.
    is_mean = is_mean or tf.distribute.in_cross_replica_context()
    return value if is_mean else scale(value)


def of_loop(replica_batch: ReplicaBatch | None) -> contextlib.AbstractContextManager:
    """Makes this thread compute the losses of a custom training loop, outside of Keras's steps.

    A mean is then multiplied by its share of the numbers that all replicas average, so that the
    mean over replicas is that of one device, whatever their numbers of rows.

    Args:
        replica_batch: A replica batch with weight 1 / replicas; None outside of such loops.
    """
    return _in_loop.set_to(replica_batch)


def is_loop() -> bool:
    """Whether this thread computes the losses of a custom training loop; see `of_loop`."""
    return _in_loop.value is not None


def reduce_loss(reduce, values, sample_weight=None, mask=None, reduction="mean", dtype=None):
    """Reduces the losses of a replica's rows to a number that is then averaged over replicas.

    Args:
        reduce: Keras's own reduction; it takes the other arguments.
        values: Losses of the replica's rows.
        sample_weight: Their weights, or None.
        mask: Which of them are valid, or None.
        reduction: Keras's name of the reduction.
        dtype: The loss's dtype.

    Returns:
        A scalar tensor; for `reduction=None` the losses, as Keras returns them.
    """
    if has_whole_batch():
        return reduce(values, sample_weight, mask, reduction, dtype)
    current = current_replica_batch()
    if current is not None and current.was_padded:
        _refuse_weights_of_rows(values, sample_weight)
    loss = reduce(values, sample_weight, mask, reduction, dtype)
    replica_batch = _averaged_batch()
    if replica_batch is None or reduction in (None, "none"):
        return loss
    if is_loop():
        # Without rows, Keras returns the losses themselves.
        loss = tf.reduce_sum(loss)
    reduction = _effective_reduction(reduction, values, sample_weight, mask)
    if reduction == "sum":
        return _sum_of(loss, values, replica_batch)
    count = _denominator(sample_weight, mask, reduction)
    if count is None and is_loop():
        count = _number_of(values)
    return loss if count is None else _corrected(loss, count, replica_batch)


def average_loss(average, per_example_loss, sample_weight=None, global_batch_size=None):
    """Replaces `tf.nn.compute_average_loss`; tapes weight its result by rows.

    Args:
        average: TensorFlow's own function.
        per_example_loss: Losses of this replica's rows.
        sample_weight: Their weights, or None.
        global_batch_size: The divisor of their sum; None for their own number of rows.
    """
    if keras_compat.is_ours(tf.distribute.get_strategy()):
        if tf.distribute.in_cross_replica_context():
            # Keras calls a loss while it builds a model, where TensorFlow's function raises an
            # error unless it is given the number of rows.
            if global_batch_size is None:
                global_batch_size = tf.shape(per_example_loss)[0]
            return average(per_example_loss, sample_weight, global_batch_size)
    loss = average(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        loss = _undivided(loss)
        if not is_loop():
            return loss
        return _corrected(loss, _number_of(per_example_loss), _averaged_batch())
    # A local step has only the worker's rows, while `global_batch_size` counts those of all.
    is_own = local_steps.in_local_step()
    replica_batch = current_replica_batch() if is_own else _averaged_batch()
    return loss if replica_batch is None else _sum_of(loss, per_example_loss, replica_batch)


def _averaged_batch() -> ReplicaBatch | None:
    """Returns the replica batch if this thread's losses are averaged over replicas, else None."""
    return distributed_batch() or _in_loop.value


def _sum_of(loss, values, replica_batch):
    """Returns a sum of values so that the weighted sum over replicas is that of one device."""
    if replica_batch.has_gathered_rows(values):
        # Every replica has the same sum, and the weights add up to one.
        return loss
    return _scaled(loss, weighting.inverse_weight(replica_batch))


def regularization_loss(scale, loss):
    """Replaces `tf.nn.scale_regularization_loss`; returns the value that it has on one device.

    Args:
        scale: TensorFlow's own function.
        loss: The penalties.
    """
    return _undivided(scale(loss))


def _undivided(loss):
    """Reverts TensorFlow's division by the number of replicas, whose weights add up to one here."""
    if not has_whole_batch() and _averaged_batch() is None:
        return loss
    return _scaled(loss, tf.distribute.get_strategy().num_replicas_in_sync)


@contextlib.contextmanager
def of_whole_batch():
    """Makes this thread compute losses as on one device: it has the rows of all replicas."""
    # Without a replica batch nothing within is weighted by this replica's rows.
    with _whole_batch.set_to(True), as_current(None):
        yield


def has_whole_batch() -> bool:
    """Whether this thread computes with the rows of all replicas."""
    return _whole_batch.value


def _corrected(loss, count, replica_batch):
    """Returns a mean over `count` numbers so that its mean over replicas is that of one device."""
    return _scaled(loss, weighting.mean_correction(count, replica_batch))


def _scaled(loss, factor):
    loss = loss * tf.cast(factor, loss.dtype)
    if is_loop():
        _means_of_loops[id(loss)] = loss
    return loss


def refuse_sums_of_means(values) -> None:
    """Raises ValueError if a custom training loop adds its losses over replicas.

    Args:
        values: The tensors of all local replicas that are to be added.
    """
    if any(_means_of_loops.get(id(value)) is value for value in values):
        raise ValueError(
            "Losses computed under `tfmulti.DistributedGradientTape` are not divided by the number "
            'of replicas, so they must be averaged over replicas. Received: strategy.reduce("SUM", '
            '...). Call strategy.reduce("MEAN", loss, axis=None).'
        )


def _number_of(values):
    return tf.cast(tf.size(values), weighting.DTYPE)


def _refuse_weights_of_rows(values, sample_weight):
    """Raises a clear error; Keras's own is about two incompatible shapes."""
    if sample_weight is None:
        return
    shape, given = (tf.convert_to_tensor(each).shape for each in (values, sample_weight))
    if shape.rank and shape[-1] == 1:
        # Keras leaves out an axis of one number.
        shape = shape[:-1]
    if shape.rank is not None and shape.rank > 1 and given.rank < shape.rank:
        raise ValueError(
            'With `remainder="pad"` sample weights must have the shape of the losses. '
            f"Received: weights of shape {given}, losses of {shape.rank} dimensions. "
            'Pass weights of that shape in (x, y, sample_weight), or use remainder="uneven".'
        )


def _effective_reduction(reduction, values, sample_weight, mask):
    """Returns the reduction that has the same result, where a number replaces those of rows."""
    shape = tf.convert_to_tensor(values).shape
    weights = None if sample_weight is None else tf.convert_to_tensor(sample_weight).shape
    if shape.rank == 0 and mask is None and (weights is None or weights.rank == 0):
        # Keras returns a mean that a loss takes by itself as it is.
        return "mean"
    if reduction == "mean_with_sample_weight" and weights is not None and mask is None:
        is_for_all = weights.rank == 0 or weights[0] == 1 and shape.rank and shape[0] != 1
        # The values are multiplied by the one weight and divided by it.
        return "sum" if is_for_all else reduction
    return reduction


def _denominator(sample_weight, mask, reduction):
    """Returns Keras's divisor as a scalar, or None if it is proportional to rows."""
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        weights = keras_compat.masked_weights(sample_weight, mask, weighting.DTYPE.name)
        return tf.reduce_sum(tf.cast(weights, weighting.DTYPE))
    # Keras scales the mask, so that the number of valid steps is the divisor.
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, weighting.DTYPE))
    return None
