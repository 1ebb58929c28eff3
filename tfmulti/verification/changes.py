"""Finds variables that a step changes outside the scope, only reads, or leaves unlike."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.verification.differences import compare, largest_change, same_bits
from tfmulti.verification.state import OPTIMIZER, OTHER, OWN, TRAINABLE, WEIGHT, State

# A variable of more numbers than this is no setting.
_MOST_SETTINGS = 4096


def used_by(functions: list) -> set[int]:
    """Returns the keys of the handles of all variables that traced steps read or change.

    Args:
        functions: The traced steps.
    """
    return {keras_compat.handle_key(h) for f in functions for h in keras_compat.handles_of(f)}


def changed_outside(parts: list, begin: list[np.ndarray], ends) -> list[str]:
    """Returns changed variables that exist once: every replica would change the same one.

    Args:
        parts: Those of the `State`.
        begin: Their values before the steps.
        ends: Their values after the steps on one device, and after those on the replicas.
    """
    return [
        part.name
        for i, part in enumerate(parts)
        if part.replica is None
        and part.kind in (WEIGHT, OTHER)
        and not part.is_random_state
        and not part.is_internal
        and any(not same_bits(end[i], begin[i]) for end in ends)
    ]


def unchanged_settings(
    parts: list, functions: list, begin: list[np.ndarray], end: list[np.ndarray]
) -> list[tuple[tf.Tensor, np.ndarray]]:
    """Returns the handles and values of small variables that a step reads and leaves.

    Args:
        parts: Those of the `State`.
        functions: The traced steps; empty if they run eagerly.
        begin: The values before the step.
        end: The values after it.
    """
    used = used_by(functions)
    return [
        (part.handle, begin[i])
        for i, part in enumerate(parts)
        if part.kind in (WEIGHT, OWN, OTHER)
        and not (part.is_internal or part.is_random_state)
        and begin[i].size <= _MOST_SETTINGS
        and same_bits(begin[i], end[i])
        and (not functions or keras_compat.handle_key(part.handle) in used)
    ]


def make_alike(model) -> str:
    """Makes trained weights and slots the same on all local replicas: those of the first one.

    Args:
        model: The model.

    Returns:
        The name of one that they held differently, or "".
    """
    state, name = State(model), ""
    kept = [part for part in state.parts if part.kind in (TRAINABLE, OPTIMIZER) and part.replica]
    for part in kept:
        handles = part.handle, state.parts[part.first].handle
        value, first = map(keras_compat.read_handle, handles)
        if not same_bits(value, first):
            name = name or part.name
            keras_compat.write_handle(part.handle, first)
    return name


def find_drift(
    parts: list, begin: list[np.ndarray], end: list[np.ndarray], digest, close: float
) -> str:
    """Returns the name of a variable that replicas hold differently after a step, or "".

    Args:
        parts: Those of the `State`.
        begin: The values before the step.
        end: The values after it.
        digest: A hash; the first replica's values are added to it.
        close: The relative difference that is rounding.
    """
    drifted = ""
    for part, before, value in zip(parts, begin, end):
        if part.kind not in (TRAINABLE, OPTIMIZER) or part.replica is None:
            continue
        first = part.first
        if not same_bits(begin[first], before):
            continue
        change = largest_change(end[first], begin[first])
        if compare(end[first], value, change, 0.0, close) is not None:
            drifted = drifted or part.name
        if part.replica == 0 and not part.is_owned:
            digest.update(value.tobytes())
    return drifted
