"""The state of callbacks in a checkpoint.

That is what Keras's callbacks which stop training, lower the rate, keep the best weights, swap
them or count steps go by, and what a callback of the user's own returns from `state_dict`; these
are the names that PyTorch and Lightning have for such methods.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence

import numpy as np

from tfmulti import keras_compat

_REMEMBERED = ("best", "best_epoch", "wait", "stopped_epoch", "cooldown_counter")
_REMEMBERED += (keras_compat.HAS_AVERAGES, *keras_compat.COUNTERS)
_BEST_WEIGHTS = "best_weights"
# What Keras gives to each callback.
_OF_KERAS = ("_model", "params")


def take(callbacks: Sequence) -> tuple[list, dict[str, np.ndarray]]:
    """Copies the state of callbacks.

    Args:
        callbacks: The callbacks.

    Returns:
        The class of each, its attributes, and what its `state_dict` returns, as JSON; and the best
        weights, by name.

    Raises:
        ValueError: If a `state_dict` returns what is not JSON.
    """
    remembered, tensors = [], {}
    for number, callback in enumerate(callbacks):
        values = {n: getattr(callback, n) for n in _REMEMBERED if hasattr(callback, n)}
        values = {n: _plain(v) for n, v in values.items() if is_json(_plain(v))}
        remembered.append([type(callback).__name__, values, _own_state(callback)])
        for index, weights in enumerate(_best_weights(callback)):
            tensors[f"callback/{number}/{index:06d}"] = weights
    return remembered, tensors


def restore(remembered: list, tensors: dict, callbacks: Sequence) -> None:
    """Restores the state of callbacks.

    Args:
        remembered: The state, as `take` has returned it.
        tensors: The values of a checkpoint, by name.
        callbacks: The callbacks; those of one class in the same order.
    """
    for number, callback in enumerate(_pair(remembered, callbacks)):
        if callback is None:
            continue
        _, values, *own = remembered[number]
        for name, value in values.items():
            whole = type(getattr(callback, name, None)) is int and isinstance(value, float)
            setattr(callback, name, int(value) if whole else value)
        start = f"callback/{number}/"
        weights = [tensors[n].numpy() for n in sorted(tensors) if n.startswith(start)]
        if weights:
            setattr(callback, _BEST_WEIGHTS, weights)
        if own and own[0] is not None and _has_own_state(callback):
            callback.load_state_dict(copy.deepcopy(own[0]))


def report_unused(remembered: list, callbacks: Sequence, print_fn: Callable[[str], None]) -> None:
    """Prints which callbacks of a checkpoint this run does not use."""
    for (kind, *state), callback in zip(remembered, _pair(remembered, callbacks)):
        if any(state) and callback is None:
            print_fn(
                f"the checkpoint has state for the callback {kind}, which this run does not "
                "use; the state is ignored"
            )


def numbers_of(callbacks: Sequence) -> list[dict]:
    """Returns a copy of the plain attributes of the user's own callbacks, by name."""
    return [_numbers_of(callback) if is_users(callback) else {} for callback in callbacks]


def changed(callbacks: Sequence, first: Sequence[dict]) -> list:
    """Returns which plain attributes callbacks have changed that are not saved.

    Args:
        callbacks: The callbacks.
        first: Their attributes when training began, as `numbers_of` returned them.

    Returns:
        Pairs of the name of a class and the names of its attributes.
    """
    found = []
    for callback, before, now in zip(callbacks, first, numbers_of(callbacks)):
        names = [name for name in now if name not in before or now[name] != before[name]]
        if names and not _has_own_state(callback):
            found.append([type(callback).__name__, names])
    return found


def report_changed(unsaved: Sequence, print_fn: Callable[[str], None]) -> None:
    """Prints which attributes of callbacks begin anew in a resumed run."""
    for kind, names in unsaved:
        print_fn(
            f"the callback {kind} had changed {', '.join(names)}, which a checkpoint does not "
            "have: here they begin anew. To keep such state, give the callback `state_dict()`, "
            "which returns it, and `load_state_dict(state)`"
        )


def _has_own_state(callback) -> bool:
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(callback, name, None)) for name in names)


def _own_state(callback):
    if not _has_own_state(callback):
        return None
    state = callback.state_dict()
    if not is_json(state):
        raise ValueError(
            "`state_dict` of a callback must return JSON: numbers, strings, lists and dicts whose "
            f"keys are strings. Received: {state!r} from {type(callback).__name__}. "
            "Return tuples as lists and arrays as array.tolist()."
        )
    return copy.deepcopy(state)


def is_users(callback) -> bool:
    """Whether a callback is of the user's own."""
    return type(callback).__module__.partition(".")[0] not in ("keras", "tensorflow", "tfmulti")


def attributes_of(callback) -> dict:
    """Returns the attributes of a callback, but for those that Keras gives to each."""
    return {name: value for name, value in vars(callback).items() if name not in _OF_KERAS}


def _numbers_of(callback) -> dict:
    kinds = (bool, int, float, str, list, dict)
    return {
        name: copy.deepcopy(value)
        for name, value in vars(callback).items()
        if type(value) in kinds and name not in (*_OF_KERAS, *_REMEMBERED) and is_json(value)
    }


def _pair(remembered, callbacks) -> list:
    """Returns the callback that has each remembered state, or None: the next of the same class.

    Their places do not tell: several workers have more callbacks than one process.
    """
    left, found = list(callbacks), []
    for kind, *_ in remembered:
        places = [i for i, each in enumerate(left) if type(each).__name__ == kind]
        found.append(left.pop(places[0]) if places else None)
    return found


def _plain(value):
    """Returns a scalar as a Python number, a copy of a collection, anything else unchanged."""
    if isinstance(value, dict | list):
        return copy.deepcopy(value)
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def is_json(value) -> bool:
    """Whether a checkpoint preserves a value; a callback's value can be anything."""
    try:
        return value != value or _is_same(json.loads(json.dumps(value)), value)
    except (TypeError, ValueError):
        return False


def _is_same(kept, value) -> bool:
    """Whether two values are equal, where NaN, as of a metric, is equal to itself."""
    if isinstance(kept, dict) and isinstance(value, dict):
        return kept.keys() == value.keys() and all(_is_same(kept[n], value[n]) for n in kept)
    if isinstance(kept, list) and isinstance(value, list):
        return all(map(_is_same, kept, value))
    return kept == value or (kept != kept and value != value)


def _best_weights(callback) -> list[np.ndarray]:
    weights = getattr(callback, _BEST_WEIGHTS, None)
    arrays = [np.asarray(weight) for weight in weights] if isinstance(weights, list | tuple) else []
    # Arrays that are not numeric are not saved.
    return arrays if all(array.dtype.kind not in "OSU" for array in arrays) else []
