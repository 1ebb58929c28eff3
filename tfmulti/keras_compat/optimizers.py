"""What takes the place of methods of optimizers: each replica updates its own copy, all alike."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf


def update_alike(plain):
    """Returns what makes a method of optimizers local to each replica after a reduction.

    What an optimizer's own class does around these methods, as Nadam and Muon do, stays.

    Args:
        plain: The same method of an optimizer that knows no replicas.
    """

    def make(original, gradients_are_global):
        def method(self, *args, **kwargs):
            alike = getattr(self, "tfmulti_updates_alike", False) or gradients_are_global()
            alike = alike or self._distribution_strategy.num_replicas_in_sync == 1
            return (plain if alike else original)(self, *args, **kwargs)

        return method

    return make


def mark_updates_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer update replicas alike in any step: it reduces its gradients itself."""
    object.__setattr__(optimizer, "tfmulti_updates_alike", True)


def within_replicas(original):
    """Refuses an optimizer of several replicas that is applied in none of them.

    One of one replica is applied wherever it is, as without a strategy.
    """

    def apply(self, grads, trainable_variables=None):
        strategy = self._distribution_strategy
        here = tf.distribute.get_strategy() is strategy
        outside = not here or tf.distribute.in_cross_replica_context()
        if strategy.num_replicas_in_sync > 1 and outside:
            raise ValueError(
                "An optimizer of several replicas must be applied in a replica. "
                f"Received: {self.name}, applied outside of `strategy.run`. "
                "Use model.fit, or give the step to strategy.run, with a "
                "tfmulti.DistributedGradientTape; for one device leave the scope out."
            )
        with contextlib.nullcontext() if here else strategy.scope():
            return original(self, grads, trainable_variables)

    return apply


def accumulators(optimizer, variables) -> list[keras.Variable]:
    """Returns the sums of gradients that an optimizer keeps for variables."""
    kept = optimizer._accumulated_gradients
    return [kept[optimizer._get_variable_index(variable)] for variable in variables]


def is_accumulating(optimizer) -> bool:
    """Whether steps were taken since an accumulation began; asked from outside of a step."""
    value = optimizer._iterations.value
    value = getattr(value, "values", (value,))[0]
    return int(value.numpy()) % optimizer.gradient_accumulation_steps != 0


def is_update_step(optimizer):
    """Whether the step that is traced ends an accumulation; `iterations` counts updates there."""
    return (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0


def has_own_step(model: keras.Model, kind: str) -> bool:
    """Whether a model's `"train"` or `"test"` step is another than Keras's.

    Keras's own step of training hands gradients straight on.
    """
    name = f"{kind}_step"
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model)


def update_by(optimizer, grads, variables) -> None:
    """Does an update of Keras with accumulated gradients, and forgets them."""
    grads = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)
    optimizer._backend_reset_gradient_accumulators()
