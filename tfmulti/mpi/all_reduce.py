"""Adds tensors over all workers through MPI, or sends them, while TensorFlow computes.

One thread of a worker makes all MPI calls, in the order of the program, which is the same on all
workers. The graph starts a sum as soon as its tensors are computed, and fetches the results after
all sums that were requested together have been started. So the backward pass overlaps with the sums
of layers whose gradients are finished, if the worker has more than one core. MPI reads large
tensors where they are in memory, without a copy; small ones are packed together.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.mpi import buffers
from tfmulti.mpi.calls import PROGRESS_S, MpiCalls
from tfmulti.mpi.order import CollectiveOrder

DEFAULT_BUCKET_BYTES = 4 * 2**20
CACHED_PIECE_BYTES = 2**20
"""Piece size for workers of one host, which add in shared memory: such pieces fit in the cache."""
MPI_CALLS = (
    "add",
    "add_among",
    "broadcast",
    "exchange_among",
    "receive",
    "receive_sent",
    "reduce_to_owners",
    "send",
)
"""The methods of `MpiAllReduce` that a strategy over MPI gets."""
_MESSAGE_TAG = 7


class MpiAllReduce:
    """Adds tensors over all workers of a job.

    Args:
        communicator: mpi4py's communicator of all workers.
        check_peers: Function that is called repeatedly while a result is awaited, and raises if
            another worker does not answer.
        bucket_bytes: Bytes of small tensors to send together.
        piece_bytes: Bytes of a large tensor that MPI adds in one call.
        order: Compares the collectives of workers that wait for long; None compares nothing.
    """

    def __init__(
        self,
        communicator,
        check_peers: Callable[[], None],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        piece_bytes: int = buffers.MOST_BYTES,
        order: CollectiveOrder | None = None,
    ):
        self._communicator = communicator
        self._bucket_bytes = bucket_bytes
        self._size = communicator.size
        self._pieces = functools.partial(buffers.pieces_of, most_bytes=piece_bytes)
        self._groups: dict[tuple[int, ...], object] = {}
        # On one core, a sum and the backward pass would only take turns.
        self._overlaps = len(os.sched_getaffinity(0)) > 1
        with tf.init_scope(), tf.device("CPU:0"):
            # All MPI calls read and write it, so TensorFlow keeps them in the program's order.
            self._last = tf.Variable(0, dtype=tf.int64, trainable=False, name="tfmulti_last")
        self._order = order or CollectiveOrder(communicator.rank)
        self._calls = MpiCalls(check_peers, self._order)

    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums over all workers; float16 and bfloat16 are sent in their own dtype.

        Args:
            tensors: Dense tensors, of the same shapes on all workers.
        """
        return self._in_buckets(self._add_packed, tensors)

    def broadcast(self, tensors: list[tf.Tensor], owners: list[int]) -> list[tf.Tensor]:
        """Returns the value that each tensor has on its owner.

        Args:
            tensors: Dense tensors, of the same shapes and dtypes on all workers.
            owners: For each tensor, the number of the worker that has the value.
        """
        received = list(tensors)
        others = [owner for owner in range(self._size) if owner != self._communicator.rank]
        for place, value in self._by_owner(self._receive, tensors, owners, others):
            received[place] = value
        return received

    def receive(self, tensor: tf.Tensor, owner: int, shape: tf.TensorShape) -> tf.Tensor:
        """Returns the owner's tensor on all workers; the owner does not wait for the others.

        Args:
            tensor: The tensor on its owner; elsewhere one of the same dtype, of any shape.
            owner: The number of the worker that has it.
            shape: Its shape.
        """
        method = functools.partial(self._receive_shaped, owner, tuple(shape))
        received = self._run([method], [tensor], rank=shape.rank)[0]
        return tensor if owner == self._communicator.rank else received

    def reduce_to_owners(self, tensors: list[tf.Tensor], owners: list[int]) -> list[tf.Tensor]:
        """Returns the sums over all workers of the tensors that this worker owns, zeros for others.

        Args:
            tensors: Dense tensors, of the same shapes on all workers.
            owners: For each tensor, the number of the worker that needs the sum.
        """
        # TensorFlow does not create zeros that nobody reads.
        sums = [tf.zeros(buffers.shape_of(tensor), tensor.dtype) for tensor in tensors]
        own = [self._communicator.rank]
        wide = buffers.without_halves(tensors)
        for place, value in self._by_owner(self._reduce_to, wide, owners, own):
            sums[place] = tf.cast(value, tensors[place].dtype)
        return sums

    def send(self, tensors: list[tf.Tensor], to: int) -> list[tf.Tensor]:
        """Sends tensors to one worker, which calls `receive_sent`; does not wait for it.

        Args:
            tensors: Dense tensors.
            to: The number of the worker.

        Returns:
            Tensors that are available once the sending has begun, for control dependencies.
        """
        if not tensors:
            return []
        method = functools.partial(self._send_to, to)

        def begin(_, *arrays):
            return [self._calls.begin(method, *arrays, is_awaited=False)]

        return self._call(begin, tensors, [])

    def receive_sent(self, specs: list[tf.TensorSpec], source: int) -> list[tf.Tensor]:
        """Returns the tensors that one worker has sent with `send`.

        Args:
            specs: The specs of the tensors, with known ranks.
            source: The number of the worker that sends.
        """
        if not specs:
            return []
        kinds = [(spec.dtype.as_numpy_dtype, spec.shape.rank) for spec in specs]
        method = functools.partial(self._receive_sent, source, kinds)
        [ticket] = self._call(lambda _: [self._calls.begin(method)], [], [])
        results = tf.numpy_function(self._calls.finish, [ticket], [spec.dtype for spec in specs])
        return [
            tf.ensure_shape(result, spec.shape)
            for result, spec in zip(tf.nest.flatten(results), specs)
        ]

    def add_among(self, tensors: list[tf.Tensor], workers: list[int]) -> list[tf.Tensor]:
        """Returns the sums over some workers; only these call it.

        Args:
            tensors: Dense tensors, of the same shapes on these workers.
            workers: The numbers of these workers.
        """
        method = functools.partial(self._add_among, tuple(workers))
        wide = buffers.without_halves(tensors)
        sums = self._in_buckets(lambda packed: self._run([method] * len(packed), packed), wide)
        return [
            tf.ensure_shape(tf.cast(new, old.dtype), old.shape) for new, old in zip(sums, tensors)
        ]

    def exchange_among(self, tensors: list[tf.Tensor], workers: list[int]) -> list[tf.Tensor]:
        """Sends a tensor to each of some workers, and returns the tensors that they send here.

        Args:
            tensors: Dense tensors of one dtype and rank, one for each worker.
            workers: The numbers of these workers, without this one; each of them calls it too.
        """
        kinds = [(x.dtype.as_numpy_dtype, x.shape.rank) for x in tensors]
        method = functools.partial(self._exchange_among, workers, kinds)

        def exchange(_, *arrays):
            number = self._calls.begin(method, *arrays)
            return [number, *self._calls.finish(number)]

        received = self._call(exchange, tensors, [tensor.dtype for tensor in tensors])[1:]
        return [buffers.of_rank(new, old.shape.rank) for new, old in zip(received, tensors)]

    def _by_owner(self, method, tensors, owners, results) -> Iterator[tuple[int, tf.Tensor]]:
        """Calls a method of an owner and an array, for buckets of each owner's tensors.

        Yields places and results, only of those owners whose results this worker gets.
        """
        buckets = buffers.owned_buckets(tensors, owners, self._bucket_bytes)
        methods = [functools.partial(method, owner) for owner, _ in buckets]
        packed = [buffers.pack([tensors[i] for i in bucket]) for _, bucket in buckets]
        for (owner, bucket), value in zip(buckets, self._run(methods, packed)):
            if owner in results:
                value = tf.reshape(value, [-1]) if len(bucket) > 1 else value
                for place, part in zip(bucket, buffers.unpack(value, [tensors[i] for i in bucket])):
                    yield place, tf.ensure_shape(part, tensors[place].shape)

    def _in_buckets(self, add, tensors) -> list[tf.Tensor]:
        """Packs small tensors, adds all with a function of packed ones, and unpacks the sums."""
        sums: list = [None] * len(tensors)
        buckets = buffers.fill_buckets(tensors, self._bucket_bytes)
        packed = [buffers.pack([tensors[place] for place in bucket]) for bucket in buckets]
        for bucket, added in zip(buckets, add(packed)):
            for place, part in zip(bucket, buffers.unpack(added, [tensors[p] for p in bucket])):
                sums[place] = part
        return sums

    def _add_packed(self, packed) -> list[tf.Tensor]:
        """Adds over all workers; most MPIs cannot add half precision, so workers add it as float32.

        Each worker adds its part of such a tensor, and all gather the sums of the parts.
        """
        halves = [i for i, tensor in enumerate(packed) if tensor.dtype in buffers.HALF]
        methods = [self._exchange if i in halves else self._add for i in range(len(packed))]
        sent = [
            buffers.cut_half(tensor, self._size) if i in halves else tensor
            for i, tensor in enumerate(packed)
        ]
        added = self._run(methods, sent)
        parts = [buffers.add_halves(added[i], packed[i].dtype) for i in halves]
        for i, whole in zip(halves, self._run([self._gather] * len(parts), parts, rank=1)):
            flat = tf.bitcast(whole, packed[i].dtype)[: tf.size(packed[i])]
            added[i] = tf.reshape(flat, tf.shape(packed[i]))
        if not tf.executing_eagerly():
            for tensor, original in zip(added, packed):
                tensor.set_shape(original.shape)
        return added

    def _run(self, methods, tensors, rank: int | None = None) -> list[tf.Tensor]:
        """Makes an MPI call for each tensor; in one operation if nothing can overlap with them.

        Args:
            methods: For each tensor, the method of this object that MPI's thread calls.
            tensors: The tensors.
            rank: The rank of the results; None for the ranks of the tensors.
        """
        if not tensors:
            return []
        if len(tensors) == 1 or not self._overlaps:
            fetched = self._call(
                lambda _, *arrays: self._calls.begin_and_finish(methods, arrays),
                tensors,
                [tensor.dtype for tensor in tensors],
            )
        else:
            tickets = [
                self._call(
                    lambda _, array, call=call: [self._calls.begin(call, array)], [tensor], []
                )
                for call, tensor in zip(methods, tensors)
            ]
            with tf.control_dependencies([ticket for [ticket] in tickets]):
                fetched = [None] + [
                    tf.numpy_function(self._calls.finish, ticket, tensor.dtype)
                    for ticket, tensor in zip(tickets, tensors)
                ]
        ranks = [tensor.shape.rank if rank is None else rank for tensor in tensors]
        return [buffers.of_rank(tensor, rank) for tensor, rank in zip(fetched[1:], ranks)]

    def _call(self, function, tensors, dtypes) -> list[tf.Tensor]:
        """Calls a Python function in the graph, after all earlier such calls.

        The function takes an unused number and the tensors; its first result is the number of an
        MPI call, its further results have the given dtypes.
        """
        with tf.name_scope(keras_compat.COMMUNICATION):
            with tf.control_dependencies(tensors):
                last = self._last.read_value()
            # TensorFlow unwraps a single result.
            results = tf.nest.flatten(
                tf.numpy_function(function, [last, *tensors], [tf.int64, *dtypes])
            )
            results[0].set_shape([])
            self._last.assign(results[0])
        return results

    def _send_to(self, to, *arrays):
        shapes = np.array([size for array in arrays for size in array.shape], np.int64)
        for array in (shapes, *arrays):
            for piece in buffers.bytes_of(array):
                request = self._communicator.Isend(piece, dest=to, tag=_MESSAGE_TAG)
                self._calls.sending.append((request, piece))

    def _receive_sent(self, source, kinds):
        sizes = np.empty(sum(rank for _, rank in kinds), np.int64)
        # A blocking receive would poll all the time, on a core that computes what comes before.
        while not self._communicator.Iprobe(source=source, tag=_MESSAGE_TAG):
            time.sleep(PROGRESS_S)
        for piece in buffers.bytes_of(sizes):
            self._communicator.Recv(piece, source=source, tag=_MESSAGE_TAG)
        arrays, sizes = [], iter(sizes.tolist())
        for dtype, rank in kinds:
            shape = [next(sizes) for _ in range(rank)]
            arrays.append(buffers.empty(tuple(shape), np.dtype(dtype)))
            for piece in buffers.bytes_of(arrays[-1]):
                self._communicator.Recv(piece, source=source, tag=_MESSAGE_TAG)
        return arrays

    def _add(self, array, communicator=None):
        if communicator is None:
            self._order.note("all-reduce", array.shape)
        result = buffers.empty(array.shape, array.dtype)
        for sent, received in zip(self._pieces(array), self._pieces(result)):
            (communicator or self._communicator).Allreduce(sent, received)
        return result

    def _add_among(self, workers, array):
        if workers not in self._groups:
            group = self._communicator.group.Incl(workers)
            self._groups[workers] = self._communicator.Create_group(group)
        return self._add(array, self._groups[workers])

    def _exchange_among(self, workers, kinds, *arrays):
        for worker, array in zip(workers, arrays):
            self._send_to(worker, array)
        return [self._receive_sent(w, [kind])[0] for w, kind in zip(workers, kinds)]

    def _exchange(self, array):
        self._order.note("all-to-all", array.shape)
        result = buffers.empty(array.shape, array.dtype)
        self._communicator.Alltoall(array, result)
        return result

    def _gather(self, array):
        self._order.note("all-gather", array.shape)
        result = buffers.empty((self._size, *array.shape), array.dtype)
        self._communicator.Allgather(array, result)
        return result.reshape(-1)

    def _receive(self, owner, array):
        return self._receive_shaped(owner, array.shape, array)

    def _receive_shaped(self, owner, shape, array):
        """Broadcasts the owner's array as bytes, since MPI does not know every dtype."""
        self._order.note(f"broadcast from worker {owner}", shape)
        is_own = owner == self._communicator.rank
        whole = array if is_own else buffers.empty(shape, array.dtype)
        for piece in self._pieces(whole.reshape(-1).view(np.uint8)):
            self._communicator.Bcast(piece, root=owner)
        # The owner does not need a copy of its own tensor.
        return np.zeros([0] * len(shape), array.dtype) if is_own else whole

    def _reduce_to(self, owner, array):
        """Adds an array over all workers for its owner; the others need no result."""
        self._order.note(f"reduce to worker {owner}", array.shape)
        is_own = owner == self._communicator.rank
        shape = array.shape if is_own else (0,) * array.ndim
        result = buffers.empty(shape, array.dtype)
        received = self._pieces(result) if is_own else itertools.repeat(None)
        for sent, part in zip(self._pieces(array), received):
            self._communicator.Reduce(sent, part, root=owner)
        return result
