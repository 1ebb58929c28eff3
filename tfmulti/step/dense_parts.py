"""Strings, ragged and sparse tensors as dense tensors of numbers, which replicas can gather.

The rows of each dense tensor follow one another in the batch's order, so rows that are gathered
from several replicas can be put together again.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

_BYTES = [bytes([number]) for number in range(256)]


def to_dense(part) -> tuple[list[tf.Tensor], Callable]:
    """Returns dense tensors of numbers, and the function that makes such a part of them.

    Args:
        part: A tensor, a ragged or a sparse one, with rows; of numbers or strings.
    """
    if isinstance(part, tf.RaggedTensor):
        return _of_ragged(part)
    if isinstance(part, tf.SparseTensor):
        return _of_sparse(part)
    if part.dtype == tf.string:
        return _of_strings(part)
    return [part], lambda tensor: tensor


def _of_ragged(part):
    values, restore = to_dense(part.flat_values)
    lengths = part.nested_row_lengths()

    def ragged(*tensors):
        outer, inner = tensors[: len(lengths)], tensors[len(lengths) :]
        return tf.RaggedTensor.from_nested_row_lengths(restore(*inner), outer, validate=False)

    return [*lengths, *values], ragged


def _of_sparse(part):
    values, restore = to_dense(part.values)
    num_rows = tf.cast(part.dense_shape[0], tf.int32)
    lengths = tf.math.bincount(tf.cast(part.indices[:, 0], tf.int32), minlength=num_rows)

    def sparse(lengths, columns, *inner):
        num_rows = tf.size(lengths, out_type=tf.int64)
        numbers = tf.repeat(tf.range(num_rows), lengths)
        indices = tf.concat([numbers[:, None], columns], axis=1)
        shape = tf.concat([[num_rows], part.dense_shape[1:]], axis=0)
        made = tf.SparseTensor(indices, restore(*inner), shape)
        made.set_shape([None, *part.shape[1:]])
        return made

    return [lengths, part.indices[:, 1:], *values], sparse


def _of_strings(part):
    lengths = tf.strings.length(part)
    joined = tf.strings.reduce_join(tf.reshape(part, [-1]))
    numbers = tf.cast(tf.io.decode_raw(joined, tf.uint8), tf.int32)

    def strings(lengths, numbers):
        flat = tf.reshape(lengths, [-1])
        # By segments: cutting each string out of the joined one would copy all of it for each row.
        owners, count = tf.repeat(tf.range(tf.size(flat)), flat), tf.size(flat)
        letters = tf.gather(tf.constant(_BYTES), numbers)
        joined = tf.strings.unsorted_segment_join(letters, owners, count)
        return tf.reshape(joined, tf.shape(lengths))

    return [lengths, numbers], strings
