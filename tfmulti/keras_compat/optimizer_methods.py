"""Methods of one optimizer object: ours, and below them the user's or Keras's."""

from __future__ import annotations

import inspect
import types

import keras

from tfmulti import marks
from tfmulti.keras_compat.stock import is_stock

# The names by which Keras's methods take all gradients of an update.
_GRADIENTS = {"grads", "grads_and_vars", "values"}


def set_method(optimizer, name: str, function) -> None:
    """Replaces a method of one optimizer object, and notes one that the user has set on it.

    Args:
        optimizer: The optimizer.
        name: The name of the method.
        function: Called with the optimizer and the method's arguments; `method_below` returns
            what it replaces.
    """
    before = vars(optimizer).get(name)
    if before is not None and not is_stock(before, "tfmulti"):
        marks.OWN_METHODS.set(optimizer, {**marks.OWN_METHODS.get(optimizer), name: before})
    object.__setattr__(optimizer, name, types.MethodType(function, optimizer))


def reset_method(optimizer, name: str) -> None:
    """Gives an optimizer object the method back that it had before `set_method`."""
    object.__delattr__(optimizer, name)
    own = marks.OWN_METHODS.get(optimizer).get(name)
    if own is not None:
        object.__setattr__(optimizer, name, own)


def method_below(optimizer, name: str):
    """Returns the method below that of `set_method`: the user's, set on the object, or Keras's."""
    own = marks.OWN_METHODS.get(optimizer).get(name)
    return types.MethodType(getattr(type(optimizer), name), optimizer) if own is None else own


def own_methods(optimizer) -> dict:
    """Returns by name the methods of an update that the user has set on an optimizer object."""
    there = {**vars(optimizer), **marks.OWN_METHODS.get(optimizer)}
    names = ["update_step", *_methods_of_gradients()]
    own = {name: there[name] for name in names if name in there}
    return {name: each for name, each in own.items() if not is_stock(each, "tfmulti")}


def after_updates(optimizer, function) -> None:
    """Calls a function of the gradients and the variables after each update of an optimizer.

    Keras's further operations on the new values, such as moving averages and constraints, follow.
    """

    def update(self, grads, trainable_variables, learning_rate):
        below = method_below(self, "_backend_update_step")
        below(grads, trainable_variables, learning_rate)
        function(grads, trainable_variables)

    set_method(optimizer, "_backend_update_step", update)


def clip_by(optimizer, **functions) -> None:
    """Replaces how an optimizer clips gradients.

    Args:
        optimizer: The optimizer.
        **functions: For `clipnorm`, `global_clipnorm` or both, what to do where the optimizer has
            that setting: a function of Keras's own clipping, the gradients and the variables, that
            returns the clipped gradients. Keras's own is a function of gradients alone.
    """
    # `_clip_gradients` is given no variables; `_backend_apply_gradients`, which calls it, is.
    updating = []

    def apply_gradients(self, grads, trainable_variables):
        updating[:] = trainable_variables
        method_below(self, "_backend_apply_gradients")(grads, trainable_variables)

    def clip(self, grads):
        original = method_below(self, "_clip_gradients")
        # Keras takes the first of these that is set.
        used = next((name for name in ("clipnorm", "global_clipnorm") if getattr(self, name)), "")
        return functions[used](original, grads, updating) if used in functions else original(grads)

    for name, method in (("_backend_apply_gradients", apply_gradients), ("_clip_gradients", clip)):
        set_method(optimizer, name, method)


def own_parts_of_apply(optimizer) -> list[str]:
    """Returns what an optimizer, unlike Keras's own, does by itself within Keras's `apply`.

    These are the private methods that are given all gradients, such as `_clip_gradients`, of its
    class or set on the object.
    """
    base, kind, own = keras.optimizers.Optimizer, type(optimizer), own_methods(optimizer)
    # What this package has replaced is no one's own.
    differ = {x for x in _methods_of_gradients() if getattr(kind, x) is not getattr(base, x)}
    of_class = {name for name in differ if not is_stock(getattr(kind, name))}
    return [name for name in _methods_of_gradients() if name in of_class | own.keys()]


def _methods_of_gradients() -> list[str]:
    """Returns the names of Keras's private methods that are given all gradients of an update."""
    base = keras.optimizers.Optimizer
    private = [name for name in dir(base) if name[0] == "_" != name[1]]
    methods = {name: getattr(base, name) for name in private}
    return [
        name
        for name, method in methods.items()
        if inspect.isfunction(method)
        and _GRADIENTS.intersection(inspect.signature(method).parameters)
    ]
