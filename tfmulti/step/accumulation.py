"""Keras's `gradient_accumulation_steps` with one reduction for each update.

Under Keras's own training step each replica adds up its own gradients, and only their sum is
reduced: k steps send the bytes of one. A step that is written by hand may clip or look at its
gradients, and so it has them reduced at each step, as `LossScaleOptimizer` must. So has a run with
`callbacks.Checkpoint`, which goes on from within an accumulation bit for bit.

A replica's sum is scaled by the number of replicas, so that the mean over replicas is the whole
batch's: what is put back by a checkpoint, the same on all replicas, is right as it is.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import finite, gradients


def leaves_reduction_to_update(model: keras.Model | None) -> bool:
    """Whether the tape of a model's step leaves its gradients to the optimizer."""
    optimizer = getattr(model, "optimizer", None)
    if not getattr(optimizer, "gradient_accumulation_steps", None) or optimizer.use_ema:
        return False
    if hasattr(optimizer, "inner_optimizer") or finite.guard_of(optimizer) is not None:
        return False
    if getattr(model.distribute_strategy, "keeps_whole_sums", False):
        return False
    return not keras_compat.has_own_step(model, "train")


def accumulate(apply_gradients, optimizer, grads, variables) -> None:
    """Replaces what an optimizer does with its gradients, where they are this replica's own.

    Args:
        apply_gradients: Keras's own method.
        optimizer: The optimizer.
        grads: Its gradients.
        variables: What they are the gradients of.
    """
    if not optimizer.gradient_accumulation_steps or not gradients.has_left_to_update():
        apply_gradients(optimizer, grads, variables)
        return
    context = tf.distribute.get_replica_context()
    sums = keras_compat.accumulators(optimizer, variables)
    for total, grad in zip(sums, grads):
        total.assign(total + grad * tf.cast(context.num_replicas_in_sync, grad.dtype))
    object.__setattr__(optimizer, "tfmulti_parts", True)
    update = functools.partial(_update, optimizer, variables)
    update = gradients.one_step(update, reduced=True)
    is_update = keras_compat.is_update_step(optimizer)
    context.merge_call(_update_all, args=(is_update, update))


def _update_all(strategy, is_update, update):
    """Across replicas: a replica's own branch could not reduce. All replicas count alike."""
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
    """Gives every replica the whole sum, before optimizers are looked at from outside of a step.

    Every worker must call it: it is a collective where gradients are being added up.

    Args:
        model: The model that is trained.
        optimizers: Its optimizers.
    """
    sums = [
        total
        for optimizer in optimizers
        if getattr(optimizer, "tfmulti_parts", False) and keras_compat.is_accumulating(optimizer)
        for total in keras_compat.accumulators(optimizer, model.trainable_variables)
    ]
    if not sums:
        return

    def settle_replica():
        for total, mean in zip(sums, _mean_over_replicas(sums)):
            total.assign(mean)

    strategy = model.distribute_strategy
    tf.function(lambda: strategy.run(settle_replica))()


def settle_own(model: keras.Model) -> None:
    """Gives every replica the whole sum that the optimizer of `compile` has, if it has one."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and getattr(model.distribute_strategy, "repairs_keras", False):
        settle(model, [optimizer])
