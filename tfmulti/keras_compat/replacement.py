"""How a function of Keras or TensorFlow is replaced: once, and under our strategies alone."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfmulti import marks
from tfmulti.runtime.scoped import Scoped

_MARK = "tfmulti_replaces"
_distributing = Scoped(False)
_strategies: weakref.WeakSet = weakref.WeakSet()
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, functools.partialmethod)


def is_ours(strategy) -> bool:
    """Whether a strategy is one of ours."""
    return getattr(strategy, "repairs_keras", False)


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Registers one of our strategies, as long as it exists."""
    _strategies.add(strategy)


def in_scope(*_, **__) -> bool:
    """In the scope, or in a replica, of one of our strategies."""
    return is_ours(tf.distribute.get_strategy())


def of_model(model, *_, **__) -> bool:
    """On a model of one of our strategies."""
    return is_ours(getattr(model, "distribute_strategy", None))


def of_given_model(_, model=None) -> bool:
    """Where a model of one of our strategies is given."""
    return of_model(model)


def of_callbacks(callbacks, *_, **__) -> bool:
    """On the callbacks of a model of one of our strategies."""
    return of_model(getattr(callbacks, "model", None))


def of_optimizer(optimizer, *_, **__) -> bool:
    """In a replica, or on an optimizer, of one of our strategies."""
    return in_scope() or is_ours(getattr(optimizer, "_distribution_strategy", None))


def of_value(value, *_, **__) -> bool:
    """On what replicas of one of our strategies hold, outside of their steps."""
    return tf.executing_eagerly() and is_ours(getattr(value, "distribute_strategy", None))


def of_dataset(dataset, *_, **__) -> bool:
    """On data that one of our strategies has distributed."""
    return is_ours(getattr(dataset, "_strategy", None))


def of_launcher(launcher, *_, **__) -> bool:
    """In a replica of one of our strategies, or on what it has made to launch collectives."""
    return marks.LAUNCHES.get(launcher) or in_scope()


def while_a_strategy_exists(*_, **__) -> bool:
    """While one of our strategies exists: models created outside of its scope are reported."""
    return bool(_strategies)


def distributing(*_, **__) -> bool:
    """While an iterator over data of one of our strategies is created."""
    return _distributing.value


def note_distributing(original, dataset):
    """Creates an iterator over data of one of our strategies; meanwhile `distributing` is true."""
    with _distributing.set_to(True):
        return original(dataset)


def replace(owner, name: str, make: Callable, used: Callable) -> None:
    """Replaces a function, unless it is replaced already.

    Args:
        owner: The class or module. A class's method is replaced where it is found from there.
        name: The function's name.
        make: Function of what is there, which returns what takes its place; or an attribute with
            a place of its own (a descriptor), which asks for itself.
        used: Function of the arguments that tells whether one of our strategies is in use.
    """
    present = getattr(owner, name, None) or _absent(name)
    if is_replaced(owner, name):
        return
    new = make(present)
    if callable(new):
        new = _asking(present, new, used)
    setattr(new, _MARK, present)
    new.tfmulti_place = (owner, name)
    holder = _holder(owner, name)
    if hasattr(new, "__set_name__"):
        new.__set_name__(holder, name)
    setattr(holder, name, new)


def _absent(name):
    """Returns what stands for a missing method, and raises an error that says so."""

    def absent(self, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} has no {name}")

    return absent


def _asking(present, new, used):
    @functools.wraps(present)
    def call(*args, **kwargs):
        return (new if used(*args, **kwargs) else present)(*args, **kwargs)

    return call


def is_replaced(owner, name: str) -> bool:
    """Whether what is there is ours, or has ours within what others have put around it."""
    # A wrapper of others may copy the attributes of ours; it has ours within.
    layers = _layers_of(getattr(owner, name, None))
    places = [getattr(each, "__dict__", {}).get("tfmulti_place") for each in layers]
    return any(place is not None and place == (owner, name) for place in places)


def _holder(owner, name):
    """The class that has a method, which can be one from which the owner inherits it."""
    if not inspect.isclass(owner):
        return owner
    return next((kind for kind in owner.__mro__ if name in vars(kind)), owner)


def _layers_of(function) -> Iterator:
    """Yields a function and those that it surrounds, however it holds them."""
    pending, seen = [function], set()
    while pending:
        each = pending.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            pending += _held_by(each)
    yield from _named_by(function)


def _held_by(function) -> list:
    held = [getattr(function, name, None) for name in ("__wrapped__", "__func__", "func")]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            # Not filled yet.
            continue
    return [each for each in held if isinstance(each, _FUNCTIONS)]


def _named_by(function) -> list:
    """The functions of its module that a function names, where a wrapper can keep ours."""
    if not isinstance(function, types.FunctionType):
        return []
    found = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [each for each in found if isinstance(each, _FUNCTIONS)]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of Keras or TensorFlow that is replaced.

    Attributes:
        owner: The class or module.
        name: The function's name.
        make: Function of what was there, and of what `needs` names, that returns the new one.
            None where a context manager replaces it as long as one is in there.
        used: Function of the arguments that tells whether one of our strategies is in use; its
            docstring says where that is.
        cures: The message, or the wrong result, without it.
        canary: The test that fails when it is no longer needed.
        needs: Names of the functions that `install` is given for it.
        arguments: Arguments that it relies on; None for what is no function.
        within: The context manager.
        adds: Whether there is nothing of that name without us.
    """

    owner: object
    name: str
    make: Callable | None
    used: Callable | None
    cures: str
    canary: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = ()
    within: str = ""
    adds: bool = False

    @property
    def target(self) -> str:
        """Where it is: the class or module and the name."""
        return f"{self.owner.__name__.split('.')[-1]}.{self.name}"

    def install(self, functions) -> None:
        """Puts it in its place, unless it is there; see `install`."""
        needed = [functions[name] for name in self.needs]
        replace(self.owner, self.name, lambda original: self.make(original, *needed), self.used)


def model_entry(name, make, cures, canary, **more) -> Replacement:
    """An entry for a method of models."""
    return Replacement(keras.Model, name, make, of_model, cures, canary, **more)


def scope_entry(owner, name, make, cures, canary, **more) -> Replacement:
    """An entry that acts in a strategy's scope."""
    return Replacement(owner, name, make, in_scope, cures, canary, **more)


def temporary_entry(owner, name, within, cures, canary, **more) -> Replacement:
    """An entry that a context manager replaces."""
    return Replacement(owner, name, None, None, cures, canary, within=within, **more)
