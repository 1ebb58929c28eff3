"""Finds out what a `tf.data.Dataset` was made of, without reading it."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfmulti.keras_compat.reference import operations_of


def shuffles_anew(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset may have another order in each pass, or on each worker.

    A shuffle with a seed and `reshuffle_each_iteration=False` has the same order each time.
    """
    return any(map(_is_shuffled_anew, made_of(dataset)))


def source_tensors(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    """Returns what a dataset was made of: arrays, names of files, the seeds of its shuffles."""
    tensors = []
    for each in made_of(dataset):
        tensors += getattr(each, "_tensors", ())
        if type(each).__name__ == "_ShuffleDataset":
            tensors.append(tf.stack([each._seed, each._seed2]))
    readable = [t for t in tensors if hasattr(t, "numpy")]
    return [t for t in readable if t.shape.rank and t.dtype not in (tf.variant, tf.resource)]


def made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yields a dataset and all those that it was made of."""
    yield dataset
    for each in dataset._inputs():
        yield from made_of(each)


def _is_shuffled_anew(dataset) -> bool:
    if type(dataset).__name__ == "_ShuffleDataset":
        seeds = [tf.get_static_value(seed) for seed in (dataset._seed, dataset._seed2)]
        return dataset._reshuffle_each_iteration is not False or not any(seeds)
    # As in an interleave of files, each of which is shuffled.
    kinds = [kind for each in dataset._functions() for kind in operations_of(each.function)]
    return any("ShuffleDataset" in kind for kind in kinds)
