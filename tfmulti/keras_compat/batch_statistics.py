"""Synchronized batch normalization: the statistics that one device has of the whole batch.

Both functions first add rows and then squares of distances from the mean, in two all-reduces.
Keras's formula, the mean of the squares less the square of the mean, needs no second one, but
cancels where a mean is larger than the deviation: years, or degrees Kelvin, had a variance of 0.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfmulti.keras_compat.reference import computes_like_one_device
from tfmulti.keras_compat.replacement import is_ours


def of_whole_batch(original, current_replica_batch):
    """Makes batch statistics those of all replicas' rows, without the dummy rows of empty ones.

    Where a replica computes like one device, nothing is reduced, so it can be in a branch.

    Args:
        original: Keras's own function.
        current_replica_batch: Function that returns the replica batch of the current step, or None.
    """

    def moments(x, axes, keepdims):
        context = tf.distribute.get_replica_context()
        if context is None or not is_ours(context.strategy):
            return original(x, axes, keepdims)
        is_one = computes_like_one_device(context.strategy)
        replica_batch = None if is_one else current_replica_batch()
        keep = functools.partial(tf.reduce_sum, axis=axes, keepdims=True)

        def add(sums):
            sums = [_rows_of(replica_batch, value) for value in sums]
            return sums if is_one else context.all_reduce("SUM", sums)

        total, count = add([keep(x), keep(tf.ones_like(x))])
        mean = tf.math.divide_no_nan(total, count)
        # As in `tf.nn.moments`: the distances add up to 0, whatever the mean's gradient.
        [squares] = add([keep(tf.math.squared_difference(x, tf.stop_gradient(mean)))])
        variance = tf.math.divide_no_nan(squares, count)
        mean, variance = (_with_gradient_of_rows(replica_batch, each) for each in (mean, variance))
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return moments


def of_all_masks(original, current_replica_batch):
    """Makes synchronized batch normalization with a mask count the valid steps of all replicas.

    Args:
        original: Keras's own method.
        current_replica_batch: Function that returns the replica batch of the current step, or None.
    """

    def moments(self, inputs, mask):
        replica_batch, context = current_replica_batch(), tf.distribute.get_replica_context()
        several = context is not None and context.num_replicas_in_sync > 1
        if mask is None or not self.synchronized or replica_batch is None or not several:
            return original(self, inputs, mask)
        valid = tf.cast(mask, inputs.dtype)[..., None] * tf.ones_like(inputs)
        valid = replica_batch.zero_if_empty(valid)
        keep = functools.partial(tf.reduce_sum, axis=self._reduction_axes, keepdims=True)
        masked = tf.where(valid > 0, inputs, tf.zeros_like(inputs))
        total, count = context.all_reduce("SUM", [keep(masked), keep(valid)])
        # Keras's own formula under a mask.
        count += keras.backend.epsilon()
        mean = total / count
        apart = tf.where(valid > 0, inputs - mean, tf.zeros_like(inputs))
        variance = context.all_reduce("SUM", keep(tf.square(apart))) / count
        mean, variance = (_with_gradient_of_rows(replica_batch, each) for each in (mean, variance))
        return tf.squeeze(mean), tf.squeeze(variance)

    return moments


def _rows_of(replica_batch, value):
    """Returns what a replica has computed of its rows; zeros if it has none."""
    if replica_batch is None or not replica_batch.may_be_empty:
        return value
    return replica_batch.zero_if_empty(value)


def _with_gradient_of_rows(replica_batch, value):
    """Returns a tensor whose gradient on a replica without rows is zeros.

    A NaN of its dummy row would go to all replicas in the gradient of the all-reduce.
    """
    # TensorFlow keeps the graph of every custom gradient for as long as the process lives.
    if replica_batch is None or not replica_batch.may_be_empty:
        return value

    @tf.custom_gradient
    def receive(value):
        return tf.identity(value), replica_batch.zero_if_empty

    return receive(value)
