"""The `apply` of one optimizer object: tfmulti's, and the user's own below it."""

from __future__ import annotations

import types

import keras

from tfmulti import keras_compat, marks


def install(optimizer: keras.optimizers.Optimizer, function) -> None:
    """Makes a function an optimizer's `apply`, and keeps one that the user has set on the object.

    Args:
        optimizer: The optimizer.
        function: Called with the optimizer, the gradients and their variables.
    """
    before = vars(optimizer).get("apply")
    if before is not None and not keras_compat.is_stock(before, "tfmulti"):
        marks.OWN_APPLY.set(optimizer, before)
    object.__setattr__(optimizer, "apply", types.MethodType(function, optimizer))


def uninstall(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer the `apply` back that it had before `install`."""
    object.__delattr__(optimizer, "apply")
    own = marks.OWN_APPLY.get(optimizer)
    if own is not None:
        object.__setattr__(optimizer, "apply", own)


def original(optimizer: keras.optimizers.Optimizer):
    """Returns the `apply` below tfmulti's: one that the user has set, or that of the class."""
    own = marks.OWN_APPLY.get(optimizer)
    return types.MethodType(type(optimizer).apply, optimizer) if own is None else own


def is_stock(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer's update is Keras's own; a method may be set on the object too."""
    methods = optimizer.apply, original(optimizer), optimizer.apply_gradients
    return all(keras_compat.is_stock(each, "tfmulti") for each in methods)
