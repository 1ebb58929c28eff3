"""The sources of examples: arrays, which can be indexed, and streams, which cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat
from tfmulti.data.datasets import load_split
from tfmulti.sharding import PADDING_WEIGHT, ShardPlan, replica_slice
from tfmulti.step.rows import of_arguments, replica_range


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Arrays in memory or on disk (`np.memmap`); only the required rows are read.

    Attributes:
        arrays: Nested structure of arrays, each of shape `(num_examples, ...)`.
        num_examples: Number of rows.
    """

    arrays: Any
    num_examples: int

    @property
    def element_spec(self):
        """Spec of a batch without its weights, nested as `arrays`."""
        return tf.nest.map_structure(_spec_of_rows, self.arrays)

    def batches(self, plan: ShardPlan, numbers: tuple[int, ...], start, log, watched=None):
        """Returns a dataset of steps: number of rows, and each replica's rows and weights.

        No worker reads whole batches, which `watched` would be given.
        """
        leaves = tf.nest.flatten(self.arrays)
        dtypes = [tf.as_dtype(_spec_of_rows(leaf).dtype) for leaf in leaves]

        def read(epoch, step):
            values = [np.int32(plan.count(int(epoch), int(step)))]
            for number in numbers:
                rows, weights = plan.replica_batch(int(epoch), int(step), number)
                log(int(epoch), int(step), number, rows[weights > 0])
                values += [*(np.take(leaf, rows, axis=0) for leaf in leaves), weights]
            return values

        def replica_batches_of_step(epoch, step):
            types = [tf.int32, *[*dtypes, tf.float32] * len(numbers)]
            count, *values = tf.numpy_function(read, [epoch, step], types, stateful=False)
            batches = tuple(self._pack(plan, values, i) for i in range(len(numbers)))
            return tf.ensure_shape(count, []), batches

        def steps(epoch, first):
            counts = tf.data.Dataset.range(first, plan.steps_per_epoch)
            return counts.map(lambda step: (epoch, step))

        return start.flat_map(steps).map(replica_batches_of_step, num_parallel_calls=2)

    def _pack(self, plan, values, index):
        leaves = tf.nest.flatten(self.arrays)
        size = len(leaves) + 1
        *rows, weights = values[index * size : (index + 1) * size]
        static = plan.global_batch_size // plan.num_replicas if plan.has_static_shapes else None
        for value, leaf in zip(rows, leaves):
            value.set_shape([static, *leaf.shape[1:]])
        weights.set_shape([static])
        return tf.nest.pack_sequence_as(self.arrays, rows), weights


@dataclasses.dataclass(frozen=True)
class StreamSource:
    """A `tf.data.Dataset` of single examples, which every worker reads from its start.

    Attributes:
        dataset: The examples.
        num_examples: Their number.
        shuffle_buffer: Examples to shuffle among; 0 keeps the order.
    """

    dataset: tf.data.Dataset
    num_examples: int
    shuffle_buffer: int

    @property
    def element_spec(self):
        """Spec of a batch without its weights, nested as the examples."""
        return self.dataset.batch(1).element_spec

    def batches(self, plan: ShardPlan, numbers: tuple[int, ...], start, log, watched=None):
        """Returns the same; `watched` is a function of the dataset of batches of all rows."""
        first_rows = None
        if plan.remainder == "repeat_first":
            first = self.dataset.repeat().take(plan.num_replicas).batch(plan.num_replicas)
            first_rows = first.get_single_element()

        def one_pass(number):
            examples = _shuffled(self.dataset, plan.seed, number, self.shuffle_buffer)
            return examples.batch(plan.global_batch_size, drop_remainder=plan.remainder == "drop")

        def steps(epoch, first):
            begin = epoch * plan.steps_per_epoch + first
            passes = tf.data.Dataset.counter(begin // plan.steps_per_pass)
            batches = passes.flat_map(one_pass).skip(begin % plan.steps_per_pass)
            return batches.take(plan.steps_per_epoch - first)

        def split(*batch):
            batch = of_arguments(batch, self.element_spec)
            batch, num_real = _fill_batch(batch, plan, first_rows)
            batches = tuple(_replica_batch_of(batch, num_real, plan, number) for number in numbers)
            return num_real, batches

        whole = start.flat_map(steps)
        whole = whole if watched is None else watched(whole)
        return whole.map(split, num_parallel_calls=2)


def _shuffled(dataset, seed, number, buffer):
    if seed is None or not buffer:
        return dataset
    # Inside this traced function it sets the function's own seed, so that workers with
    # different TensorFlow seeds shuffle alike.
    tf.random.set_seed(1)
    seed = tf.constant(seed % (2**31), tf.int64) * 1_000_003 + number
    return dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)


def _fill_batch(batch, plan, first_rows):
    leaves = tf.nest.flatten(batch)
    num_rows = tf.shape(leaves[0])[0]
    if plan.remainder == "pad":
        index = tf.range(plan.global_batch_size) % num_rows
        return tf.nest.map_structure(lambda rows: tf.gather(rows, index), batch), num_rows
    if plan.remainder == "repeat_first":
        fill = -num_rows % plan.num_replicas
        batch = tf.nest.map_structure(
            lambda rows, first: tf.concat([rows, first[:fill]], 0), batch, first_rows
        )
        return batch, num_rows + fill
    return batch, num_rows


def _replica_batch_of(batch, num_real, plan, number):
    num_rows = tf.shape(tf.nest.flatten(batch)[0])[0]
    if plan.has_static_shapes:
        start, stop = replica_slice(plan.global_batch_size, plan.num_replicas, number)
    else:
        start, size = replica_range(num_rows, plan.num_replicas, number)
        stop = start + size
    weights = tf.where(tf.range(start, stop) < num_real, np.float32(1), PADDING_WEIGHT)
    return tf.nest.map_structure(lambda rows: rows[start:stop], batch), weights


def _spec_of_rows(array: np.ndarray) -> tf.TensorSpec:
    dtype = tf.string if array.dtype.kind in "SO" else array.dtype
    return tf.TensorSpec([None, *array.shape[1:]], dtype)


def create_source(data, shuffle_buffer: int):
    """Returns an `ArraySource` or a `StreamSource` for the user's data.

    Raises:
        ValueError: For data of another kind, arrays of unequal length, or a stream whose
            number of examples is unknown or whose order changes.
    """
    if isinstance(data, str):
        data = load_split(data)
    if isinstance(data, tf.data.Dataset):
        num_examples = int(data.cardinality())
        if num_examples < 0:
            raise ValueError(
                "A `tf.data.Dataset` must know its number of examples, so that all workers "
                f"take the same number of steps. Received: cardinality={num_examples} "
                "(-1 endless, -2 unknown). "
                "Use data.apply(tf.data.experimental.assert_cardinality(n)), with take(n) first "
                "where it is endless."
            )
        _refuse_sparse(data)
        _refuse_batches(data)
        _refuse_changing_order(data)
        return StreamSource(data, num_examples, shuffle_buffer)
    if isinstance(data, list):
        raise ValueError(
            "`data` must be a tuple: a list is several inputs without labels for Keras's `fit`. "
            f"Received: a list of {len(data)}. Use (x, y), or ((x1, x2),) for inputs alone."
        )
    if not isinstance(data, (tuple, dict, np.ndarray, tf.Tensor)):
        raise ValueError(
            "`data` must be arrays, a `tf.data.Dataset` of single examples, or the name of a "
            f"tensorflow-datasets split. Received: {type(data).__name__}. "
            "Use for example (x, y) with NumPy arrays."
        )
    # As Keras does: tf.data would stack the arrays of a list into one.
    arrays = keras.tree.lists_to_tuples(tf.nest.map_structure(_as_array, data))
    lengths = {len(array) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise ValueError(
            "All arrays of `data` must have the same number of rows. "
            f"Received: {sorted(lengths)} rows. Give one row for each example in every array."
        )
    return ArraySource(arrays, lengths.pop())


def _refuse_sparse(dataset):
    """Raises for sparse examples, of which a replica's rows cannot be cut out as of a tensor."""
    specs = tf.nest.flatten(dataset.element_spec)
    sparse = [spec for spec in specs if isinstance(spec, tf.SparseTensorSpec)]
    if sparse:
        raise ValueError(
            "A `tf.data.Dataset` must hold dense or ragged tensors in distribute_train and "
            f"distribute_eval. Received: {sparse[0]}. Use data.map with tf.sparse.to_dense."
        )


def _refuse_batches(dataset):
    """Raises for batches instead of examples; warns if batches may be meant as single examples."""
    if not keras_compat.is_batched(dataset):
        return
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    firsts = {shape[0] if shape.rank else "none" for shape in shapes}
    if firsts == {None}:
        raise ValueError(
            "A `tf.data.Dataset` must hold single examples: distribute_train and distribute_eval "
            f"make the batches. Received: a dataset of batches, {dataset.element_spec}. Pass it "
            "before .batch(), or with batch_size=None and shuffle=False of Keras's "
            "*_dataset_from_directory; or give the batches to model.fit as they are."
        )
    if len(firsts) == 1 and "none" not in firsts:
        logging.warning(
            "The dataset was made by .batch(): each of its batches of %d rows is treated as one "
            "example. Unless you intend this, pass it before .batch().",
            firsts.pop(),
        )


def _refuse_changing_order(dataset):
    """Raises for a dataset whose order changes.

    Also in one process, where no row would be lost: whether training will resume from a checkpoint
    is not known yet, and the same program must run on several workers.
    """
    found = keras_compat.find_changing_order(dataset)
    if found is not None:
        raise ValueError(
            "A `tf.data.Dataset` must have the same order on every worker and in every pass: each "
            "worker keeps its own rows of it, and training can resume within a pass. Received: "
            f"{found}. Pass it before .shuffle(), or with shuffle=False "
            "of Keras's *_dataset_from_directory: distribute_train shuffles by itself. Or give "
            ".shuffle() a seed and reshuffle_each_iteration=False, parallel calls and options "
            "deterministic=True, and sample_from_datasets a seed."
        )


def _as_array(value) -> np.ndarray:
    array = value if isinstance(value, np.memmap) else np.asarray(value)
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8").astype(object)
    if array.ndim == 0:
        raise ValueError(
            "Each array of `data` must have one row for each example. "
            f"Received: a single value {array!r}. Use arrays of shape (num_examples, ...)."
        )
    _refuse_dtype(array)
    return array


def _refuse_dtype(array):
    """Raises for dates, and for objects that are no texts, such as the rows of a mixed table."""
    objects = array.flat if array.dtype.kind == "O" else ()
    others = {type(each).__name__ for each in objects if not isinstance(each, (str, bytes))}
    if others or array.dtype.kind in "Mm":
        of = f" with values of type {', '.join(sorted(others))}" if others else ""
        raise ValueError(
            "Each array of `data` must hold only numbers or only strings. "
            f"Received: dtype {array.dtype}{of}. "
            'Use array.astype("float32"), or frame.to_numpy("float32") of a table.'
        )
