"""Finds the numbers of rows of a dataset's batches without reading the dataset."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

# Datasets that pass on the batches that they receive, in order.
_SAME = ("_PrefetchDataset", "_OptionsDataset", "CacheDataset", "_ModelDataset")
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset")
# The sizes of more batches than this are not enumerated.
_MOST = 1_000_000


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a part's batches: `full` rows, except every `period`-th batch with `last`."""

    full: int
    last: int
    period: int
    number: float
    leaves: int

    def of(self, index: int) -> tuple[int, ...]:
        is_last = (index + 1) % self.period == 0
        return (self.last if is_last else self.full,) * self.leaves


def batch_sizes_of(epoch_iterator) -> list[tuple[int, ...]] | None:
    """Returns the different sizes of batches, or None if they are unknown.

    Args:
        epoch_iterator: Keras's iterator.

    Returns:
        For each different batch the number of rows of each part, or one number for all parts.
    """
    adapter = epoch_iterator.data_adapter
    if hasattr(adapter, "_inputs") and hasattr(adapter, "partial_batch_size"):
        last = adapter.partial_batch_size
        full = [(adapter.batch_size,)] if not last or adapter.num_batches > 1 else []
        return full + ([(last,)] if last else [])
    return batch_sizes_of_dataset(getattr(adapter, "_dataset", None))


def batch_sizes_of_dataset(dataset) -> list[tuple[int, ...]] | None:
    """Returns the same for a `tf.data.Dataset`.

    Example:
    >>> data = tf.data.Dataset.range(10).batch(4)
    >>> batch_sizes_of_dataset(data.prefetch(2)), batch_sizes_of_dataset(data.skip(1))
    ([(4,), (2,)], None)
    """
    # A shuffle of batches keeps their sizes, but within a zip it would pair them otherwise.
    while type(dataset).__name__ in (*_SAME, "_ShuffleDataset"):
        dataset = dataset._input_dataset
    parts = _parts(dataset)
    if not parts:
        return None
    # After the product of all periods the sizes repeat.
    cycle = math.prod(part.period for part in parts)
    number = int(min(cycle, *(part.number for part in parts)))
    if number > _MOST:
        return None
    batches = [sum((part.of(index) for part in parts), ()) for index in range(number)]
    return list(dict.fromkeys(batches)) or None


def _parts(dataset) -> list[_Sizes] | None:
    kind = type(dataset).__name__
    if kind == "_ZipDataset":
        parts = [_parts(inner) for inner in tf.nest.flatten(getattr(dataset, "_datasets", None))]
        return None if None in parts else [size for part in parts for size in part]
    source = getattr(dataset, "_input_dataset", None)
    if source is None:
        return None
    if kind in _SAME:
        return _parts(source)
    if kind == "_RepeatDataset":
        return _repeated(_parts(source), dataset)
    if kind not in _BATCHES or not _is_dense(dataset):
        return None
    full, drop = _value(dataset, "_batch_size"), _value(dataset, "_drop_remainder")
    rows = int(source.cardinality())
    if full is None or drop is None or (rows == tf.data.UNKNOWN_CARDINALITY and not drop):
        return None
    leaves = len(tf.nest.flatten(dataset.element_spec))
    # Infinitely many rows, or no smaller last batch: all batches are full.
    if rows < 0:
        return [_Sizes(int(full), int(full), 1, float("inf"), leaves)]
    number = rows // int(full) if drop else -(-rows // int(full))
    last = int(full) if drop else rows - (number - 1) * int(full)
    return [_Sizes(int(full), last, 1 if last == full else number, number, leaves)]


def _repeated(parts, dataset):
    """Returns the sizes of a repeated dataset, whose parts begin together again in each pass."""
    count = _value(dataset, "_count")
    if parts is None or count is None:
        return None
    least = min(part.number for part in parts)
    times = float("inf") if count < 0 else int(count)
    again = []
    for part in parts:
        if part.number > least and part.period == part.number:
            # Another part ends before this part's last batch.
            part = _Sizes(part.full, part.full, 1, least, part.leaves)
        if least % part.period:
            return None
        again.append(dataclasses.replace(part, number=least * times))
    return again


def _is_dense(dataset) -> bool:
    return all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(dataset.element_spec))


def _value(dataset, name):
    return tf.get_static_value(getattr(dataset, name, None))
