"""Checks within the step that gradients are finite, and skips the update if they are not."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.step import apply, local_steps
from tfmulti.step.sums import values_of_gradient


class FiniteGuard:
    """Skips an optimizer's updates if gradients are not finite, and counts the skipped ones.

    It checks gradients after the reduction, so all replicas and workers decide alike.

    Args:
        is_scaled: Whether the optimizer is within a `LossScaleOptimizer`, which calls it in a
            branch after it has asked all workers whether gradients are finite.

    Attributes:
        is_scaled: As given.
        is_on: Whether it is in use.
    """

    def __init__(self, is_scaled: bool = False):
        self.is_scaled, self.is_on = is_scaled, False
        self._names: list[str] = []
        with tf.init_scope(), tf.device("CPU:0"):
            # The number of skipped updates; and the step and the variable of the first one, both
            # counted from 1.
            self._found = tf.Variable(np.zeros(3, "int64"), trainable=False, name="tfmulti_finite")

    def apply(self, optimizer, grads, trainable_variables=None) -> None:
        """Applies gradients if all are finite; else counts a skipped update."""
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self._names = [keras_compat.path_of(each) for each in trainable_variables]
            # Slots cannot be created within the branch below.
            if not optimizer.built:
                optimizer.build(trainable_variables)
        grads = list(grads)
        shards = marks.SHARDS.get(optimizer)
        if shards is None or not shards.has_owned_gradients:
            is_bad = tf.stack([_is_bad(grad) for grad in grads]) > 0
        else:
            is_bad = shards.reduce_scalars(_is_bad, grads, trainable_variables) > 0
        is_bad = is_bad if self.is_scaled else local_steps.is_on_any(is_bad)

        def skip():
            self._count(is_bad, optimizer)
            return tf.constant(True)

        def update():
            local_steps.update(optimizer, grads, trainable_variables)
            return tf.constant(True)

        tf.cond(tf.reduce_any(is_bad), skip, update)

    def _count(self, is_bad, optimizer):
        """Counts a skipped update, once for all replicas of this process."""
        step = tf.cast(_local(optimizer.iterations), tf.int64) + 1
        first = tf.stack([tf.ones([], tf.int64), step, tf.argmax(is_bad) + 1])
        again = tf.constant([1, 0, 0], tf.int64)
        found = tf.where(self._found[0] == 0, first, again)
        self._found.assign_add(tf.where(topology.is_first_local_replica(), found, 0))

    def read(self) -> tuple[int, int, str]:
        """Returns the number of skipped updates, and the step and variable of the first one."""
        count, step, number = self._found.numpy().tolist()
        known = 0 < number <= len(self._names)
        return count, step, self._names[number - 1] if known else f"variable {number}"

    @property
    def counts(self) -> np.ndarray:
        """The numbers by which it counts, which `reset` takes."""
        return self._found.numpy()

    def reset(self, counts=(0, 0, 0)) -> None:
        """Sets the count to zero, or to earlier `counts`."""
        self._found.assign(np.array(counts, "int64"))


def finite_on_all(check_finite, optimizer: keras.optimizers.Optimizer, grads) -> tf.Tensor:
    """Returns whether gradients are finite; on all workers where these have different ones.

    They have in local steps, and with sharded parameters; elsewhere each looks at its own.

    Args:
        check_finite: `LossScaleOptimizer.check_finite`.
        optimizer: A `LossScaleOptimizer`.
        grads: The gradients of this worker.
    """
    condition = check_finite(optimizer, grads)
    if local_steps.in_local_step():
        return tf.logical_not(local_steps.is_on_any(tf.logical_not(condition)))
    shards = marks.SHARDS.get(optimizer.inner_optimizer)
    if shards is None or not shards.shards_parameters:
        return condition
    return shards.count(tf.logical_not(condition)) == 0


def guard_of(optimizer: keras.optimizers.Optimizer) -> FiniteGuard | None:
    """Returns the guard that `watch` installed in an optimizer, or None."""
    guard = marks.GUARD.get(keras_compat.inner_optimizer(optimizer))
    return guard if guard is not None and guard.is_on else None


def watch(optimizer: keras.optimizers.Optimizer) -> FiniteGuard:
    """Installs a guard in an optimizer, or in the inner optimizer of a `LossScaleOptimizer`.

    The inner optimizer receives unscaled gradients. That scaled gradients overflow is normal, and
    the outer optimizer handles it.

    Returns:
        The guard; after `unwatch` the same as before, with which a step may have been traced.
    """
    inner = keras_compat.inner_optimizer(optimizer)
    guard, is_scaled = marks.GUARD.get(inner), inner is not optimizer
    if guard is None or guard.is_scaled != is_scaled:
        guard = FiniteGuard(is_scaled)
        marks.GUARD.set(inner, guard)
    guard.is_on = True
    if not marks.DISTRIBUTED.get(inner):
        apply.install(inner, guard.apply)
    return guard


def unwatch(optimizer: keras.optimizers.Optimizer) -> None:
    """Takes the guard out of an optimizer again; steps that were traced with it still have it."""
    inner = keras_compat.inner_optimizer(optimizer)
    guard = marks.GUARD.get(inner)
    guard.is_on = False
    if getattr(vars(inner).get("apply"), "__func__", None) == guard.apply:
        apply.uninstall(inner)


def update_of(optimizer: keras.optimizers.Optimizer):
    """Returns the function that applies reduced gradients: the guard's, or the class's own."""
    guard = marks.GUARD.get(optimizer)
    return guard.apply if guard is not None and guard.is_on else local_steps.update


def _local(variable) -> tf.Tensor:
    if not isinstance(variable, keras.Variable):
        # Under accumulation `iterations` is a tensor.
        return tf.convert_to_tensor(variable)
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_local_results(variable.value)[0].read_value()


def _is_bad(grad) -> tf.Tensor:
    """Returns 1.0 for a gradient with a number that is not finite, else 0.0."""
    if grad is None:
        return tf.constant(0.0)
    is_finite = tf.reduce_all(tf.math.is_finite(values_of_gradient(grad)))
    return tf.cast(tf.logical_not(is_finite), tf.float32)
