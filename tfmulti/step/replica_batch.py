"""The rows of a step that one replica receives: its replica batch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import keras
import tensorflow as tf

from tfmulti.step import weighting

_local = threading.local()


@dataclasses.dataclass
class ReplicaBatch:
    """One replica's rows of a step, while the step is traced.

    Attributes:
        num_rows: Rows that the model sees, int32 scalar.
        num_real: Rows without padding, int32 scalar; an empty replica batch has one padding row.
        may_be_empty: Whether `num_real` can be 0.
        model: The Keras model of this step, or None.
        num_global: Rows of all replicas without padding, float32 scalar; None until counted.
    """

    num_rows: tf.Tensor
    num_real: tf.Tensor
    may_be_empty: bool = False
    model: keras.Model | None = None
    num_global: tf.Tensor | None = None

    def count_globally(self) -> tf.Tensor:
        """Returns the number of rows of all replicas without padding, a float32 scalar.

        It is a collective, once a step, if the data pipeline does not know the number.
        """
        # Not a cached_property: before Python 3.12 its lock makes the threads of two replicas
        # wait for each other.
        if self.num_global is None:
            context = tf.distribute.get_replica_context()
            num_real = tf.cast(self.num_real, tf.float32)
            if context.num_replicas_in_sync > 1:
                num_real = context.all_reduce(tf.distribute.ReduceOp.SUM, num_real)
            self.num_global = num_real
        return self.num_global

    @property
    def weight(self) -> tf.Tensor:
        """Weight of this replica's mean in the mean over all replicas, float32 scalar."""
        return weighting.row_weight(self.num_real, self.count_globally())


def current_replica_batch() -> ReplicaBatch | None:
    """Returns the replica batch of the step that this thread traces, or None outside a step."""
    return getattr(_local, "replica_batch", None)


@contextlib.contextmanager
def as_current(replica_batch: ReplicaBatch | None):
    """Makes `replica_batch` the current one; None means outside a step."""
    previous = current_replica_batch()
    _local.replica_batch = replica_batch
    try:
        yield replica_batch
    finally:
        _local.replica_batch = previous
