"""How much the rows of one replica count: the one place that weighs.

A batch of n rows is dealt out to replicas r, of which each holds n_r. What one device computes as
a mean over the batch is the sum over replicas of w_r times the replica's own mean, with

    w_r = n_r / n,        and so  sum_r w_r = 1.

- **Gradients** (`tfmulti.step.gradients`): a tape weighs its target, the replica's mean loss, with
  w_r where the backward pass begins, and adds the gradients over replicas. What is the same on
  every replica (penalties on weights, a loss over gathered rows) needs no care, since the weights
  add to one. Weighed later, layers whose backward pass crosses replicas would be wrong.
- **Losses** (`tfmulti.step.losses`) that do not divide by rows: one that divides by a count c_r of
  its own (valid steps under a mask, sample weights) is multiplied by (c_r / c) / w_r first, a sum
  by 1 / w_r.
- **Running means** of a number that a step has computed take it with the weight w_r.
- **State** that a layer computes from its rows changes by the mean of the replicas' changes.
- **Filler rows** count nothing: those of padding are cut off before a step; that of a replica
  without a row has w_r = 0.
"""

from __future__ import annotations

import tensorflow as tf


def row_weight(num_counted: tf.Tensor, num_global: tf.Tensor) -> tf.Tensor:
    """Returns w_r, a float32 scalar, of this replica's and the whole batch's rows."""
    return tf.math.divide_no_nan(tf.cast(num_counted, tf.float32), num_global)


def part_of_count(count: tf.Tensor, replica_batch) -> tf.Tensor:
    """Returns (c_r / c) / w_r for a loss that divides by a count of its own, a float32 scalar.

    It is a collective: every replica must call it.

    Args:
        count: What this replica's loss divides by, a float32 scalar.
        replica_batch: This replica's share of the step.
    """
    count = tf.where(replica_batch.num_real > 0, count, 0.0)
    total = tf.distribute.get_replica_context().all_reduce("SUM", count)
    return tf.math.divide_no_nan(count, total) * part_of_sum(replica_batch)


def part_of_sum(replica_batch) -> tf.Tensor:
    """Returns 1 / w_r, which makes the weighed sum over replicas a plain one; a float32 scalar."""
    return tf.math.divide_no_nan(1.0, replica_batch.weight)


def weigh_root(target, replica_batch):
    """Returns what the backward pass of a target begins with on this replica.

    A number is taken for a mean over rows. What has an axis of rows is a sum over them as it is.

    Args:
        target: What a tape differentiates, a tensor.
        replica_batch: This replica's share of the step.
    """
    if _has_rows(target, replica_batch):
        # A filler row is none, also where the backward pass crosses replicas.
        return tf.where(replica_batch.num_real > 0, tf.ones_like(target), tf.zeros_like(target))
    return tf.ones_like(target) * tf.cast(replica_batch.weight, target.dtype)


def _has_rows(target, replica_batch) -> bool:
    if target.shape.rank == 0:
        return False
    rows, first = tf.get_static_value(replica_batch.num_rows), (target.shape or [None])[0]
    return first is None or (rows is not None and first % max(int(rows), 1) == 0)
