"""Memory and packing of what goes to MPI and comes from it."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_MOST_BYTES = 2**30
# TensorFlow takes over an array without a copy where it begins at a multiple of this.
_ALIGNMENT = 64
# A tensor above this fraction of a bucket is not worth a copy.
_ALONE = 8


def of_rank(tensor, rank) -> tf.Tensor:
    """Tells TensorFlow how many axes a tensor has."""
    if not tf.executing_eagerly():
        tensor.set_shape([None] * rank)
    return tensor


def shape_of(tensor: tf.Tensor) -> tf.TensorShape | tf.Tensor:
    """Returns a tensor's shape, as a tensor where the graph does not know all of it."""
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)


def bytes_of(array) -> list[np.ndarray]:
    """Cuts an array into pieces whose bytes MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[begin : begin + _MOST_BYTES] for begin in range(0, flat.size, _MOST_BYTES)]


def empty(shape, dtype) -> np.ndarray:
    """Returns memory that TensorFlow can take over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def fill_buckets(tensors, most_bytes: int) -> list[list[int]]:
    """Returns places of tensors that are sent together, the last first: they are there first."""
    buckets: list[list[int]] = []
    filling: dict[tf.DType, tuple[list[int], int]] = {}
    for place in reversed(range(len(tensors))):
        tensor = tensors[place]
        size = tensor.shape.num_elements()
        size = most_bytes if size is None else size * tensor.dtype.size
        if size * _ALONE >= most_bytes:
            buckets.append([place])
            continue
        bucket, have = filling.pop(tensor.dtype, ([], 0))
        if have + size > most_bytes:
            buckets.append(bucket)
            bucket, have = [], 0
        filling[tensor.dtype] = ([*bucket, place], have + size)
    return buckets + [bucket for bucket, _ in filling.values()]


def owned_buckets(tensors, owners: list[int], most_bytes: int) -> list[tuple[int, list[int]]]:
    """Returns owners and places of their tensors that are sent together, the last first.

    One owner after the other, the gradients of the last layers would wait for those of the first,
    and a worker that only sends to another would fill the memory that MPI shares between them.
    """
    buckets = []
    for owner in sorted(set(owners)):
        places = [place for place, each in enumerate(owners) if each == owner]
        for bucket in fill_buckets([tensors[place] for place in places], most_bytes):
            buckets.append((owner, [places[i] for i in bucket]))
    return sorted(buckets, key=lambda each: min(each[1]), reverse=True)


def pack(tensors):
    """Makes one tensor of several of one dtype."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unpack(packed, originals):
    """Takes what `pack` has made apart again."""
    if len(originals) == 1:
        return [packed]
    parts = tf.split(packed, [tensor.shape.num_elements() for tensor in originals])
    return [tf.reshape(part, original.shape) for part, original in zip(parts, originals)]
