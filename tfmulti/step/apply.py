"""The `apply` of one optimizer object: tfmulti's, and the user's own below it."""

from __future__ import annotations

import keras

from tfmulti import keras_compat


def install(optimizer: keras.optimizers.Optimizer, function) -> None:
    """Makes a function an optimizer's `apply`, and keeps one that the user has set on the object.

    Args:
        optimizer: The optimizer.
        function: Called with the optimizer, the gradients and their variables.
    """
    keras_compat.set_method(optimizer, "apply", function)


def uninstall(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer the `apply` back that it had before `install`."""
    keras_compat.reset_method(optimizer, "apply")


def original(optimizer: keras.optimizers.Optimizer):
    """Returns the `apply` below tfmulti's: one that the user has set, or that of the class."""
    return keras_compat.method_below(optimizer, "apply")


def is_stock(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer's update is Keras's own; a method may be set on the object too."""
    methods = optimizer.apply, original(optimizer), optimizer.apply_gradients
    is_stock = all(keras_compat.is_stock(each, "tfmulti") for each in methods)
    return is_stock and not keras_compat.own_methods(optimizer)
