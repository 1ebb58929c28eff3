"""Which worker owns which variable, and how its tensors reach all workers within a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology

_ROUND_BYTES = 16 * 2**20


def by_bytes(sizes: list[int], num_workers: int) -> list[int]:
    """Returns an owner for each variable: the largest first, to the worker that has the least.

    >>> by_bytes([4, 9, 5], 2)
    [1, 0, 1]
    """
    owned_by, held = [0] * len(sizes), [0] * num_workers
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owned_by[place] = held.index(min(held))
        held[owned_by[place]] += sizes[place]
    return owned_by


def bytes_of_each(variables, num_workers: int) -> list[int]:
    """Returns the bytes of the variables that each worker owns."""
    sizes = [bytes_of(variable) for variable in variables]
    held = [0] * num_workers
    for owner, size in zip(by_bytes(sizes, num_workers), sizes):
        held[owner] += size
    return held


def bytes_of(variable) -> int:
    """Returns the bytes of a variable's value."""
    return int(np.prod(variable.shape, dtype=np.int64)) * tf.as_dtype(variable.dtype).size


def from_owners(
    strategy: tf.distribute.Strategy, values: list[tf.Tensor], owners: list[int]
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the places of the tensors that other workers own, and these as their owners have them.

    Call it in a replica, on every worker. It goes in rounds of some megabytes, so that the old
    values and the new ones are not in memory together. Over MPI each owner broadcasts what is its
    own; otherwise the workers gather, and send as many bytes as all tensors have.

    Args:
        strategy: A strategy with one replica for each worker.
        values: Dense tensors, of the same shapes and dtypes on all workers.
        owners: The number of the worker that has the value, for each tensor.
    """
    number, before = topology.num_workers(strategy), []
    send = _gathered if getattr(strategy.extended, "broadcast", None) is None else _broadcast
    for dtype in sorted({value.dtype.name for value in values}):
        places = [place for place, value in enumerate(values) if value.dtype.name == dtype]
        own = [[place for place in places if owners[place] == worker] for worker in range(number)]
        for parts in itertools.zip_longest(*(_rounds(values, o) for o in own), fillvalue=()):
            with tf.control_dependencies(before):
                received = list(send(strategy, values, parts))
            before = [value for _, value in received]
            yield from received


def _broadcast(strategy, values, parts):
    places = [place for part in parts for place in part]
    owners = [worker for worker, part in enumerate(parts) for _ in part]
    received = strategy.extended.broadcast([values[place] for place in places], owners)
    me = topology.worker_index(strategy)
    return [(p, value) for p, owner, value in zip(places, owners, received) if owner != me]


def _gathered(strategy, values, parts):
    number, me = topology.num_workers(strategy), topology.worker_index(strategy)
    sizes = [[values[place].shape.num_elements() for place in part] for part in parts]
    length = max(map(sum, sizes))
    dtype = next(values[place].dtype for part in parts for place in part)
    # Workers gather in an order of their own, which the first element tells.
    mine = [tf.cast([me], dtype), *(tf.reshape(values[place], [-1]) for place in parts[me])]
    mine.append(tf.zeros([length - sum(sizes[me])], dtype))
    gathered = keras_compat.gather_alike(strategy, tf.concat(mine, axis=0)[tf.newaxis])
    gathered = tf.ensure_shape(gathered, [number, length + 1])
    order = tf.argsort(gathered[:, 0])
    for worker, (part, each) in enumerate(zip(parts, sizes)):
        if worker != me and part:
            row = gathered[order[worker], 1 : 1 + sum(each)]
            for place, piece in zip(part, tf.split(row, each)):
                yield place, tf.reshape(piece, values[place].shape)


def _rounds(values, places) -> list[list[int]]:
    """Cuts a worker's tensors into lists of some megabytes, in their order."""
    rounds, have = [], 0
    for place in places:
        size = values[place].shape.num_elements() * values[place].dtype.size
        if not rounds or have + size > _ROUND_BYTES:
            rounds.append([])
            have = 0
        rounds[-1].append(place)
        have += size
    return rounds
