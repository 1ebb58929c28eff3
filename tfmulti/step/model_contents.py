"""Finds the optimizers and models that a model holds in attributes and containers."""

from __future__ import annotations

import collections

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks

# Packages whose objects are not searched; of keras, layers and optimizers are.
_FOREIGN = (
    "builtins",
    "functools",
    "keras",
    "numpy",
    "tensorflow",
    "tfmulti",
    "threading",
    "types",
)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_VALUES = (np.ndarray, tf.Tensor, tf.Variable, keras.Variable, tf.data.Dataset, tf.TypeSpec)
# The search ends after this many objects.
_MOST = 100_000


def optimizers_of(model: keras.Model, *, nested: bool = False) -> list:
    """Finds the optimizers that a model holds, directly or in the objects that it holds.

    It searches attributes of the model, of its layers and submodels and of plain objects, and
    lists, dicts, tuples and sets, at any depth. The nearest come first; the order is the same on
    every worker.

    Args:
        model: The model.
        nested: Whether to return optimizers within optimizers too, such as the inner one of a
            `LossScaleOptimizer`.

    Returns:
        Optimizers, each once.

    Example:
    >>> model = keras.Sequential()
    >>> model.players = {"first": keras.optimizers.SGD(), "second": [keras.optimizers.Adam()]}
    >>> [type(optimizer).__name__ for optimizer in optimizers_of(model)]
    ['SGD', 'Adam']
    """
    found = _search(model)
    if nested:
        return found
    within = {id(inner) for each in found for inner in optimizers_within(each)}
    return [each for each in found if id(each) not in within]


def optimizers_within(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns the optimizers that an optimizer holds, and hands updates to."""
    # Layers are skipped: it may hold a reference to the model.
    return _search(optimizer, skipped=keras.layers.Layer)


def optimizers_in_use(model, *, nested: bool = False) -> list:
    """Returns a model's optimizers, without those that its steps cannot or do not apply.

    Keras's own step applies that of `compile` only. A model whose `train_step` uses its own
    optimizers is often compiled without one; Keras then creates a default one. A frozen model
    within it, such as a teacher, may have been compiled.

    Args:
        model: The model.
        nested: As in `optimizers_of`.
    """
    compiled = getattr(model, "optimizer", None)
    if not _has_own_updates(model) and compiled is not None:
        return [compiled, *(optimizers_within(compiled) if nested else ())]
    found = without_idle(optimizers_of(model, nested=nested), model)
    parts = [compiled, getattr(compiled, "inner_optimizer", None)]
    is_chosen = any(marks.DISTRIBUTED.get(part) for part in parts)
    if is_chosen or not keras_compat.has_custom_step(model, "train"):
        return found
    return [each for each in found if each is not compiled] or found


def _has_own_updates(model) -> bool:
    own_function = keras_compat.has_own_function(model, "fit")
    return own_function or keras_compat.has_custom_step(model, "train")


def without_idle(optimizers: list, model: keras.Model) -> list:
    """Leaves out those with which a model within the model was compiled that is frozen now.

    Args:
        optimizers: Optimizers of the model.
        model: The model.
    """
    idle, compiled = set(), getattr(model, "optimizer", None)
    for holder in models_within(model):
        outer = getattr(holder, "optimizer", None)
        if not isinstance(outer, keras.optimizers.Optimizer) or outer is compiled:
            continue
        trained = {id(variable) for variable in holder.trainable_variables}
        # One that has not been built may still get variables of layers that have not.
        inner = keras_compat.inner_optimizer(outer)
        own = keras_compat.updated_variables(inner) if inner.built else holder.weights
        if own and not any(id(variable) in trained for variable in own):
            idle |= {id(outer), id(inner)}
    return [each for each in optimizers if id(each) not in idle]


def models_within(model: keras.Model) -> list[keras.Model]:
    """Returns the models that a model holds, directly or in the objects that it holds."""
    return _search(model, keras.Model)


def _search(root, kind=keras.optimizers.Optimizer, skipped=()) -> list:
    found, seen, waiting = [], {id(root)}, collections.deque([root])
    while waiting and len(seen) < _MOST:
        for part in _parts(waiting.popleft()):
            if id(part) in seen or not _is_searched(part) or isinstance(part, skipped):
                continue
            seen.add(id(part))
            waiting.append(part)
            if isinstance(part, kind):
                found.append(part)
    return found


def _parts(holder) -> list:
    if isinstance(holder, dict):
        return list(holder.values())
    if isinstance(holder, set | frozenset):
        # The order of a set differs between processes.
        return sorted(
            holder, key=lambda part: (type(part).__name__, str(getattr(part, "name", "")))
        )
    if isinstance(holder, _CONTAINERS):
        return list(holder)
    parts = list(vars(holder).values()) if hasattr(holder, "__dict__") else []
    for kind in type(holder).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        parts += [getattr(holder, n, None) for n in names if not n.startswith("__")]
    if isinstance(holder, keras.Model):
        parts.append(getattr(holder, "optimizer", None))
    return parts


def _is_searched(part) -> bool:
    if isinstance(part, (*_CONTAINERS, keras.layers.Layer, keras.optimizers.Optimizer)):
        return True
    if part is None or isinstance(part, (type, *_VALUES)):
        return False
    return type(part).__module__.split(".")[0] not in _FOREIGN
