"""What a model's Python attributes hold: numbers, tensors, lists; notices and undoes changes."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfmulti import marks
from tfmulti.runtime.scoped import with_attributes
from tfmulti.verification.own_names import is_own, is_users

# Keys of dicts that are not looked at, and what tfmulti sets.
_PRIVATE = ("_", marks.PREFIX)
# Keras sets these itself.
_OF_KERAS = ("built", "stop_evaluating", "stop_predicting", "stop_training")
_MADE_BY_KERAS = ("history", "train_function", "test_function", "predict_function")
# Classes of what it keeps for a call of a method, or as lists of variables.
_OF_CALLS = ("History", "TFEpochIterator", "Tracker")
# Packages whose objects are not looked into, but for these.
_FOREIGN = {"tensorflow", "numpy", "builtins", "types", "functools", "tfmulti"}
_FOREIGN |= {name for name in sys.stdlib_module_names if name.startswith("_")}
_HOLDERS = (
    types.SimpleNamespace,
    tf.Module,
    tf.train.Checkpoint,
    tf.train.ExponentialMovingAverage,
)
# How deep parts of a model are looked for.
_DEPTH = 8


def walk(model) -> list:
    """Returns the model and all objects that it holds in attributes and containers, with paths."""
    seen, found, level = set(), [], [("", model)]
    for _ in range(_DEPTH):
        below = []
        for path, thing in level:
            if id(thing) not in seen:
                seen.add(id(thing))
                found.append((path, thing))
                start = f"{path}/" if path else ""
                below += [(f"{start}{name}", part) for name, part in _held_by(thing)]
        level = below
    return found


def _held_by(thing) -> list:
    if isinstance(thing, dict):
        return list(thing.items())
    if isinstance(thing, (list, tuple, set, collections.deque)):
        return list(enumerate(thing))
    if isinstance(thing, (keras.Variable, tf.Variable, tf.Tensor, np.ndarray, str, type)):
        return []
    if isinstance(thing, tf.data.Dataset) or not _may_hold(thing):
        return []
    return [
        (name, part)
        for name, part in vars(thing).items()
        if not (name.startswith(marks.PREFIX) or name in _MADE_BY_KERAS or _is_of_call(part))
    ]


def _is_of_call(thing) -> bool:
    """Whether it is of what Keras keeps for itself, or a strategy."""
    kind = type(thing)
    of_keras = kind.__name__ in _OF_CALLS and kind.__module__.startswith("keras.")
    return of_keras or isinstance(thing, tf.distribute.Strategy)


def _may_hold(thing) -> bool:
    package = str(type(thing).__module__).partition(".")[0]
    return hasattr(thing, "__dict__") and (package not in _FOREIGN or isinstance(thing, _HOLDERS))


_NUMBERS = (bool, int, float, np.number)


# An array with more numbers is data rather than state.
_MOST_IN_ARRAY = 2**20


class Numbers:
    """The numbers, arrays, tensors and texts that a model and its objects have as attributes.

    Args:
        model: The model; None for nothing.
    """

    def __init__(self, model: keras.Model | None):
        self.walked = _objects(model)
        self._numbers = [
            _Number(path, thing, name)
            for path, thing in self.walked
            for name, value in vars(thing).items()
            if _is_number(value) and is_own(thing, name) and name not in _OF_KERAS
        ]
        self._objects = [_Object(path, thing) for path, thing in self.walked if is_users(thing)]
        self.held = [*self._numbers, *self._objects]

    def changed(self) -> list[str]:
        """Returns the names of numbers and arrays that have another value now.

        Tensors are left out: many layers keep those of their last call, such as attention scores. A
        step that goes on from one gives other results, which are compared.
        """
        return [each.path_of_name for each in self._numbers if each.has_changed()]

    def restore(self) -> None:
        """Gives them the values that they had, and removes what has come."""
        for each in self.held:
            each.restore()


def _objects(model) -> list:
    walked = walk(model) if model is not None else []
    return [(path, thing) for path, thing in walked if hasattr(thing, "__dict__")]


class _Object:
    """The attributes of an object of the user's, as they were; numbers apart.

    A step that runs eagerly keeps the last loss in an attribute that begins as None, or a moving
    mean in a tensor. A trace leaves tensors of its graph there, which no other trace can read.
    """

    def __init__(self, path: str, thing):
        self.path, self._thing = path, thing
        self._was = dict(vars(thing))

    def again(self) -> _Object:
        return _Object(self.path, self._thing)

    def keep_since(self, then: _Object) -> None:
        self._was.update(then._others())

    def restore(self):
        others = self._others()
        # An object that has got variables is as after a `build`.
        if any(map(_has_variables, others.values())):
            return
        for name, value in others.items():
            if not _is_plain(value):
                continue
            if name not in self._was:
                del vars(self._thing)[name]
            elif self._was[name] is None or isinstance(self._was[name], _HELD_AS_ONE):
                vars(self._thing)[name] = self._was[name]

    def _others(self) -> dict:
        """Returns what attributes hold now that were not there, or held another object."""
        return {
            name: value
            for name, value in vars(self._thing).items()
            if (name not in self._was or value is not self._was[name])
            and is_own(self._thing, name)
            and name not in (*_OF_KERAS, *_MADE_BY_KERAS)
        }


class _Attribute:
    """An attribute of an object, as it was."""

    def __init__(self, path: str, thing, name: str):
        self.path, self.thing, self.name = path, thing, name
        self.note()

    @property
    def path_of_name(self) -> str:
        return f"{self.path}/{self.name}" if self.path else self.name

    @property
    def now(self):
        return vars(self.thing).get(self.name)

    def again(self):
        return type(self)(self.path, self.thing, self.name)

    def keep_since(self, then):
        if then.is_other():
            self.note()


class _Number(_Attribute):
    def note(self):
        self._value = self.now
        self._was = np.copy(self.now) if isinstance(self.now, np.ndarray) else self.now

    def has_changed(self) -> bool:
        return not _is_same(self.now, self._was)

    is_other = has_changed

    def restore(self):
        vars(self.thing)[self.name] = self._value
        if isinstance(self._value, np.ndarray) and not _is_same(self._value, self._was):
            self._value[...] = self._was


def _is_number(value) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.size <= _MOST_IN_ARRAY
    return isinstance(value, _NUMBERS)


def attributes_of(model: keras.Model) -> dict[str, object]:
    """Returns what a model and its objects hold, by path: numbers and text, or which object."""
    simple = (*_NUMBERS, str, bytes)
    found = {}
    for path, thing in walk(model):
        held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
        for name, value in held.items():
            is_key = isinstance(thing, dict) and not str(name).startswith(_PRIVATE)
            is_looked_at = is_key or (not isinstance(thing, dict) and is_own(thing, name))
            if is_looked_at and name not in (*_OF_KERAS, *_MADE_BY_KERAS):
                found[f"{path}/{name}"] = value if isinstance(value, simple) else id(value)
    return found


_CONTAINERS = (list, dict, set, collections.deque)
_HELD_AS_ONE = (str, bytes, tf.Tensor)
_PLAIN = (*_NUMBERS, *_HELD_AS_ONE, type(None), np.ndarray)
_WITH_VARIABLES = (keras.Variable, keras.Layer, keras.Metric, keras.Optimizer, tf.Module)
_WITH_VARIABLES += (tf.Variable,)


class Containers:
    """The lists, dicts, sets and deques of numbers or text that a model and its objects hold.

    What holds layers or other objects is left out.

    Args:
        model: The model; None for nothing.
    """

    def __init__(self, model: keras.Model | None):
        self.walked = _objects(model)
        self.held = [
            _Container(path, thing, name)
            for path, thing in self.walked
            if not isinstance(thing, _CONTAINERS)
            for name, value in vars(thing).items()
            if isinstance(value, _CONTAINERS) and is_own(thing, name) and _is_plain(value)
        ]

    def changed(self) -> list[str]:
        """Returns the names of those that have other contents now, each once."""
        return [each.path_of_name for each in self.held if each.has_changed()]

    def restore(self) -> None:
        """Gives them the contents that they had; one that has got other objects stays."""
        for each in self.held:
            each.restore()


class _Container(_Attribute):
    def note(self):
        self._value = self.now
        inner = _containers_in(self.now) if _is_plain(self.now) else []
        self._parts = [(part, list(_items(part))) for part in inner]

    def has_changed(self) -> bool:
        return any(_differs(part, was) for part, was in self._parts)

    def is_other(self) -> bool:
        return self.now is not self._value or self.has_changed()

    def restore(self):
        # Keras keeps a copy of each list that is assigned: `self.labels += [...]` makes another.
        now = self.now
        if now is not self._value and isinstance(now, _CONTAINERS) and _is_plain(now):
            vars(self.thing)[self.name] = self._value
        for part, was in self._parts:
            if _differs(part, was) and _is_plain(part):
                _refill(part, was)


_Held = TypeVar("_Held", Numbers, Containers)


@contextlib.contextmanager
def restored(values: _Held) -> Iterator[_Held]:
    """Gives the numbers or the containers of a model back what they had, on exit.

    What a layer sets in `build` stays, since it is built only once.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(values.restore)
        for path, thing in values.walked:
            if vars(thing).get("built") is False and callable(getattr(thing, "build", None)):
                stack.enter_context(_noting_build(values, path, thing))
        yield values


def _noting_build(values, path, thing):
    """Notes what the `build` of an object changes, in it and in what it holds."""
    build = thing.build

    @functools.wraps(build)
    def noting(*args, **kwargs):
        held = [each for each in values.held if not path or f"{each.path}/".startswith(f"{path}/")]
        begin = [each.again() for each in held]
        build(*args, **kwargs)
        for each, then in zip(held, begin):
            each.keep_since(then)

    return with_attributes(thing, build=noting)


def _refill(container, was):
    """Puts contents back; Keras would make copies of containers that are put into its own."""
    if isinstance(container, list):
        container[:] = was
    elif isinstance(container, dict):
        before = dict(was)
        for name in [each for each in container if each not in before]:
            del container[name]
        for name, value in before.items():
            if name not in container or container[name] is not value:
                container[name] = value
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(was)


def _is_plain(value, depth=_DEPTH) -> bool:
    if isinstance(value, (*_CONTAINERS, tuple)) and depth:
        return all(_is_plain(part, depth - 1) for part in _values(value))
    return isinstance(value, _PLAIN)


def _has_variables(value, depth=_DEPTH) -> bool:
    if isinstance(value, (*_CONTAINERS, tuple)) and depth:
        return any(_has_variables(part, depth - 1) for part in _values(value))
    return isinstance(value, _WITH_VARIABLES)


def _containers_in(value, depth=_DEPTH) -> list:
    """Returns a container and those within it."""
    if not isinstance(value, (*_CONTAINERS, tuple)) or not depth:
        return []
    inner = [part for each in _values(value) for part in _containers_in(each, depth - 1)]
    return [value, *inner] if isinstance(value, _CONTAINERS) else inner


def _values(value):
    return value.values() if isinstance(value, dict) else value


def _items(value):
    return value.items() if isinstance(value, dict) else value


def _differs(container, was) -> bool:
    now = list(_items(container))
    if isinstance(container, dict):
        now, was = [part for pair in now for part in pair], [part for pair in was for part in pair]
    return len(now) != len(was) or not all(_is_same(a, b) for a, b in zip(now, was))


def _is_same(value, other) -> bool:
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other, equal_nan=True)
    return value is other or (isinstance(value, _NUMBERS) and bool(value == other))
