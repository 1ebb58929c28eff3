"""The rows of a step that one replica received."""

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
    """One replica's part of a step, while the step is traced.

    Attributes:
        num_rows: Rows that the model sees, int32 scalar.
        num_real: Rows that count, int32 scalar; of a replica without a row the one that the model
            sees is filler.
        may_be_empty: Whether `num_real` can be 0.
        model: The Keras model of this step, or None.
        num_global: The rows of all replicas that count, float32 scalar, once they are known.
    """

    num_rows: tf.Tensor
    num_real: tf.Tensor
    may_be_empty: bool = False
    model: keras.Model | None = None
    num_global: tf.Tensor | None = None

    def count_globally(self) -> tf.Tensor:
        """Returns the rows of all replicas that count, float32 scalar.

        Reduces once a step, where the data pipeline does not know them.
        """
        # Not a cached_property: its lock, before Python 3.12, keeps one replica's thread waiting
        # for another that waits for it in the reduction.
        if self.num_global is None:
            context = tf.distribute.get_replica_context()
            num_real = tf.cast(self.num_real, tf.float32)
            if context.num_replicas_in_sync > 1:
                num_real = context.all_reduce(tf.distribute.ReduceOp.SUM, num_real)
            self.num_global = num_real
        return self.num_global

    @property
    def weight(self) -> tf.Tensor:
        """What this replica's mean counts in the mean over all replicas, float32 scalar."""
        return weighting.row_weight(self.num_real, self.count_globally())


def current_replica_batch() -> ReplicaBatch | None:
    """Returns the share of the step that this thread traces, or None outside of one."""
    return getattr(_local, "replica_batch", None)


@contextlib.contextmanager
def as_current(replica_batch: ReplicaBatch | None):
    """Makes `share` the current one; None as outside of a step."""
    previous = current_replica_batch()
    _local.replica_batch = replica_batch
    try:
        yield replica_batch
    finally:
        _local.replica_batch = previous
