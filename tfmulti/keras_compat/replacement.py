"""Replaces a function of Keras or TensorFlow: once, and only under our strategies.

The functions that say where a replacement is used have phrases as docstrings: a table shows them.
"""

from __future__ import annotations

import contextlib
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
_shuffling_for = Scoped(None)
_strategies: weakref.WeakSet = weakref.WeakSet()
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, functools.partialmethod)


def is_ours(strategy) -> bool:
    """Whether a strategy is one of tfmulti's, except that for parameter servers."""
    return getattr(strategy, "repairs_keras", False)


def has_servers(strategy) -> bool:
    """Whether a strategy is tfmulti's for parameter servers."""
    return getattr(strategy, "has_parameter_servers", False)


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Registers one of our strategies, as long as it exists."""
    _strategies.add(strategy)


def in_scope(*_, **__) -> bool:
    """In the scope, or in a replica, of one of our strategies."""
    return is_ours(tf.distribute.get_strategy())


def in_scope_of_servers(*_, **__) -> bool:
    """In the scope of our strategy for parameter servers."""
    return has_servers(tf.distribute.get_strategy())


def in_any_scope(*_, **__) -> bool:
    """In the scope of one of our strategies, also of that for parameter servers."""
    return in_scope() or in_scope_of_servers()


def of_model(model, *_, **__) -> bool:
    """On a model of one of our strategies."""
    return is_ours(getattr(model, "distribute_strategy", None))


def of_model_or_servers(model, *_, **__) -> bool:
    """On a model of one of our strategies, also of that for parameter servers."""
    return of_model(model) or has_servers(getattr(model, "distribute_strategy", None))


def of_given_model(_, model=None) -> bool:
    """When it is given a model of one of our strategies."""
    return of_model(model)


def of_callbacks(callbacks, *_, **__) -> bool:
    """On the callbacks of a model of one of our strategies."""
    return of_model(getattr(callbacks, "model", None))


def of_optimizer(optimizer, *_, **__) -> bool:
    """In a replica, or on an optimizer, of one of our strategies."""
    return in_scope() or is_ours(getattr(optimizer, "_distribution_strategy", None))


def of_sharded_optimizer(_, optimizer=None) -> bool:
    """When it is given an optimizer with sharded state."""
    return marks.SHARDS.get(optimizer) is not None


def of_value(value, *_, **__) -> bool:
    """On variables of one of our strategies, outside of steps."""
    return tf.executing_eagerly() and is_ours(getattr(value, "distribute_strategy", None))


def of_dataset(dataset, *_, **__) -> bool:
    """On data that one of our strategies has distributed."""
    return is_ours(getattr(dataset, "_strategy", None))


def of_epochs(epoch_iterator, *_, **__) -> bool:
    """On Keras's iterator over data of one of our strategies."""
    return is_ours(getattr(epoch_iterator, "_distribute_strategy", None))


def of_launcher(launcher, *_, **__) -> bool:
    """In a replica of one of our strategies, or on its launchers of collectives."""
    return marks.LAUNCHES.get(launcher) or in_scope()


def while_a_strategy_exists(*_, **__) -> bool:
    """While one of our strategies exists: models created outside of its scope are reported."""
    return bool(_strategies)


def distributing(*_, **__) -> bool:
    """While an iterator over data of one of our strategies is created."""
    return _distributing.value


def shuffling_for(model) -> contextlib.AbstractContextManager:
    """Makes Keras shuffle the model's arrays by `marks.ORDER_SEED`, if it has one, in the context.

    Args:
        model: The model. Its seed may be set within the context.
    """
    return _shuffling_for.set_to(model)


def shuffling(*_, **__) -> bool:
    """In a call of `fit` on several workers of one of our strategies."""
    return order_seed() is not None


def order_seed() -> int | None:
    """Returns the seed by which arrays are shuffled, the same on all workers; None elsewhere."""
    return marks.ORDER_SEED.get(_shuffling_for.value)


def note_distributing(original, dataset):
    """Creates an iterator over data of one of our strategies; `distributing` is true meanwhile."""
    with _distributing.set_to(True):
        return original(dataset)


def replace(owner, name: str, make: Callable, used: Callable) -> None:
    """Replaces a function, unless it is replaced already.

    Args:
        owner: The class or module. An inherited method is replaced in the class that defines it.
        name: The function's name.
        make: Function of the original that returns the new function, or a descriptor, which decides
            by itself when to act.
        used: Function of the arguments that returns whether one of our strategies is in use. If
            not, the original is called.
    """
    present = getattr(owner, name, None) or _absent(name)
    if is_replaced(owner, name):
        return
    new = make(present)
    if callable(new):
        new = _new_if_used(present, new, used)
    # Canaries put the original back by this attribute.
    setattr(new, _MARK, present)
    new.tfmulti_place = (owner, name)
    holder = _holder(owner, name)
    # Python calls it only for what a class statement holds.
    if hasattr(new, "__set_name__"):
        new.__set_name__(holder, name)
    setattr(holder, name, new)


def _absent(name):
    """Returns a substitute for a missing method, which raises an error that says so."""

    def absent(self, *args, **kwargs):
        raise TypeError(f"{type(self).__name__} has no {name}")

    return absent


def _new_if_used(present, new, used):
    """Returns a function that calls the new one where it is used, and else the one present."""

    @functools.wraps(present)
    def call(*args, **kwargs):
        return (new if used(*args, **kwargs) else present)(*args, **kwargs)

    return call


def is_replaced(owner, name: str) -> bool:
    """Whether our function is in its place, perhaps within wrappers of other libraries."""
    # A wrapper may copy the attributes of our function, so each layer's place is compared.
    layers = _layers_of(getattr(owner, name, None))
    places = [getattr(layer, "__dict__", {}).get("tfmulti_place") for layer in layers]
    return any(place is not None and place == (owner, name) for place in places)


def _holder(owner, name):
    """Returns the class that defines a method: the owner, or a class from which it inherits."""
    if not inspect.isclass(owner):
        return owner
    return next((kind for kind in owner.__mro__ if name in vars(kind)), owner)


def _layers_of(function) -> Iterator:
    """Yields a function and the functions that it wraps, however it refers to them."""
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
            # The cell is still empty.
            continue
    return [each for each in held if isinstance(each, _FUNCTIONS)]


def _named_by(function) -> list:
    """Returns the global functions that a function names: a wrapper may keep ours in a global."""
    if not isinstance(function, types.FunctionType):
        return []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [each for each in named if isinstance(each, _FUNCTIONS)]


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of Keras or TensorFlow that is replaced.

    Attributes:
        owner: The class or module.
        name: The function's name.
        make: Function of the original, and of the functions that `needs` names, that returns the
            new function. None if a context manager replaces it temporarily.
        applies_to: Whether the replacement acts on these arguments; its docstring is shown on the
            page of replacements. None if a context manager replaces the function temporarily.
        repairs: The error message, or the wrong result, without the replacement.
        test: The test that takes the replacement out. A canary, `test_canary_...`, fails when Keras
            and TensorFlow no longer need it; entries that serve only this package have no canary.
        needs: Names of functions that `install` passes to `make`.
        arguments: Arguments of the original that it relies on; None if that is not a function.
        within: The name of the context manager.
        adds: Whether the original does not exist.
    """

    owner: object
    name: str
    make: Callable | None
    applies_to: Callable | None
    repairs: str
    test: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = ()
    within: str = ""
    adds: bool = False

    @property
    def target(self) -> str:
        """The class or module, and the name."""
        return f"{self.owner.__name__.split('.')[-1]}.{self.name}"

    def install(self, functions) -> None:
        """Installs it unless it is installed already; see `table.install`."""
        needed = [functions[name] for name in self.needs]
        replace(
            self.owner, self.name, lambda original: self.make(original, *needed), self.applies_to
        )


def model_entry(name, make, repairs, test, **more) -> Replacement:
    """Returns an entry for a method of models."""
    return Replacement(keras.Model, name, make, of_model, repairs, test, **more)


def scope_entry(owner, name, make, repairs, test, **more) -> Replacement:
    """Returns an entry that acts in a strategy's scope."""
    return Replacement(owner, name, make, in_scope, repairs, test, **more)


def temporary_entry(owner, name, within, repairs, test, **more) -> Replacement:
    """Returns an entry for a function that a context manager replaces temporarily."""
    return Replacement(owner, name, None, None, repairs, test, within=within, **more)
