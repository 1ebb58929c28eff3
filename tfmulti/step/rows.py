"""Counts, pads and splits the rows of a batch: dense, ragged or sparse."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

_NEGATIVE_ZERO = -(2**31)
_KINDS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


class Counted(NamedTuple):
    """A replica batch, and the number of rows of the whole step.

    Attributes:
        replica_batch: The rows of one replica.
        num_global: Rows of all replicas without padding, int32 scalar.
    """

    replica_batch: Any
    num_global: tf.Tensor


def without_count(data):
    """Returns the replica batch without the count."""
    return data.replica_batch if isinstance(data, Counted) else data


def parts_of(data) -> list | None:
    """Returns the tensors of a batch, or None where one of them has no rows."""
    parts = [part for part in tf.nest.flatten(data, expand_composites=False) if part is not None]
    known = all(isinstance(part, _KINDS) and part.shape.rank for part in parts)
    return parts if parts and known else None


def count_rows(part) -> tf.Tensor:
    """Returns the number of rows of a tensor, an int32 scalar; a constant if it is static."""
    if part.shape[0] is not None:
        return tf.constant(part.shape[0])
    if isinstance(part, tf.RaggedTensor):
        return tf.cast(part.nrows(), tf.int32)
    if isinstance(part, tf.SparseTensor):
        return tf.cast(part.dense_shape[0], tf.int32)
    return tf.shape(part)[0]


def without_padding(data):
    """Cuts off the padding rows at the end of a replica batch."""
    weights = data[2] if isinstance(data, tuple) and len(data) == 3 else None
    if not isinstance(weights, tf.Tensor) or weights.dtype != tf.float32 or not weights.shape.rank:
        return data
    marked = tf.bitcast(weights, tf.int32) == _NEGATIVE_ZERO
    is_padding = tf.reduce_all(marked, axis=list(range(1, weights.shape.rank)))
    num_real = tf.shape(is_padding)[0] - tf.reduce_sum(tf.cast(is_padding, tf.int32))
    return _map(lambda part: part[:num_real], data)


def fill_if_empty(data):
    """Adds one padding row, of zeros or empty, to a batch without rows."""
    if parts_of(data) is None:
        return data
    return _map(_fill_part, data)


def take_replica_rows(data, number: tf.Tensor, num_replicas: int):
    """Takes one of `num_replicas` contiguous parts of a batch; sizes differ by at most one."""
    number = tf.cast(number, tf.int32)

    def take(part):
        replica_batch, longer = count_rows(part) // num_replicas, count_rows(part) % num_replicas
        start = number * replica_batch + tf.minimum(number, longer)
        size = replica_batch + tf.cast(number < longer, tf.int32)
        if not isinstance(part, tf.SparseTensor):
            return part[start : start + size]
        shape = tf.cast(part.dense_shape, tf.int64)
        starts = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], axis=0)
        sizes = tf.concat([[tf.cast(size, tf.int64)], shape[1:]], axis=0)
        return _keep_shape(tf.sparse.slice(part, starts, sizes), part)

    return _map(take, data)


def _map(function, data):
    def apply(part):
        return None if part is None else function(part)

    return tf.nest.map_structure(apply, data, expand_composites=False)


def _fill_part(part):
    empty = count_rows(part) == 0
    if isinstance(part, tf.RaggedTensor):
        last = tf.repeat(part.row_splits[-1:], tf.cast(empty, tf.int32))
        splits = tf.concat([part.row_splits, last], axis=0)
        return tf.RaggedTensor.from_row_splits(part.values, splits, validate=False)
    if isinstance(part, tf.SparseTensor):
        rows = tf.maximum(part.dense_shape[:1], 1)
        shape = tf.concat([rows, part.dense_shape[1:]], axis=0)
        return _keep_shape(tf.SparseTensor(part.indices, part.values, shape), part)
    filled = tf.cond(empty, lambda: _padding_row(part), lambda: tf.identity(part))
    if not tf.executing_eagerly():
        filled.set_shape([None, *part.shape[1:]])
    return filled


def _padding_row(tensor):
    shape = tf.concat([[1], tf.shape(tensor)[1:]], axis=0)
    row = tf.fill(shape, "") if tensor.dtype == tf.string else tf.zeros(shape, tensor.dtype)
    return tf.ensure_shape(row, [None, *tensor.shape[1:]])


def _keep_shape(sparse, original):
    sparse.set_shape([None, *original.shape[1:]])
    return sparse
