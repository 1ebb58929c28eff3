"""Memory for the tensors that MPI sends and receives, and their packing."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

MOST_BYTES = 2**30
"""The largest message: MPI counts with 32 bits."""
HALF = (tf.float16, tf.bfloat16)
"""The dtypes that most MPIs cannot add."""
# TensorFlow takes over an array without a copy if its address is a multiple of this.
_ALIGNMENT = 64
# A tensor of at least 1/8 of a bucket is sent by itself: packing would cost a copy.
_ALONE = 8


def of_rank(tensor, rank) -> tf.Tensor:
    """Sets the static rank of a tensor in a graph, and returns the tensor."""
    if not tf.executing_eagerly():
        tensor.set_shape([None] * rank)
    return tensor


def shape_of(tensor: tf.Tensor) -> tf.TensorShape | tf.Tensor:
    """Returns a tensor's static shape, or a tensor with it if the graph does not know all of it."""
    return tensor.shape if tensor.shape.is_fully_defined() else tf.shape(tensor)


def pieces_of(array, most_bytes: int = MOST_BYTES) -> list[np.ndarray]:
    """Cuts an array into pieces of at most so many bytes; a small one stays as it is."""
    if array.nbytes <= most_bytes:
        return [array]
    flat, step = array.reshape(-1), most_bytes // array.dtype.itemsize
    return [flat[begin : begin + step] for begin in range(0, flat.size, step)]


def bytes_of(array) -> list[np.ndarray]:
    """Returns the bytes of an array, in pieces that MPI can send."""
    return pieces_of(array.reshape(-1).view(np.uint8))


def empty(shape, dtype) -> np.ndarray:
    """Returns memory that TensorFlow can take over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def fill_buckets(tensors, most_bytes: int) -> list[list[int]]:
    """Returns the places of tensors to send together, the last first.

    The backward pass computes the gradients of the last layers first.
    """
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
    """Returns owners with the places of their tensors to send together, the last first.

    With one owner after the other, gradients of the last layers would wait for those of the first,
    and a worker that only sends to one other would fill the memory that MPI shares between them.
    """
    buckets = []
    for owner in sorted(set(owners)):
        places = [place for place, each in enumerate(owners) if each == owner]
        for bucket in fill_buckets([tensors[place] for place in places], most_bytes):
            buckets.append((owner, [places[i] for i in bucket]))
    return sorted(buckets, key=lambda each: min(each[1]), reverse=True)


def cut_half(tensor: tf.Tensor, num_workers: int) -> tf.Tensor:
    """Cuts a tensor of half precision into a part for each worker, as bits that NumPy knows."""
    flat = tf.bitcast(tf.reshape(tensor, [-1]), tf.uint16)
    missing = -tf.size(flat) % num_workers
    return tf.reshape(tf.pad(flat, [[0, missing]]), [num_workers, -1])


def without_halves(tensors) -> list[tf.Tensor]:
    """Returns tensors that MPI can add: those of half precision as float32."""
    return [tf.cast(x, tf.float32) if x.dtype in HALF else x for x in tensors]


@tf.function(jit_compile=True)
def add_halves(parts: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Adds all workers' values of one part, as bits; XLA does it in one pass over memory."""
    values = tf.cast(tf.bitcast(parts, dtype), tf.float32)
    return tf.bitcast(tf.cast(tf.reduce_sum(values, axis=0), dtype), tf.uint16)


def pack(tensors):
    """Concatenates several tensors of one dtype into a vector; a single tensor stays as it is."""
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def unpack(packed, originals):
    """Splits the result of `pack` into tensors of the original shapes."""
    if len(originals) == 1:
        return [packed]
    parts = tf.split(packed, [tensor.shape.num_elements() for tensor in originals])
    return [tf.reshape(part, original.shape) for part, original in zip(parts, originals)]
