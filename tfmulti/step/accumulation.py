"""Keras's `gradient_accumulation_steps` with one reduction for each update.

In Keras's own training step each replica accumulates its local gradients, and only the sum of k
steps is reduced: k steps send as many bytes as one. `defers_reduction` lists where every step
reduces instead: where something reads the gradients of each step, as a custom `train_step` does,
or saves the sums between updates, as `callbacks.Checkpoint` does.

Each replica's sum is scaled by the number of replicas, so that the mean over replicas is the sum
of the whole batch. A restored checkpoint writes that value to every replica, which is therefore
correct without further scaling.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.step import apply, finite, gradients


def defers_reduction(model: keras.Model | None) -> bool:
    """Whether the tape leaves the gradients unreduced, for the optimizer to reduce."""
    optimizer = getattr(model, "optimizer", None)
    # `accumulate` replaces the method of Keras that also updates moving averages.
    if not getattr(optimizer, "gradient_accumulation_steps", None) or optimizer.use_ema:
        return False
    shards = marks.SHARDS.get(optimizer)
    if shards is not None and shards.shards_parameters:
        # Gradients of sharded parameters are reduced in the backward pass.
        return False
    # Loss scaling and the guard judge the gradients of each step; all replicas must decide alike.
    if hasattr(optimizer, "inner_optimizer") or finite.guard_of(optimizer) is not None:
        return False
    if marks.KEEPS_WHOLE_SUMS.get(model):
        return False
    # One of the user's own may clip the gradients of each step.
    if not apply.is_stock(optimizer):
        return False
    return not keras_compat.has_custom_step(model, "train")


def accumulate(apply_gradients, optimizer, grads, variables) -> None:
    """Replaces an optimizer's update when its gradients are local to this replica.

    Args:
        apply_gradients: Keras's own method.
        optimizer: The optimizer.
        grads: Its gradients.
        variables: The variables to which the gradients belong.
    """
    if not optimizer.gradient_accumulation_steps or not gradients.is_reduction_deferred():
        apply_gradients(optimizer, grads, variables)
        return
    context = tf.distribute.get_replica_context()
    sums = keras_compat.accumulators(optimizer, variables)
    for total, grad in zip(sums, grads):
        total.assign(total + grad * tf.cast(context.num_replicas_in_sync, grad.dtype))
    marks.HAS_LOCAL_SUMS.set(optimizer, True)
    update = functools.partial(_update, optimizer, variables)
    # The update runs in new threads, which know nothing of this step.
    update = gradients.with_step_state(update, reduced=True)
    is_update = keras_compat.is_update_step(optimizer)
    context.merge_call(_update_all, args=(is_update, update))


def _update_all(strategy, is_update, update):
    """Updates in cross-replica context, since a replica cannot reduce within `tf.cond`.

    All replicas have the same counter, so the first one decides for all.
    """
    is_update, update = (strategy.experimental_local_results(v)[0] for v in (is_update, update))

    def branch():
        strategy.extended.call_for_each_replica(update)
        return tf.constant(True)

    tf.cond(is_update, branch, lambda: tf.constant(False))


def _update(optimizer, variables):
    steps = optimizer.gradient_accumulation_steps
    means = _mean_over_replicas(keras_compat.accumulators(optimizer, variables))
    keras_compat.update_by(optimizer, [mean / steps for mean in means], variables)


def _mean_over_replicas(sums) -> list:
    return tf.distribute.get_replica_context().all_reduce("MEAN", [v.value + 0 for v in sums])


def settle(model: keras.Model, optimizers) -> None:
    """Gives every replica the accumulated sum of all, before code outside a step reads optimizers.

    It is a collective while gradients are being accumulated: every worker must call it.

    Args:
        model: The model that is trained.
        optimizers: Its optimizers.
    """
    for optimizer in optimizers:
        if _has_local_sums(optimizer):
            _settle(model.distribute_strategy, optimizer)


def _settle(strategy, optimizer):
    # Of all variables that it was built for: the model may have been frozen since.
    sums = keras_compat.accumulators(optimizer, keras_compat.updated_variables(optimizer))
    if keras_compat.in_separate_traces():
        _settling(strategy, sums)()
        return
    known, function = marks.SETTLING.get(optimizer)
    # Traced again for other sums only: TensorFlow keeps every traced all-reduce, with its graph, as
    # long as the process lives. The list keeps the sums alive, because a new one could get the id
    # of a deleted one.
    if list(map(id, sums)) != list(map(id, known)):
        function = _settling(strategy, sums)
        marks.SETTLING.set(optimizer, (sums, function))
    function()
    marks.SETTLED_AT.set(optimizer, keras_compat.num_steps(optimizer))


def _settling(strategy, sums):
    def settle_replica():
        for total, mean in zip(sums, _mean_over_replicas(sums)):
            total.assign(mean)

    return tf.function(lambda: strategy.run(settle_replica))


def is_settled(model: keras.Model) -> bool:
    """Whether every replica holds the sums of all for the optimizer that `compile` was given."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not _has_local_sums(optimizer):
        return True
    return marks.SETTLED_AT.get(optimizer) == keras_compat.num_steps(optimizer)


def _has_local_sums(optimizer) -> bool:
    return marks.HAS_LOCAL_SUMS.get(optimizer) and keras_compat.is_accumulating(optimizer)


def settle_compiled(model: keras.Model) -> None:
    """Calls `settle` for the optimizer that was passed to `compile`, if there is one."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and keras_compat.is_ours(model.distribute_strategy):
        settle(model, [optimizer])
