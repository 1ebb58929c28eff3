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


def values_of_gradient(gradient) -> tf.Tensor:
    """Returns the numbers of a gradient: of a sparse one those of its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def with_values(gradient, values: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Returns a gradient with other numbers, and the same rows where it is sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def add_by_dtype(values, owners=None) -> list:
    """Adds values over all replicas, grouped by dtype, so that workers can pack each group.

    Args:
        values: Tensors or `tf.IndexedSlices`.
        owners: For each value, the worker that alone needs the sum, or None if all need it; None
            instead of a list if all need all.
    """
    context, added = tf.distribute.get_replica_context(), list(values)
    owners = [None] * len(added) if owners is None else owners
    groups: dict = {}
    for index, (value, owner) in enumerate(zip(added, owners)):
        # `MirroredStrategy` reduces int32 on the host, and refuses two such values at once.
        alone = index if value.dtype == tf.int32 else None
        groups.setdefault((value.dtype.name, alone, owner is not None), []).append(index)
    for (*_, is_owned), indices in groups.items():
        parts = [added[index] for index in indices]
        if is_owned:
            own = [owners[index] for index in indices]
            sums = context.strategy.extended.reduce_to_owners(parts, own)
        else:
            sums = context.all_reduce("SUM", parts)
        for index, total in zip(indices, sums):
            added[index] = total
    return added
