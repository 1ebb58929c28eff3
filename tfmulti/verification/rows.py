"""A few rows of the first batch, the same on all workers, and their replica batches."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmulti import topology
from tfmulti.keras_compat import MAX_BYTES, MAX_ROWS, without_rows
from tfmulti.sharding import PADDING_WEIGHT, is_padding
from tfmulti.step import iterators, rows
from tfmulti.step.rows import Counted, Padded


class Rows:
    """Some rows and their structure: dense, ragged or sparse tensors, or None.

    Args:
        batch: `x`, `(x, y)` or `(x, y, sample_weight)`.

    Attributes:
        counts: The number of rows that each part has in the first batch.
        unlike: Numbers of rows of which replicas have unlike shares, where later batches may
            have such; else empty.
        many: Many rows of the first batch; empty if a few are all.
        all_parts: As many rows as the first batch has, if they are not many; else empty.
        open_axes: The axes of each part that have other sizes in later batches, without the first.
    """

    def __init__(self, batch):
        self.structure = batch
        leaves = tf.nest.flatten(batch, expand_composites=False)
        self.parts = [_as_tensor(leaf) for leaf in leaves if leaf is not None]
        self.counts = [int(rows.count_rows(part)) for part in self.parts]
        if not all(self.counts):
            self.parts = tf.nest.flatten(rows.fill_if_empty(self.parts), expand_composites=False)
        self.unlike: list[int] = []
        self.many: list = []
        self.all_parts: list = []
        self.open_axes: list[tuple[int, ...]] = [() for _ in self.parts]

    def note_shapes(self, shapes: Sequence[tf.TensorShape]) -> None:
        """Notes which axes of the parts have unknown sizes.

        Args:
            shapes: Those of the parts, and of nothing before them; may be fewer.
        """
        self.open_axes = [
            _open_axes(part, shape) for part, shape in zip(self.parts, shapes)
        ] + self.open_axes[len(shapes) :]

    def pack(self, parts):
        """Returns parts in the batch's structure."""
        left = iter(parts)
        leaves = tf.nest.flatten(self.structure, expand_composites=False)
        leaves = [None if leaf is None else next(left) for leaf in leaves]
        return tf.nest.pack_sequence_as(self.structure, leaves, expand_composites=False)

    @property
    def are_unequal(self) -> bool:
        """Whether parts of the batch have different numbers of rows."""
        return len(set(self.counts)) > 1

    def first(self, sizes: Sequence[int], parts: list | None = None) -> list:
        """Returns the first rows of each part, repeated if there are too few.

        Args:
            sizes: The number of rows of each part.
            parts: The parts; by default the few rows that are kept of them.
        """
        parts = self.parts if parts is None else parts
        have = [int(rows.count_rows(part)) for part in parts]
        times = [-(-size // max(number, 1)) for size, number in zip(sizes, have)]
        return [rows.take_rows(_repeat(p, t), 0, size) for p, t, size in zip(parts, times, sizes)]

    def spread(self, sizes: Sequence[int], *, padded: bool = False) -> list:
        """Returns rows spread over the batch: sorted rows would be too similar.

        Args:
            sizes: The number of rows of each part.
            padded: Whether some rows may be padding rows, which are skipped.
        """
        have = [int(rows.count_rows(part)) for part in self.parts]
        if self.are_unequal:
            chosen = [_indices_all_over(range(n), size) for n, size in zip(have, sizes)]
            return [_gather(part, indices) for part, indices in zip(self.parts, chosen)]
        return self._spread_alike(min(have), sizes[0], padded)

    def choose_many(self, few: int, most: int, *, padded: bool = False) -> list:
        """Returns the first batch if it is small, else many of its rows; [] if few are all.

        Args:
            few: The number of rows that are run anyway.
            most: The number of rows that one device may compute at once.
            padded: Whether some rows may be padding rows, which are skipped.
        """
        have = min(int(rows.count_rows(part)) for part in self.parts)
        size = sum(_num_bytes(part) for part in self.parts) / max(have, 1)
        number = min(have, most, MAX_ROWS, int(MAX_BYTES / max(size, 1)))
        if self.are_unequal or number <= few:
            return []
        return self.parts if number == have and not padded else self.spread([number], padded=padded)

    @property
    def whole(self) -> list:
        """As many rows as a batch has, as far as they are kept."""
        return self.many or self.all_parts

    def keep_all(self) -> None:
        """Keeps as many rows as a batch of all workers has, if they are not many and small."""
        if not self.many and sum(map(_num_bytes, self.parts)) <= MAX_BYTES:
            self.all_parts = self.first(self.counts)

    @property
    def num_many(self) -> int:
        """The number of rows in `many`."""
        return int(rows.count_rows(self.many[0])) if self.many else 0

    def some_of_many(self, number: int) -> list:
        """Returns the first of the many rows.

        Args:
            number: How many.
        """
        return [rows.take_rows(part, 0, number) for part in self.many]

    def _spread_alike(self, have, number, padded):
        counted = range(have)
        if padded and self.roles()[-1] == 2:
            weights = self.parts[-1].numpy().reshape([have, -1])[:, 0]
            counted = np.flatnonzero(~is_padding(weights)).tolist() or counted
        chosen = _indices_all_over(counted, number)
        return [_gather(part, chosen) for part in self.parts]

    def roles(self) -> list[int]:
        """Returns the role of each part: 0 for inputs, 1 for labels, 2 for sample weights."""
        whole = self.structure if isinstance(self.structure, (tuple, list)) else [self.structure]
        leaves = [tf.nest.flatten(each, expand_composites=False) for each in whole]
        return [min(i, 2) for i, each in enumerate(leaves) for leaf in each if leaf is not None]

    def twice(self, parts: list) -> list:
        """Returns parts with all rows repeated once."""
        return [_repeat(part, 2) for part in parts]

    def fit(self, others: Rows) -> bool:
        """Whether each part has the sizes of another's, but for rows and open axes."""
        pairs = zip(self.parts, others.parts, self.open_axes)
        return all(
            not isinstance(part, tf.Tensor)
            or all(
                part.shape[axis] == other.shape[axis] or axis in axes
                for axis in range(1, part.shape.rank)
            )
            for part, other, axes in pairs
        )

    def form(self) -> tuple:
        """Returns a key that is equal for batches of the same structure."""
        names = [str(path) for path, _ in keras.tree.flatten_with_path(self.structure)]
        kinds = [(type(part).__name__, part.dtype.name, part.shape.rank) for part in self.parts]
        return tuple(names), tuple(kinds)


def of_the_chief(chosen: Rows, known: tuple, strategy, broadcast) -> tuple:
    """Gives every worker the chief's rows, and returns what the chief knows; it is a collective.

    Args:
        chosen: Rows; its `parts`, `many` and `all_parts` become the chief's.
        known: What this worker knows of the data.
        strategy: The strategy.
        broadcast: Function of the strategy and the chief's bytes, which are None elsewhere.
    """
    data = None
    if topology.is_chief(strategy):
        lists = chosen.parts, chosen.many, chosen.all_parts
        flat = [tf.nest.flatten(each, expand_composites=True) for each in lists]
        data = pickle.dumps(([[tensor.numpy() for tensor in each] for each in flat], known))
    lists, known = pickle.loads(broadcast(strategy, data))
    # The lists have other numbers of rows than this worker's parts.
    structure = specs_of(chosen.parts, static=False)
    chosen.parts, chosen.many, chosen.all_parts = (
        tf.nest.pack_sequence_as(structure, list(map(tf.constant, each)), expand_composites=True)
        if each
        else []
        for each in lists
    )
    return known


def specs_of(parts: list, static: bool, open_axes: Sequence = ()) -> list[tf.TypeSpec]:
    """Returns the input signature of a trace.

    Args:
        parts: The parts.
        static: Whether all sizes are known, also the number of rows.
        open_axes: More axes of each part whose size is unknown unless `static`.
    """
    axes = itertools.chain(() if static else open_axes, itertools.repeat(()))
    return [_spec(part, static, some) for part, some in zip(parts, axes)]


def take_replica_batches(strategy, batch, *, counted: bool, padded: bool, in_chunks: bool = False):
    """Splits a batch for the local replicas, as the data pipeline does, within a trace.

    Args:
        strategy: The strategy.
        batch: The rows of all replicas.
        counted: Whether the pipeline provides the number of rows of a step.
        padded: Whether it pads replica batches to the same number of rows.
        in_chunks: Whether each replica takes as many rows as the first one, while there are any.

    Returns:
        A distributed value.
    """
    number = strategy.num_replicas_in_sync
    num_rows = rows.count_rows(rows.parts_of(batch)[0])
    batches = []
    for index in topology.local_batch_indices(strategy):
        replica_batch = rows.take_replica_rows(batch, index, number, in_chunks=in_chunks)
        if padded:
            replica_batch = _pad(replica_batch, -(-num_rows // number))
        batches.append(Counted(replica_batch, num_rows) if counted else replica_batch)
    return iterators.to_replicas(strategy, tuple(batches))


def _pad(replica_batch, most):
    parts = rows.parts_of(replica_batch)
    missing = most - rows.count_rows(parts[0])

    def fill(part):
        return tf.concat([part, tf.repeat(tf.zeros_like(part[:1]), missing, axis=0)], axis=0)

    x, y, *weights = replica_batch
    own = weights[0] if weights else tf.ones(rows.count_rows(parts[0]))
    own = tf.cast(own, tf.float32)
    shape = tf.concat([[missing], tf.shape(own)[1:]], axis=0)
    filled = tf.concat([own, tf.fill(shape, PADDING_WEIGHT)], axis=0)
    return Padded(*tf.nest.map_structure(fill, (x, y)), filled)


def _indices_all_over(counted, number):
    last = len(counted) - 1
    indices = [round(i * last / max(number - 1, 1)) for i in range(number)]
    if last < number - 1:
        indices = [i % len(counted) for i in range(number)]
    # The last row comes first: a step may take fewer rows.
    return [counted[index] for index in [*indices[-1:], *indices[:-1]]]


def _as_tensor(leaf):
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    return leaf if isinstance(leaf, kinds) else tf.convert_to_tensor(leaf)


def _repeat(part, times):
    if times == 1:
        return part
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.concat(0, [part] * times)
    return tf.concat([part] * times, axis=0)


def _gather(part, indices):
    if isinstance(part, tf.SparseTensor):
        return tf.sparse.concat(0, [rows.take_rows(part, index, 1) for index in indices])
    return tf.gather(part, indices)


def _num_bytes(part) -> int:
    tensors = tf.nest.flatten(part, expand_composites=True)
    return sum(int(tf.size(each)) * max(each.dtype.size, 1) for each in tensors)


def _open_axes(part, shape):
    if not isinstance(part, tf.Tensor) or shape.rank != part.shape.rank:
        return ()
    return tuple(axis for axis in range(1, shape.rank) if shape[axis] is None)


def _spec(part, static, open_axes):
    if static:
        return tf.type_spec_from_value(part)
    spec = without_rows(part)
    if not open_axes:
        return spec
    sizes = [None if axis in open_axes else size for axis, size in enumerate(spec.shape)]
    return tf.TensorSpec(sizes, spec.dtype)
