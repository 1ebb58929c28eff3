"""Replacements in how Keras reads data: its iterators, adapters and numbers of batches."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_data_adapter
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_experimental_dataset_ops

from tfmulti.keras_compat import replacement
from tfmulti.runtime.scoped import with_attributes


def only_iterators_in_use(original):
    """Leaves out the iterator that Keras creates after each epoch, and then does not use.

    Creating one for several replicas takes longer than a short epoch, and it reads ahead. Other
    data than arrays and `distribute_train`'s may know of it: a shuffle has a new order for each.

    Args:
        original: `EpochIterator._enumerate_iterator`.
    """

    def enumerate_epoch(self):
        steps = original(self)
        for step in steps:
            yield step
            is_known = _ignores_iterators(self.data_adapter) and self._num_batches
            is_whole = self.steps_per_epoch is None and is_known
            if is_whole and self._steps_seen >= self._num_batches:
                # The next line of Keras's function would create one.
                steps.close()
                self._current_iterator = None
                self.data_adapter.on_epoch_end()
                return

    return enumerate_epoch


def _ignores_iterators(adapter) -> bool:
    """Whether the order of data in an epoch does not depend on how many iterators were created."""
    is_own = hasattr(getattr(adapter, "_dataset", None), "distribute_to")
    return is_own or isinstance(adapter, array_data_adapter.ArrayDataAdapter)


def shuffled_alike(original):
    """Shuffles arrays alike on all workers, of which each takes its rows of every batch.

    Args:
        original: `ArrayDataAdapter.get_tf_dataset`.
    """

    def get_tf_dataset(self):
        if context.global_seed() is not None:
            # Then Keras does so, in one order for all epochs.
            return original(self)
        seeds = np.random.default_rng(replacement.order_seed())

        def shuffle(value):
            seed = tf.numpy_function(lambda: seeds.integers(2**62, size=2), [], tf.int64)
            return tf.random.experimental.stateless_shuffle(value, tf.ensure_shape(seed, [2]))

        with with_attributes(tf.random, shuffle=shuffle):
            return original(self)

    return get_tf_dataset


class _OfLength:
    """Wraps a data adapter and gives it another number of batches."""

    def __init__(self, adapter, num_batches):
        self._adapter, self.num_batches = adapter, num_batches

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def number_of_batches(epoch_iterator, num_local_replicas: int) -> int | None:
    """Returns the steps of a pass on this worker; None if only the end of the data shows them.

    For data of `distribute_datasets_from_function` Keras counts the batches of all local replicas
    as steps, and ends with "Your input ran out of data".
    """
    adapter = epoch_iterator.data_adapter
    number = adapter.num_batches
    if number is None:
        return None
    if getattr(adapter, "_dataset", None) is epoch_iterator._distributed_dataset:
        return -(-number // num_local_replicas)
    return number


def set_number_of_batches(epoch_iterator, number: int | None) -> None:
    """Makes a pass end after `number` steps, or at the end of the data if it is None."""
    adapter = epoch_iterator.data_adapter
    if adapter.num_batches != number:
        # Not `_num_batches`: `fit` then calls `reset`, which reads it from the adapter again.
        epoch_iterator.data_adapter = _OfLength(adapter, number)


def follow_position(epoch_iterator) -> None:
    """Makes a pass over a dataset with `steps_left` continue at the dataset's position.

    Keras then runs only the remaining steps, numbered as in a whole pass.
    """
    dataset = getattr(epoch_iterator.data_adapter, "_dataset", None)
    if not hasattr(dataset, "steps_left"):
        return
    if epoch_iterator.steps_per_epoch not in (None, dataset.plan.steps_per_epoch):
        return
    # Otherwise Keras keeps one iterator from epoch to epoch, and warns if fewer steps are left.
    epoch_iterator.steps_per_epoch = None
    enumerate_whole = type(epoch_iterator)._enumerate_iterator

    def enumerate_rest():
        left = dataset.steps_left()
        done = dataset.plan.steps_per_epoch - left
        epoch_iterator._num_batches = left
        if not left:
            dataset.end_pass()
            return
        for begin, end, iterator in enumerate_whole(epoch_iterator):
            yield begin + done, end + done, iterator

    epoch_iterator._enumerate_iterator = enumerate_rest


def distributed_dataset_of(epoch_iterator):
    """Returns the distributed dataset that Keras iterates over."""
    return epoch_iterator._distributed_dataset


def feed_of(epoch_iterator) -> tuple:
    """Returns the user's own dataset or None, whether all batches have the same size, and shapes.

    The shapes are those of the parts of a batch, as a step is traced for.
    """
    own = getattr(epoch_iterator.data_adapter, "_dataset", None)
    spec = getattr(epoch_iterator._distributed_dataset, "element_spec", None)
    leaves = [getattr(x, "_value_specs", (x,))[0] for x in tf.nest.flatten(spec)]
    shapes = [x.shape for x in leaves if getattr(x, "shape", None) is not None]
    return own, any(shape.rank and shape[0] is not None for shape in shapes), shapes


def first_of_copy(dataset):
    """Returns the first batch of a copy of a dataset; None if it cannot be copied.

    Drawing from the dataset itself would make `shuffle` begin the first epoch with its second
    order, and not with that of one device. A dataset that runs Python code, such as a generator,
    cannot be copied.

    Args:
        dataset: A `tf.data.Dataset`; for anything else the result is None.
    """
    if not isinstance(dataset, tf.data.Dataset) or hasattr(dataset, "distribute_to"):
        return None
    try:
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph().numpy())
        for node in [each for each in graph.node if each.op == "ShuffleDatasetV3"]:
            # With a copied handle, the copy would share the generator of orders.
            seeds = graph.node.add(name=f"{node.name}_seeds", op="DummySeedGenerator")
            node.input[4] = seeds.name
        variant = gen_experimental_dataset_ops.dataset_from_graph(graph.SerializeToString())
        return next(iter(dataset_ops.from_variant(variant, dataset.element_spec)), None)
    except (tf.errors.OpError, ValueError, TypeError):
        return None
