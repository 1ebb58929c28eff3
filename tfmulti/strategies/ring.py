"""Sums for one worker each, over TensorFlow's collectives between CPUs.

An all-reduce gives every worker the whole sum of every gradient. Where each gradient has one owner,
an all-to-all sends it there alone: half the bytes, and no worker holds what others own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import owners

# What a worker sends at once, to all others together. Larger tensors are cut.
_ROUND_BYTES = 16 * 2**20
_PIECE_BYTES = 8 * 2**20
# All rounds at once would need memory for all of them.
_AT_ONCE = 2
_SENT = (tf.float32, tf.float64)


class RingCalls:
    """The calls of `keras_compat.CustomAllReduceExtended` that TensorFlow's ring can do as well.

    Creating it is a collective.

    Args:
        strategy: A strategy with one replica for each worker, on CPUs.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = weakref.ref(strategy)
        self._worker = topology.worker_index(strategy)
        self._order = keras_compat.order_of_workers(strategy, self._worker)

    def receive(self, tensor: tf.Tensor, owner: int, shape: tf.TensorShape) -> tf.Tensor:
        """Returns the owner's tensor on all workers.

        Args:
            tensor: The tensor on its owner; elsewhere one of the same dtype, of any shape.
            owner: The number of the worker that has it.
            shape: Its shape.
        """
        size, most = shape.num_elements(), _PIECE_BYTES // tensor.dtype.size
        is_owner = owner == self._worker
        if tensor.dtype not in _SENT or not size:
            return owners.receive_as_sum(self._strategy(), tensor, owner, shape)
        sizes = [min(most, size - begin) for begin in range(0, size, most)]
        pieces = tf.split(tf.reshape(tensor, [-1]), sizes) if is_owner else [tensor] * len(sizes)
        received = [
            keras_compat.broadcast_from(self._strategy(), piece, [size], is_owner)
            for piece, size in zip(pieces, sizes)
        ]
        if not is_owner:
            return tf.reshape(tf.concat(received, 0), shape)
        # TensorFlow leaves out broadcasts whose results nothing needs; these are copies.
        with tf.control_dependencies(received):
            return tf.identity(tensor)

    def reduce_to_owners(self, tensors: list[tf.Tensor], owned_by: list[int]) -> list[tf.Tensor]:
        """Returns the sums over all workers of the tensors that this worker owns, zeros for others.

        Args:
            tensors: Dense tensors of one dtype, of the same shapes on all workers.
            owned_by: For each tensor, the number of the worker that needs the sum.
        """
        dtype = tensors[0].dtype
        if dtype not in _SENT or not all(each.shape.is_fully_defined() for each in tensors):
            return tf.distribute.get_replica_context().all_reduce("SUM", tensors)
        # TensorFlow does not create zeros that nobody reads.
        sums = [tf.zeros(each.shape, dtype) for each in tensors]
        found: dict[int, list] = {}
        received: list = []
        for pieces in self._rounds(tensors, owned_by):
            with tf.control_dependencies(received[-_AT_ONCE : 1 - _AT_ONCE]):
                received.append(self._exchange(tensors, pieces))
            for (place, *_), value in zip(pieces[self._worker], self._add(received[-1], pieces)):
                found.setdefault(place, []).append(value)
        for place, values in found.items():
            value = values[0] if len(values) == 1 else tf.concat(values, 0)
            sums[place] = tf.reshape(value, tensors[place].shape)
        return sums

    def _rounds(self, tensors, owned_by) -> Iterator[list]:
        """Yields what is sent at once: for each owner a list of (place, first element, number)."""
        most = max(1, _ROUND_BYTES // len(self._order) // tensors[0].dtype.size)
        each: list[list] = [[] for _ in self._order]
        left = [0] * len(each)
        # A backward pass has the gradients of the last layers first.
        for place in reversed(range(len(tensors))):
            owner, begin = owned_by[place], 0
            while begin < (size := tensors[place].shape.num_elements()):
                if not left[owner]:
                    each[owner].append([])
                    left[owner] = most
                number = min(left[owner], size - begin)
                each[owner][-1].append((place, begin, number))
                left[owner] -= number
                begin += number
        yield from itertools.zip_longest(*each, fillvalue=())

    def _exchange(self, tensors, pieces) -> tf.Tensor:
        """Returns this worker's pieces as all workers sent them, in a row for each worker."""
        lengths = [sum(number for *_, number in of) for of in pieces]
        sent = []
        for worker in self._order:
            for place, begin, number in pieces[worker]:
                sent.append(tf.reshape(tensors[place], [-1])[begin : begin + number])
            # All rows must have one length.
            sent.append(tf.zeros([max(lengths) - lengths[worker]], tensors[0].dtype))
        rows = tf.reshape(tf.concat(sent, 0), [len(self._order), max(lengths)])
        return keras_compat.exchange_rows(self._strategy(), rows)

    def _add(self, received, pieces) -> list[tf.Tensor]:
        """Returns the sums of this worker's pieces; all of them have one dimension."""
        numbers = [number for *_, number in pieces[self._worker]]
        total = tf.reduce_sum(received, 0)
        return tf.split(total[: sum(numbers)], numbers) if numbers else []
