"""Sums of tensors over replicas, in dtypes that collectives can send."""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat

# Collectives between workers and GPUs add floats, int32 and int64 only.
_SENT_AS = {
    **keras_compat.SENT_AS,
    tf.complex64: tf.float32,
    tf.complex128: tf.float64,
}


def to_send(value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor in a dtype that collectives add; complex numbers as pairs."""
    dtype = _SENT_AS.get(value.dtype, value.dtype)
    return tf.bitcast(value, dtype) if value.dtype.is_complex else tf.cast(value, dtype)


def from_sent(value: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor of a dtype that `to_send` has converted."""
    return tf.bitcast(value, dtype) if dtype.is_complex else tf.cast(value, dtype)


def add_by_dtype(values) -> list[tf.Tensor]:
    """Adds values over all replicas, grouped by dtype, so that workers can pack each group."""
    added: list = [None] * len(values)
    groups: dict = {}
    for index, value in enumerate(values):
        # `MirroredStrategy` reduces int32 on the host, and refuses two such values at once.
        alone = index if value.dtype == tf.int32 else None
        groups.setdefault((value.dtype.name, alone), []).append(index)
    for alike in groups.values():
        sums = tf.distribute.get_replica_context().all_reduce("SUM", [values[i] for i in alike])
        for index, value in zip(alike, sums):
            added[index] = value
    return added
