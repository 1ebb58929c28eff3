"""Values of the first replica for all replicas, in steps that each computes from all rows.

All replicas then compute the same, except for random numbers that TensorFlow draws without a seed
and for kernels of GPUs that add in any order. Every replica takes the first one's gradients, state
and logs, so that all hold the same weights.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.runtime.scoped import Scoped
from tfmulti.step.logs import add_by_dtype

_number = Scoped(None)


def in_replicated_step() -> bool:
    """Whether this thread traces a step that every replica computes from the whole batch."""
    return _number.value is not None


def replica_number() -> tf.Tensor:
    """Returns the job-wide number of the replica, also within a step that hides it."""
    context = tf.distribute.get_replica_context()
    number = context.replica_id_in_sync_group if _number.value is None else _number.value
    return tf.cast(number, tf.int32)


def as_one_device(step):
    """Wraps a step so that it has the whole batch, and the number of the first replica."""

    def whole(data):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        with _number.set_to(number), keras_compat.as_first_replica():
            return step(data)

    return whole


def of_first_replica(values) -> list:
    """Returns the first replica's values on all replicas.

    It is a collective. Whole numbers must be exact in the dtype in which they are sent.

    Args:
        values: Tensors, `tf.IndexedSlices` and None. All replicas have the same rows of a table,
            so of `tf.IndexedSlices` only the values are sent.
    """
    is_first = replica_number() == 0
    own = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
    present = [tf.convert_to_tensor(value) for value in own if value is not None]
    sent = [tf.cast(value, keras_compat.SENT_AS.get(value.dtype, value.dtype)) for value in present]
    sent = [tf.where(is_first, value, tf.zeros_like(value)) for value in sent]
    with keras_compat.reducing_over_replicas(_number.value):
        added = add_by_dtype(sent)
    added = iter(tf.cast(total, value.dtype) for total, value in zip(added, present))
    return [None if value is None else _like(value, next(added)) for value in values]


def _like(value, total):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(total, value.indices, value.dense_shape)
    return total
