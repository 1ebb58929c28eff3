"""What takes the place of methods of optimizers: each replica updates its own copy, all alike."""

from __future__ import annotations

import keras


def update_alike(plain):
    """Returns what makes a method of optimizers local to each replica after a reduction.

    What an optimizer's own class does around these methods, as Nadam and Muon do, stays.

    Args:
        plain: The same method of an optimizer that knows no replicas.
    """

    def make(original, gradients_are_global):
        def method(self, *args, **kwargs):
            alike = getattr(self, "tfmulti_updates_alike", False) or gradients_are_global()
            return (plain if alike else original)(self, *args, **kwargs)

        return method

    return make


def mark_updates_alike(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer update replicas alike in any step: it reduces its gradients itself."""
    object.__setattr__(optimizer, "tfmulti_updates_alike", True)


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


def has_stock_train_step(model: keras.Model) -> bool:
    """Whether a model trains by Keras's own step, which hands gradients straight on."""
    return type(model).train_step is keras.Model.train_step and "train_step" not in vars(model)


def update_by(optimizer, grads, variables) -> None:
    """Does an update of Keras with accumulated gradients, and forgets them."""
    grads = optimizer._clip_gradients(grads)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(grads, variables, optimizer.learning_rate)
    optimizer._backend_reset_gradient_accumulators()
