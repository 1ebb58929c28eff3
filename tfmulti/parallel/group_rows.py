"""Exchanges rows between the workers of a group that compute a split layer together.

Each worker of a group starts with its own rows and all features, and computes its part of the layer
for the rows of the whole group. Before that, an all-gather gives it all rows, or an all-to-all its
part of the features of all rows. Afterwards a reduce-scatter adds the workers' results, or an
all-to-all joins their features, and each worker has its own rows again, as in data parallelism.
(This is sequence parallelism, but over rows: Korthikanti et al., 2022,
https://arxiv.org/abs/2205.05198.)

Each exchange is the gradient of another one. Workers may have different numbers of rows, or none.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfmulti import topology
from tfmulti.step.rows import current_replica_batch


@dataclasses.dataclass(frozen=True)
class Group:
    """The workers that have the parts of a layer.

    Attributes:
        strategy: A strategy with one replica for each worker, over MPI.
        parts: The number of workers in a group: worker i is in group `i // parts`.
    """

    strategy: tf.distribute.Strategy
    parts: int

    @property
    def me(self) -> int:
        """The number of this worker in its group."""
        return topology.worker_index(self.strategy) % self.parts

    def all_gather(self, own: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of all workers of the group, and how many rows each of them has."""

        @tf.custom_gradient
        def gather(own):
            parts = self._swap([own] * self.parts)
            counts = tf.stack([tf.shape(part)[0] for part in parts])
            rows = _shaped(tf.concat(parts, 0), own)
            return (rows, counts), lambda up, _: self.reduce_scatter(up, counts)

        return gather(own)

    def reduce_scatter(self, whole: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Adds a tensor over the workers of the group, and returns this worker's rows of the sum.

        Args:
            whole: This worker's summand, with the rows of all workers.
            counts: How many rows each worker has.
        """

        @tf.custom_gradient
        def add(whole):
            parts = self._swap(self._rows_of_each(whole, counts))
            return _shaped(_sum(parts), whole), lambda up: self.all_gather(up)[0]

        return add(whole)

    def rows_to_features(
        self, own: tf.Tensor, sizes: list[int], axis: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchanges all features of own rows for own features of all rows: an all-to-all.

        Args:
            own: This worker's rows.
            sizes: How many features each worker takes.
            axis: The axis of the features.

        Returns:
            This worker's features of all workers' rows, and how many rows each worker has.
        """

        @tf.custom_gradient
        def exchange(own):
            parts = self._swap(tf.split(own, sizes, axis))
            counts = tf.stack([tf.shape(part)[0] for part in parts])
            rows = _shaped(tf.concat(parts, 0), own, axis, sizes[self.me])
            return (rows, counts), lambda up, _: self.features_to_rows(up, counts, sizes, axis)

        return exchange(own)

    def features_to_rows(
        self, whole: tf.Tensor, counts: tf.Tensor, sizes: list[int], axis: int
    ) -> tf.Tensor:
        """Exchanges own features of all rows for all features of own rows: an all-to-all.

        Args:
            whole: This worker's features of all workers' rows.
            counts: How many rows each worker has.
            sizes: How many features each worker has.
            axis: The axis of the features.
        """

        @tf.custom_gradient
        def exchange(whole):
            parts = self._swap(self._rows_of_each(whole, counts))
            rows = _shaped(tf.concat(parts, axis), whole, axis, sum(sizes))
            return rows, lambda up: self.rows_to_features(up, sizes, axis)[0]

        return exchange(whole)

    def _rows_of_each(self, whole, counts):
        return tf.split(whole, counts, num=self.parts)

    def _swap(self, tensors):
        """Sends each worker of the group its tensor, and returns those that they send here."""
        first = topology.worker_index(self.strategy) - self.me
        others = [worker for worker in range(self.parts) if worker != self.me]
        received = self.strategy.extended.exchange_among(
            [tensors[worker] for worker in others], [first + worker for worker in others]
        )
        swapped = list(tensors)
        for worker, tensor in zip(others, received):
            swapped[worker] = tensor
        return swapped


def with_dummy_row(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns as many rows as another tensor has; a dummy row is zeros."""
    batch = current_replica_batch()
    if batch.may_be_empty:
        missing = tf.shape(like)[0] - tf.shape(rows)[0]
        padded = tf.pad(rows, tf.pad([[0, missing]], [[0, tf.rank(rows) - 1], [0, 0]]))
        rows = _shaped(padded, rows)
    return rows


def _shaped(tensor, like, axis=0, size=None):
    """Returns a tensor with the static shape of another one, except for the rows and one axis."""
    shape = [None, *like.shape[1:]]
    shape[axis] = size
    return tf.ensure_shape(tensor, shape)


def _sum(parts):
    """Adds tensors in the order of workers; float16 and bfloat16 in float32, as a product is."""
    dtype = parts[0].dtype
    if dtype.size > 2:
        return tf.add_n(parts)
    return tf.cast(tf.add_n([tf.cast(part, tf.float32) for part in parts]), dtype)
