"""The numbers, lists and dicts in a model's Python attributes; notices and undoes changes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfmulti import marks

# Attributes that are not looked at, and those that tfmulti sets.
_PRIVATE = ("_", marks.PREFIX)
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
    if isinstance(thing, (list, tuple, set)):
        return list(enumerate(thing))
    if isinstance(thing, (keras.Variable, tf.Variable, tf.Tensor, np.ndarray, str, type)):
        return []
    if isinstance(thing, (tf.distribute.Strategy, tf.data.Dataset)) or not _may_hold(thing):
        return []
    return [(name, part) for name, part in vars(thing).items() if not _is_tracker(part)]


def _is_tracker(thing) -> bool:
    """Whether it is Keras's list of the variables that an object has created."""
    return type(thing).__name__ == "Tracker" and type(thing).__module__.startswith("keras.")


def _may_hold(thing) -> bool:
    module = str(type(thing).__module__)
    foreign = ("tensorflow.", "numpy", "builtins", "_", "types", "functools", "tfmulti.")
    # Classes of a script belong to `__main__`.
    mine = module == "__main__" or not module.startswith(foreign)
    return hasattr(thing, "__dict__") and mine


_NUMBERS = (bool, int, float, np.number)
# Keras sets these itself.
_OF_KERAS = ("built", "stop_training")
_MADE_BY_KERAS = ("history", "train_function", "test_function", "predict_function")


# An array with more numbers is data rather than state.
_MOST_IN_ARRAY = 2**20


class Numbers:
    """The numbers and arrays that a model, and the objects that it holds, have as attributes.

    Args:
        model: The model; None for nothing.
    """

    def __init__(self, model: keras.Model | None):
        self._held = [
            (path, thing, name, value)
            for path, thing in (walk(model) if model is not None else ())
            if hasattr(thing, "__dict__")
            for name, value in vars(thing).items()
            if _is_number(value) and not name.startswith(_PRIVATE) and name not in _OF_KERAS
        ]
        self._contents = [np.copy(v) if isinstance(v, np.ndarray) else v for *_, v in self._held]

    def changed(self) -> list[str]:
        """Returns the names of those that have another value now."""
        return [
            f"{path}/{name}" if path else name
            for (path, thing, name, _), was in zip(self._held, self._contents)
            if not _is_same(vars(thing).get(name), was)
        ]

    def restore(self) -> None:
        """Gives them the values that they had."""
        for (_, thing, name, value), was in zip(self._held, self._contents):
            vars(thing)[name] = value
            if isinstance(value, np.ndarray) and not _is_same(value, was):
                value[...] = was


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
            if not str(name).startswith(_PRIVATE) and name not in (*_OF_KERAS, *_MADE_BY_KERAS):
                found[f"{path}/{name}"] = value if isinstance(value, simple) else id(value)
    return found


_CONTAINERS = (list, dict, set, collections.deque)
_PLAIN = (*_NUMBERS, str, bytes, type(None), np.ndarray, tf.Tensor)


class Containers:
    """The lists, dicts, sets and deques of numbers or text that a model and its objects hold.

    What holds layers or other objects is left out, and so are private attributes.

    Args:
        model: The model; None for nothing.
    """

    def __init__(self, model: keras.Model | None):
        bound = [
            (f"{path}/{name}" if path else name, thing, name, value)
            for path, thing in (walk(model) if model is not None else ())
            if hasattr(thing, "__dict__") and not isinstance(thing, _CONTAINERS)
            for name, value in vars(thing).items()
            if isinstance(value, _CONTAINERS) and not name.startswith(_PRIVATE) and _is_plain(value)
        ]
        inner = [(path, part) for path, *_, value in bound for part in _containers_in(value)]
        self._bound, self._held = bound, [(path, part, list(_items(part))) for path, part in inner]

    def changed(self) -> list[str]:
        """Returns the names of those that have other contents now, each once."""
        return list(dict.fromkeys(name for name, part, was in self._held if _differs(part, was)))

    def restore(self) -> None:
        """Gives them the contents that they had; one that has got other objects stays.

        Keras keeps a copy of each list that is assigned: `self.labels += [...]` makes another one.
        """
        for _, thing, name, value in self._bound:
            now = vars(thing).get(name)
            if now is not value and isinstance(now, _CONTAINERS) and _is_plain(now):
                vars(thing)[name] = value
        for _, part, was in self._held:
            if _differs(part, was) and _is_plain(part):
                _refill(part, was)


_Held = TypeVar("_Held", Numbers, Containers)


@contextlib.contextmanager
def restored(values: _Held) -> Iterator[_Held]:
    """Gives the numbers or the containers of a model back what they had, on exit."""
    try:
        yield values
    finally:
        values.restore()


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
