"""Chooses the worker that owns a variable, and sends its tensors to all workers within a step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterator

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology

_ROUND_BYTES = 16 * 2**20
# Shares are uneven if the largest exceeds the mean by this factor and by this many bytes.
_EVEN, _SMALL_BYTES = 1.25, 2**20


def by_bytes(
    sizes: list[int],
    num_workers: int,
    known: dict[int, int] | None = None,
    divisible: Collection[int] = (),
) -> list[int | None]:
    """Assigns an owner to each variable: the largest first, to the worker with the fewest bytes.

    If that is uneven, variables that can be divided get no owner: each worker has a share of them.

    Args:
        sizes: The bytes of each variable.
        num_workers: The number of workers.
        known: The owners of variables that already have one, by the variables' places.
        divisible: The places of variables that can be divided over all workers.

    Returns:
        The owners; None for a variable that is to be divided.

    >>> by_bytes([4, 9, 5], 2)
    [1, 0, 1]
    >>> by_bytes([4, 9, 5], 2, known={1: 1})
    [0, 1, 0]
    >>> by_bytes([4 * 2**20, 9 * 2**20, 2**20], 2, divisible=(0, 1, 2))
    [0, None, 1]
    """
    divided: set[int] = set()
    owned_by = _greedily(sizes, num_workers, known or {}, divided)
    for place in sorted(divisible, key=lambda place: -sizes[place]):
        held = _held(sizes, owned_by, num_workers)
        if not is_uneven(held):
            break
        trial = _greedily(sizes, num_workers, known or {}, {*divided, place})
        if max(_held(sizes, trial, num_workers)) < max(held):
            divided.add(place)
            owned_by = trial
    return owned_by


def in_order(sizes: list[int], num_workers: int) -> list[int]:
    """Assigns each variable, as it is created, to the worker with the fewest bytes.

    Args:
        sizes: The bytes of each variable.
        num_workers: The number of workers.

    >>> in_order([4, 9, 5], 2)
    [0, 1, 0]
    """
    held, owned_by = [0] * num_workers, []
    for size in sizes:
        owned_by.append(with_fewest(held))
        held[owned_by[-1]] += size
    return owned_by


def with_fewest(held: list[int]) -> int:
    """Returns the worker that holds the fewest bytes, the first of several."""
    return held.index(min(held))


def is_uneven(held: list[int]) -> bool:
    """Whether one worker has many more bytes than the mean of all."""
    most, mean = max(held), sum(held) / len(held)
    return most > _EVEN * mean and most - mean > _SMALL_BYTES


def _greedily(sizes, num_workers, known, divided) -> list[int | None]:
    owned_by = [known.get(place) for place in range(len(sizes))]
    held = [0] * num_workers
    for place, owner in known.items():
        held[owner] += sizes[place]
    left = set(range(len(sizes))) - set(known) - divided
    for place in sorted(left, key=lambda place: -sizes[place]):
        owned_by[place] = with_fewest(held)
        held[owned_by[place]] += sizes[place]
    return owned_by


def _held(sizes, owned_by, num_workers) -> list[int]:
    share = sum(size for owner, size in zip(owned_by, sizes) if owner is None) // num_workers
    held = [share] * num_workers
    for owner, size in zip(owned_by, sizes):
        if owner is not None:
            held[owner] += size
    return held


def bytes_of_each(variables, num_workers: int, owned_by: list[int | None]) -> list[int]:
    """Returns the bytes of the variables that each worker owns, with its shares of divided ones."""
    return _held([owned_bytes(variable) for variable in variables], owned_by, num_workers)


def bytes_of(variable) -> int:
    """Returns the bytes of a variable's value."""
    return _bytes(variable.shape, variable.dtype)


def held_bytes(variable) -> int:
    """Returns the bytes of a variable that this worker holds: all, a part, or none."""
    if not getattr(variable, "is_here", True):
        return 0
    split = getattr(variable, "split", None)
    return _bytes(variable.shape if split is None else split.shape_of(), variable.dtype)


def _bytes(shape, dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * tf.as_dtype(dtype).size


def owned_bytes(variable) -> int:
    """Returns the bytes of a variable that one worker owns; 0 for one that is split over all."""
    return bytes_of(variable) if getattr(variable, "split", None) is None else 0


def from_owners(
    strategy: tf.distribute.Strategy,
    values: list[tf.Tensor],
    owners: list[int],
    not_kept: Container[int] = (),
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the places and the owners' values of the tensors that other workers own.

    Call it in a replica, on every worker. It sends some megabytes at a time, so that the old and
    the new values are not all in memory together. Over MPI each owner broadcasts its tensors, one
    owner after the other; otherwise the workers gather the tensors of all owners, and send as many
    bytes as these have.

    Args:
        strategy: A strategy with one replica for each worker.
        values: Dense tensors, of the same shapes and dtypes on all workers.
        owners: For each tensor, the number of the worker that has the value.
        not_kept: The places of tensors that no variable keeps, as those that are assigned to rows.
    """
    before = []
    by_mpi = getattr(strategy.extended, "broadcast", None) is not None
    send = _broadcast if by_mpi else _gathered
    for parts in _all_rounds(values, owners, not_kept, topology.num_workers(strategy), by_mpi):
        with tf.control_dependencies(before):
            received = list(send(strategy, values, parts, owners))
        # A whole variable would adopt the received buffer; rows are copied when they are assigned.
        if by_mpi:
            received = [
                (p, v if p in not_kept else _in_tensorflows_memory(strategy, v))
                for p, v in received
            ]
        before = [value for _, value in received]
        yield from received


def _all_rounds(values, owners, not_kept, number, by_mpi) -> Iterator[tuple]:
    """Yields the places of tensors to send at once, those of each owner or of all together."""
    # Sorted, because a set of texts has another order in each process.
    kinds = sorted({(value.dtype.name, i in not_kept) for i, value in enumerate(values)})
    for dtype, rows in kinds:
        places = [
            i for i, x in enumerate(values) if x.dtype.name == dtype and (i in not_kept) == rows
        ]
        # A gather sends as much for each owner as for that with the most: the largest go together.
        largest = places if by_mpi else sorted(places, key=lambda place: -_num_bytes(values[place]))
        own = [[place for place in largest if owners[place] == worker] for worker in range(number)]
        # All rows of a variable are sent together, and the others one after the other.
        each = [places] if by_mpi and not rows else own
        # A gather needs all workers: an owner that has sent everything takes part with nothing.
        yield from itertools.zip_longest(*(_rounds(values, x) for x in each), fillvalue=())


def receive_from(strategy, value: tf.Tensor, owner: int, shape) -> tf.Tensor:
    """Returns the owner's tensor on all workers.

    Call it in a replica, on every worker.

    Args:
        strategy: A strategy with one replica for each worker.
        value: The tensor on its owner; elsewhere one of the same dtype.
        owner: The number of the worker that has it.
        shape: Its shape.
    """
    if getattr(strategy.extended, "receive", None) is not None:
        received = strategy.extended.receive(value, owner, shape)
    else:
        received = receive_as_sum(strategy, value, owner, shape)
    return tf.ensure_shape(received, shape)


def receive_as_sum(strategy, value: tf.Tensor, owner: int, shape) -> tf.Tensor:
    """Does as `receive_from` by adding the tensor and the others' zeros."""
    is_here = owner == topology.worker_index(strategy)
    own = value if is_here else tf.zeros(shape, value.dtype)
    added = all_reduce(strategy, tf.cast(own, keras_compat.SENT_AS.get(own.dtype, own.dtype)))
    return tf.cast(added, value.dtype)


def reduce_to(strategy, value: tf.Tensor, owner: int) -> tf.Tensor:
    """Returns the sum of a tensor over all workers on its owner; elsewhere the result is undefined.

    Args:
        strategy: A strategy with one replica for each worker.
        value: A dense tensor of at least 32 bits.
        owner: The number of the worker that needs the sum.
    """
    reduce_to_owners = getattr(strategy.extended, "reduce_to_owners", None)
    if reduce_to_owners is None or adds_together(strategy):
        return _collective(strategy, value)
    return reduce_to_owners([value], [owner])[0]


def adds_together(strategy: tf.distribute.Strategy) -> bool:
    """Whether sums for one owner cost as much as for all, unless those for all are made at once."""
    return getattr(strategy.extended, "adds_together", False)


def all_reduce(strategy, value: tf.Tensor) -> tf.Tensor:
    """Returns the sum of a tensor over all workers; over MPI it also works in a branch."""
    own = getattr(strategy.extended, "add", None)
    return _collective(strategy, value) if own is None else own([value])[0]


def add_parts(strategy, values: tf.Tensor) -> tf.Tensor:
    """Returns the sum over all workers of a few numbers, also in a branch of a step.

    TensorFlow gathers in a branch, and does not add there. Numbers that are 0 on all workers but
    one, and counts, have a sum that does not depend on the order of the workers.

    Args:
        strategy: A strategy with one replica for each worker.
        values: A tensor of such numbers, at least 32 bits each.
    """
    if getattr(strategy.extended, "add", None) is not None:
        return all_reduce(strategy, values)
    gathered = keras_compat.gather_from_workers(strategy, values[tf.newaxis])
    return tf.reduce_sum(gathered, axis=0)


def _collective(strategy, value):
    # An all-reduce needs a tensor with a device; a weight created without one is read without one.
    with tf.device(strategy.extended.worker_devices[0]):
        value = tf.identity(value)
    # Verification switches reductions off, but sharded weights and norms need these.
    with keras_compat.reducing_as_usual(strategy):
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def _broadcast(strategy, values, parts, owners):
    places = [place for part in parts for place in part]
    owners = [owners[place] for place in places]
    received = strategy.extended.broadcast([values[place] for place in places], owners)
    me = topology.worker_index(strategy)
    return [(p, value) for p, owner, value in zip(places, owners, received) if owner != me]


def _in_tensorflows_memory(strategy, value):
    """Copies a value from MPI, so that a variable on the CPU does not keep MPI's memory.

    TensorFlow with oneDNN never returns freed memory, as of the variable's old value, to the
    system: the worker would hold both. The copy reuses such memory.
    """
    if "GPU" in strategy.extended.worker_devices[0]:
        return value
    return tf.raw_ops.DeepCopy(x=value)


def _gathered(strategy, values, parts, _owners):
    number, me = topology.num_workers(strategy), topology.worker_index(strategy)
    sizes = [[values[place].shape.num_elements() for place in part] for part in parts]
    length = max(map(sum, sizes))
    dtype = next(values[place].dtype for part in parts for place in part)
    # The gathered rows are in no known order of workers: the first element is the worker's number.
    mine = [tf.cast([me], dtype), *(tf.reshape(values[place], [-1]) for place in parts[me])]
    # A gather takes tensors of one shape, so shorter ones are padded.
    mine.append(tf.zeros([length - sum(sizes[me])], dtype))
    gathered = keras_compat.gather_from_workers(strategy, tf.concat(mine, axis=0)[tf.newaxis])
    gathered = tf.ensure_shape(gathered, [number, length + 1])
    order = tf.argsort(gathered[:, 0])
    for worker, (part, each) in enumerate(zip(parts, sizes)):
        if worker != me and part:
            row = gathered[order[worker], 1 : 1 + sum(each)]
            for place, piece in zip(part, tf.split(row, each)):
                yield place, tf.reshape(piece, values[place].shape)


def _num_bytes(value):
    return value.shape.num_elements() * value.dtype.size


def _rounds(values, places):
    sizes = [_num_bytes(values[place]) for place in places]
    return [[places[at] for at in some] for some in rounds(sizes)]


def rounds(sizes: list[int], most_bytes: int = _ROUND_BYTES) -> list[list[int]]:
    """Groups tensors into lists of some megabytes, in their order.

    Args:
        sizes: The bytes of each tensor.
        most_bytes: The largest number of bytes in a list; a larger tensor gets its own list.

    Returns:
        The places of the tensors in each list.

    >>> rounds([3, 4, 5, 9], 8)
    [[0, 1], [2], [3]]
    """
    found, have = [], 0
    for place, size in enumerate(sizes):
        if not found or have + size > most_bytes:
            found.append([])
            have = 0
        found[-1].append(place)
        have += size
    return found
