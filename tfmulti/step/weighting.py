"""The weight of each replica: its formula, and what follows from it for a loss or a gradient.

A batch of n rows is split over replicas; replica r holds n_r rows. The mean over the batch that
one device computes is the sum over replicas of w_r times the replica's local mean, with

    w_r = n_r / n,        and so  sum_r w_r = 1.

- **Gradients** (`tfmulti.step.gradients`): a tape multiplies its target, the replica's mean loss,
  by w_r where the backward pass begins, and adds the gradients over replicas. Terms that are the
  same on every replica (penalties on weights, a loss over gathered rows) stay correct, since the
  weights add up to one. Applying w_r after the backward pass instead would be wrong for layers
  whose backward pass crosses replicas.
- **Losses** (`tfmulti.step.losses`) that do not divide by rows: a loss that divides by a local
  count c_r (valid steps under a mask, sample weights) is first multiplied by (c_r / c) / w_r,
  where c is the sum of all c_r; a sum is multiplied by 1 / w_r, unless its rows are gathered
  (`ReplicaBatch.has_gathered_rows`): then it is the same on every replica.
- **Loops of the user's own** around `strategy.run`: n_r is unknown, so w_r = 1 / replicas. There a
  loss is corrected by its own count, that of its values if nothing else.
- **Running means** of a number that a step computed update with the weight w_r.
- **State** that a layer computes from its rows changes by the weighted mean of the replicas'
  changes.
- **Padding rows**, those of `remainder="pad"`, are cut off before the step. A replica without rows
  computes a **dummy row**, with w_r = 0.
"""

from __future__ import annotations

import tensorflow as tf

# Of weights and counts. In float32 they would round models of float64.
DTYPE = tf.float64


def row_weight(num_real: tf.Tensor, num_global: tf.Tensor) -> tf.Tensor:
    """Returns w_r as a scalar of `DTYPE`, from the rows of this replica and of the batch."""
    return tf.math.divide_no_nan(tf.cast(num_real, DTYPE), tf.cast(num_global, DTYPE))


def mean_correction(count: tf.Tensor, replica_batch) -> tf.Tensor:
    """Returns (c_r / c) / w_r for a loss that divides by a local count, a scalar of `DTYPE`.

    It is a collective: every replica must call it.

    Args:
        count: The divisor of this replica's loss, a scalar of `DTYPE`.
        replica_batch: This replica's batch.
    """
    count = replica_batch.zero_if_empty(count)
    total = tf.distribute.get_replica_context().all_reduce("SUM", count)
    return tf.math.divide_no_nan(count, total) * inverse_weight(replica_batch)


def inverse_weight(replica_batch) -> tf.Tensor:
    """Returns 1 / w_r, a scalar: the factor that undoes the replica's weight."""
    weight = replica_batch.weight
    return tf.math.divide_no_nan(tf.ones_like(weight), weight)


def initial_gradients(targets, given, replica_batch) -> list[tf.Tensor]:
    """Returns the initial gradients of targets for the backward pass on this replica.

    A scalar is treated as a mean over rows, and gets w_r; so does a target that is the same on
    every replica. A tensor with an axis of rows, which a tape sums, gets ones.

    Args:
        targets: The tensors that a tape differentiates.
        given: The gradients of targets that are the same on every replica, which the caller of a
            tape passes as `output_gradients`; None if it passes none.
        replica_batch: This replica's batch.
    """
    roots = []
    factors = [None] * len(targets) if given is None else tf.nest.flatten(given)
    for target, factor in zip(targets, factors, strict=True):
        is_same = given is not None or replica_batch.has_gathered_rows(target)
        root = _initial_gradient(target, replica_batch, is_same)
        roots.append(root if factor is None else root * tf.cast(factor, root.dtype))
    return roots


def _initial_gradient(target, replica_batch, is_same):
    if not is_same and _has_rows(target, replica_batch):
        # A dummy row gets 0, because the backward pass may cross replicas.
        return replica_batch.zero_if_empty(tf.ones_like(target))
    return tf.ones_like(target) * tf.cast(replica_batch.weight, target.dtype)


def _has_rows(target, replica_batch) -> bool:
    if target.shape.rank == 0:
        return False
    # A multiple counts too: two views of the rows, one after the other, are twice as many.
    rows, first = tf.get_static_value(replica_batch.num_rows), (target.shape or [None])[0]
    return first is None or (rows is not None and first % max(int(rows), 1) == 0)
