"""Finds whether the rows of a tensor are those of the whole batch, from `gather_batch`.

A sum over such rows is the same number on every replica, and must not be added over replicas. The
number of rows does not tell: two views of half of the rows are as many as all rows.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti.step import row_axis
from tfmulti.step.rows import current_replica_batch


def note(tensors) -> None:
    """Notes tensors that `gather_batch` returns in the step that is traced."""
    replica_batch = current_replica_batch()
    if replica_batch is not None and not tf.executing_eagerly():
        replica_batch.gathered.extend(tensors)


def has_gathered_rows(tensor) -> bool:
    """Whether the first axis of a tensor is that of gathered rows.

    It is False where that is unknown, as in an eager step.

    Args:
        tensor: A tensor of the step that is traced.
    """
    replica_batch = current_replica_batch()
    if replica_batch is None or not replica_batch.gathered or not tf.is_symbolic_tensor(tensor):
        return False
    return tensor.shape.rank != 0 and row_axis.has_rows_of(tensor, replica_batch.gathered)
