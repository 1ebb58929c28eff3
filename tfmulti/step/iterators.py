"""The iterator from which Keras's functions draw a replica batch for each local replica."""

from __future__ import annotations

import itertools
import weakref

import tensorflow as tf

from tfmulti import topology
from tfmulti.step import rows


def to_replicas(strategy: tf.distribute.Strategy, batches: tuple):
    """Combines the local replicas' batches into one distributed value."""
    if strategy.num_replicas_in_sync == 1:
        return batches[0]
    first = topology.first_local_replica(strategy)

    parts = [tf.nest.flatten(batch, expand_composites=False) for batch in batches]
    places = [place for place, part in enumerate(parts[0]) if part is not None]

    def value_of(context):
        own = parts[context.replica_id_in_sync_group - first]
        return [own[place] for place in places]

    whole = [None] * len(parts[0])
    distributed = strategy.experimental_distribute_values_from_function(value_of)
    for place, part in zip(places, distributed):
        whole[place] = part
    return tf.nest.pack_sequence_as(batches[0], whole, expand_composites=False)


class ReplicaIterator(tf.experimental.ExtensionType, tf.distribute.DistributedIterator):
    """Gives each local replica its replica batch of a step.

    Keras treats it as a distributed iterator, and `tf.function` as a composite tensor, so that
    a new iterator for each epoch does not cause a retrace.
    """

    iterator: tf.data.Iterator
    source: int

    @property
    def element_spec(self):
        """Spec of one replica batch."""
        return _owner(self).element_spec

    def get_next(self):
        """Draws the next step, with its number of rows, and counts it as taken."""
        owner = _owner(self)
        waiting = getattr(owner, "waiting", None)
        if waiting is None:
            return owner.take(next(self.iterator))
        return owner.take(waiting.measure(lambda: next(self.iterator)))

    def get_next_as_optional(self):
        """Draws the next step as a `tf.experimental.Optional` of replica batches."""
        return OptionalBatches(self.iterator.get_next_as_optional(), self.source)

    def peek(self):
        """Draws a step to inspect it, without counting it as taken."""
        return rows.as_user_sees(_owner(self).peek(next(self.iterator)))

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return rows.without_count(self.get_next())
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error


def create_iterator(owner, number: int, pipeline: tf.data.Dataset) -> ReplicaIterator:
    """Makes an iterator over a pipeline of replica batches, for a registered owner."""
    with tf.device("CPU:0"):
        iterator = ReplicaIterator(iter(pipeline), number)
    # An extension type takes no further attributes, but the owner must live as long as it does.
    object.__setattr__(iterator, "_owner", owner)
    return iterator


class OptionalBatches(tf.experimental.ExtensionType):
    """The replica batches of the next step, or nothing at the end of the data."""

    optional: tf.experimental.Optional
    source: int

    def has_value(self):
        """Whether there is another step."""
        return self.optional.has_value()

    def get_value(self):
        """Returns the replica batches and counts the step as taken."""
        return _owner(self).take(self.optional.get_value())


# Extension types hold tensors and plain values only; the owner is found by its number.
_owners: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(owner) -> int:
    """Registers an object with `element_spec`, `take` and `peek`; returns its number."""
    number = next(_numbers)
    _owners[number] = owner
    return number


def _owner(value):
    return _owners[value.source]


class SplitBatches:
    """Distributes a dataset of global batches by splitting each batch into replica batches.

    TensorFlow does this for dense batches. Its own code fails for ragged and sparse ones when a
    replica gets no row ("Serialized sparse should have at least 1 serialized tensor", "Tensor's
    shape (0,) is not compatible"). Every worker reads all batches, as with TensorFlow itself.

    Args:
        dataset: The batches, the same on every worker.
        strategy: The strategy whose replicas take them.
        on_demand: Whether batches are drawn only when a step takes them.
        in_chunks: Whether they are divided as TensorFlow divides dense ones.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        on_demand: bool = False,
        in_chunks: bool = False,
    ):
        self.strategy, self.element_spec = strategy, dataset.element_spec
        numbers, count = topology.local_batch_indices(strategy), strategy.num_replicas_in_sync

        def cut(*parts):
            batch = rows.of_arguments(parts, dataset.element_spec)
            return tuple(
                rows.take_replica_rows(batch, number, count, in_chunks=in_chunks)
                for number in numbers
            )

        if on_demand:
            # Nothing is read ahead: a callback may change what a generator yields next.
            self._batches = dataset.map(cut)
        else:
            self._batches = dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)
        self._number = register(self)

    def __iter__(self) -> ReplicaIterator:
        return create_iterator(self, self._number, self._batches)

    def take(self, batches: tuple):
        """Returns a step's replica batches as one distributed value."""
        return to_replicas(self.strategy, batches)

    peek = take
