"""Reads and restores what a step reads or changes: variables, for each replica, and attributes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import model_contents

TRAINABLE, WEIGHT, OPTIMIZER, OWN, METRIC, OTHER = (
    "trainable weight",
    "weight",
    "optimizer's variable",
    "variable",
    "metric",
    "other",
)
"""The role of a variable in the model; METRIC and OTHER are restored, but not compared."""
COMPARED = (TRAINABLE, WEIGHT, OPTIMIZER, OWN)
_RANDOM_STATES = ("seed_generator_state", "StateVar")
# How deep parts of a model are looked for.
_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Part:
    """One replica's copy of a variable.

    Attributes:
        handle: Its handle.
        name: The variable's path or name; not unique.
        kind: A constant of this module.
        replica: The local replica, from 0; None for a variable that all replicas share.
        first: The index in `State.parts` of the first copy of the same variable.
        is_owned: Whether other workers have no copy: sharded state or a sharded weight.
    """

    handle: tf.Tensor
    name: str
    kind: str
    replica: int | None
    first: int
    is_owned: bool = False

    @property
    def is_internal(self) -> bool:
        """Whether it belongs to tfmulti itself."""
        return self.name.startswith("tfmulti_")

    @property
    def is_random_state(self) -> bool:
        """Whether it is the state of a random generator of Keras or TensorFlow."""
        return self.name.split("/")[-1].split(":")[0] in _RANDOM_STATES


class State:
    """The variables of a model, of the objects that it holds, and of its traced steps.

    Args:
        model: The model.
        functions: Traced steps; empty if they run eagerly.
        ignored: Variables of verification itself.

    Attributes:
        parts: The copies of all variables that this worker has.
        is_sharded: Whether workers have slots or weights that others have not.
    """

    def __init__(self, model: keras.Model, functions=(), ignored=()):
        self.parts: list[Part] = []
        self.is_sharded = False
        # The variables of one replica have no copies: they are its own.
        self._shared_by = 0 if model.distribute_strategy.num_replicas_in_sync == 1 else None
        # Called in the scope, `fit` makes them variables of the strategy.
        local = model.distribute_strategy.experimental_local_results
        ignored = [each for variable in ignored for each in local(variable)]
        self._known = {keras_compat.handle_key(variable.handle) for variable in ignored}
        optimizers = model_contents.optimizers_of(model, nested=True)
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        self._add(model.trainable_variables, TRAINABLE)
        self._add(keras_compat.metric_variables(model), METRIC)
        self._add(slots, OPTIMIZER)
        self._add(model.variables, WEIGHT)
        held_variables = _held_variables(model)
        self._add(held_variables.values(), OWN, list(held_variables))
        for function in functions:
            names = {keras_compat.handle_key(v.handle): v.name for v in function.graph.variables}
            for handle in keras_compat.handles_of(function):
                self._add_handle(handle, names)

    def slots_of(self, index: int) -> list[int]:
        """Returns the indices of what optimizers keep for a trainable weight.

        Args:
            index: The weight's, in `parts`.
        """
        weight = self.parts[index]
        start = weight.name.replace("/", "_") + "_"
        return [
            i
            for i, part in enumerate(self.parts)
            if part.kind == OPTIMIZER
            and part.replica == weight.replica
            and part.name.split("/")[-1].startswith(start)
        ]

    def read(self) -> list[np.ndarray]:
        """Returns the values of all parts."""
        return [keras_compat.read_handle(part.handle) for part in self.parts]

    def as_on_first_replica(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns values in which every replica has those of the first local replica.

        Args:
            values: What `read` returned.
        """
        return [values[part.first] if part.replica else v for part, v in zip(self.parts, values)]

    def to_compare(self, values: list[np.ndarray]) -> list[int]:
        """Returns the indices of the parts that have one device's values after a step.

        Args:
            values: What `read` returned. Where replicas have values of their own, only the first
                replica's are compared.
        """
        return [
            i
            for i, part in enumerate(self.parts)
            if part.kind in COMPARED
            and part.replica is not None
            and values[i].tobytes() == values[part.first].tobytes()
        ]

    def write(self, values: list[np.ndarray]) -> None:
        """Writes back the values that `read` returned, bit for bit."""
        for part, value in zip(self.parts, values):
            keras_compat.write_handle(part.handle, value)

    def _add(self, variables, kind, paths=()):
        for index, variable in enumerate(variables):
            # An attribute that a variable of TensorFlow lacks is looked for in its value, which
            # is a collective where replicas' copies are added.
            of_keras = isinstance(variable, keras.Variable)
            owned = of_keras and hasattr(variable, "is_here")
            self.is_sharded |= owned
            if owned and not variable.is_here:
                # A slot, or a weight, that another worker keeps.
                continue
            with keras_compat.held_values():
                value = variable.value if of_keras else variable
            if value is None:
                continue
            name = variable.path if of_keras else variable.name
            # TensorFlow gives all unnamed variables the same name.
            name = paths[index] if paths and name.startswith("Variable") else name
            parts = getattr(value, "values", None)
            if owned:
                handle = (parts or (value,))[0].handle
                self._add_part(handle, name, kind, replica=0, is_owned=True)
            elif isinstance(value, tf.distribute.DistributedValues):
                first = len(self.parts)
                for replica, part in enumerate(parts):
                    self._add_part(part.handle, name, self._kind_of(value, kind), replica, first)
            else:
                kind_here, replica = self._kind_of(value, kind), self._shared_by
                kind_here = OTHER if kind_here == OWN and replica is None else kind_here
                self._add_part(value.handle, name, kind_here, replica)

    def _kind_of(self, value, kind):
        added = value.aggregation == tf.VariableAggregation.SUM
        read = value.synchronization == tf.VariableSynchronization.ON_READ
        return METRIC if added and read and kind in (OWN, WEIGHT) else kind

    def _add_handle(self, handle, names):
        container = keras_compat.container_of(handle)
        if container is not None:
            self._add([container], OWN)
        name = names.get(keras_compat.handle_key(handle), "a variable")
        self._add_part(handle, name, OTHER, None)

    def _add_part(self, handle, name, kind, replica, first=None, is_owned=False):
        key = keras_compat.handle_key(handle)
        if key not in self._known:
            self._known.add(key)
            first = len(self.parts) if first is None else first
            self.parts.append(Part(handle, name, kind, replica, first, is_owned))


def _held_variables(model) -> dict:
    """Returns the variables that a model holds, by attribute path, such as `moving/0`."""
    kinds = (keras.Variable, tf.Variable)
    return {path: thing for path, thing in walk(model) if isinstance(thing, kinds)}


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
    return list(vars(thing).items())


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
            if _is_number(value) and not name.startswith("_") and name not in _OF_KERAS
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
            if not str(name).startswith("_") and name not in (*_OF_KERAS, *_MADE_BY_KERAS):
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
        held = [
            (f"{path}/{name}" if path else name, value)
            for path, thing in (walk(model) if model is not None else ())
            if hasattr(thing, "__dict__") and not isinstance(thing, _CONTAINERS)
            for name, value in vars(thing).items()
            if isinstance(value, _CONTAINERS) and not name.startswith("_") and _is_plain(value)
        ]
        inner = [(name, part) for name, value in held for part in _containers_in(value)]
        self._held = [(name, part, list(_items(part))) for name, part in inner]

    def changed(self) -> list[str]:
        """Returns the names of those that have other contents now, each once."""
        return list(dict.fromkeys(name for name, part, was in self._held if _differs(part, was)))

    def restore(self) -> None:
        """Gives them the contents that they had; one that has got other objects stays."""
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
