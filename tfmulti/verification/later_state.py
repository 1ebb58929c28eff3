"""State as it may be later in a training: counters, phases, averages, the weights of losses."""

from __future__ import annotations

import keras
import numpy as np

from tfmulti import keras_compat
from tfmulti.step import model_contents
from tfmulti.verification.dependencies import place_of
from tfmulti.verification.state import METRIC, OPTIMIZER, TRAINABLE, used_by
from tfmulti.verification.views import View, holds

# A vector of up to this many numbers may be a setting, such as the weights of a few losses.
_FEW = 8


def reads_scalar(graph) -> bool:
    """Whether the user's own code reads a scalar variable, such as a counter or a phase.

    Args:
        graph: The graph of a step.
    """
    return any(
        operation.type == "ReadVariableOp"
        and operation.outputs[0].shape.rank == 0
        and place_of(operation)
        for operation in graph.get_operations()
    )


def vary_state(state, values: list[np.ndarray], case, functions, view: View) -> list[np.ndarray]:
    """Returns state as in later steps: large counters, and settings that are not 0.

    Args:
        state: The `State`.
        values: Its current values.
        case: The step to verify.
        functions: The traced steps; only variables that they use are varied. Empty if eager.
        view: The values to set.
    """
    used = used_by(functions)
    optimizers = model_contents.optimizers_of(case.model, nested=True)
    counters = {optimizer.iterations.path for optimizer in optimizers}
    rates = [
        optimizer.learning_rate for optimizer in optimizers if hasattr(optimizer, "iterations")
    ]
    rates = {rate.path for rate in rates if isinstance(rate, keras.Variable)}
    varied = []
    for part, value in zip(state.parts, values):
        new = None
        if part.is_internal or functions and keras_compat.handle_key(part.handle) not in used:
            pass
        elif view.number is not None:
            may = _may_equal(part, value, view.number, part.name in counters)
            new = view.number if may else None
        elif view.ratio is not None:
            new = _at_moment(part, value, view, part.name in counters)
        elif part.kind == OPTIMIZER:
            new = view.iterations if part.name in counters else None
            new = view.setting if part.name in rates and not value.any() else new
        elif part.kind != METRIC and not value.any() and not part.is_random_state:
            new = _setting(value, view, part.kind)
        varied.append(value if new is None else _filled(value, new))
    return varied


def _at_moment(part, value, view, is_counter):
    """Returns what a scalar variable is at another moment of the training, or None."""
    if value.dtype.kind in "iu":
        return view.iterations if _may_equal(part, value, view.iterations, is_counter) else None
    is_setting = part.kind not in (METRIC, TRAINABLE, OPTIMIZER) and not part.is_random_state
    if not is_setting or value.size != 1 or value.dtype.kind == "O":
        return None
    if value.dtype.kind == "b":
        return bool(view.iterations % 2)
    return float(value.reshape(())) * view.ratio if value.any() else view.ratio


def _may_equal(part, value, number, is_counter) -> bool:
    """Whether a variable is a phase, a count or a single weight that could have a number."""
    if value.dtype.kind == "f":
        return part.kind not in (METRIC, OPTIMIZER) and value.size == 1
    if value.dtype.kind not in "iu":
        return False
    if part.kind == OPTIMIZER:
        return is_counter and number >= 0 and holds(value.dtype, number)
    is_setting = part.kind not in (METRIC, TRAINABLE) and not part.is_random_state
    return is_setting and value.size == 1 and holds(value.dtype, number)


def _setting(value, view, kind):
    if value.dtype.kind == "O":
        return None
    if value.size > (1 if kind == TRAINABLE else _FEW) or (kind == TRAINABLE and value.ndim):
        return None
    if value.dtype.kind in "iu":
        return view.iterations if view.counters and value.size == 1 else None
    return view.setting


def _filled(value, number):
    if value.dtype.kind in "iu":
        number = min(number, np.iinfo(value.dtype).max)
    return np.full_like(value, number)
