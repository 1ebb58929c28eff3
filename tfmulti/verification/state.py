"""All that a step reads or changes, replica by replica, to be compared and put back."""

from __future__ import annotations

import dataclasses

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
"""What a variable is to the model; METRIC and OTHER are put back, but not compared as they are."""
COMPARED = (TRAINABLE, WEIGHT, OPTIMIZER, OWN)


@dataclasses.dataclass(frozen=True)
class Part:
    """One replica's part of a variable.

    Attributes:
        handle: Its handle.
        name: The variable's path or name.
        kind: One of this module's.
        replica: Which local replica's it is, from 0; None for a variable that all share.
    """

    handle: tf.Tensor
    name: str
    kind: str
    replica: int | None


class State:
    """The variables of a model, of what it holds, and of what its traced steps touch.

    Args:
        model: The model.
        functions: Traced steps; none where they run eagerly.
    """

    def __init__(self, model: keras.Model, functions=()):
        self.parts: list[Part] = []
        self._known: set[int] = set()
        optimizers = model_contents.optimizers_of(model, nested=True)
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        self._add(model.trainable_variables, TRAINABLE)
        self._add(model.metrics_variables, METRIC)
        self._add(slots, OPTIMIZER)
        self._add(model.variables, WEIGHT)
        self._add(_held_variables(model), OWN)
        for function in functions:
            names = {keras_compat.handle_key(v.handle): v.name for v in function.graph.variables}
            for handle in keras_compat.handles_of(function):
                self._add_handle(handle, names)

    def read(self) -> list[np.ndarray]:
        """Returns the values of all parts."""
        return [keras_compat.read_handle(part.handle) for part in self.parts]

    def write(self, values: list[np.ndarray]) -> None:
        """Puts back what `read` returned, bit for bit."""
        for part, value in zip(self.parts, values):
            keras_compat.write_handle(part.handle, value)

    def _add(self, variables, kind):
        for variable in variables:
            value = getattr(variable, "value", None)
            value = value if isinstance(variable, keras.Variable) else variable
            if value is None:
                continue
            name = getattr(variable, "path", getattr(variable, "name", ""))
            parts = getattr(value, "values", None)
            if isinstance(value, tf.distribute.DistributedValues):
                for replica, part in enumerate(parts):
                    self._add_part(part.handle, name, self._kind_of(value, kind), replica)
            else:
                self._add_part(value.handle, name, OTHER if kind == OWN else kind, None)

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

    def _add_part(self, handle, name, kind, replica):
        key = keras_compat.handle_key(handle)
        if key not in self._known:
            self._known.add(key)
            self.parts.append(Part(handle, name, kind, replica))


def _held_variables(model) -> list:
    return [x for x in _walk(model) if isinstance(x, (keras.Variable, tf.Variable))]


def _walk(model, depth=8) -> list:
    """All objects that a model holds in attributes and containers, itself first."""
    seen, found, level = set(), [], [model]
    for _ in range(depth):
        below = []
        for thing in level:
            if id(thing) not in seen:
                seen.add(id(thing))
                found.append(thing)
                below += _held_by(thing)
        level = below
    return found


def _held_by(thing) -> list:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, (list, tuple, set)):
        return list(thing)
    if isinstance(thing, (keras.Variable, tf.Variable, tf.Tensor, np.ndarray, str, type)):
        return []
    if isinstance(thing, (tf.distribute.Strategy, tf.data.Dataset)) or not _may_hold(thing):
        return []
    return list(vars(thing).values())


def _may_hold(thing) -> bool:
    module = str(type(thing).__module__)
    return hasattr(thing, "__dict__") and not module.startswith(
        ("tensorflow.", "numpy", "builtins", "_", "types", "functools", "tfmulti.")
    )
