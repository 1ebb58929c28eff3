"""What a step is tried on beside a few rows as they are: data and state of later steps.

Both sides of a comparison get the same, whatever it is, so that nothing that is made up here can
make them differ. A step that fails on it, or comes to no number, has proved nothing and loses
nothing.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import model_contents
from tfmulti.verification.state import METRIC, OPTIMIZER, TRAINABLE

LABELS, PADDING, WEIGHTS = "labels", "padding", "sample weights"
WAYS = (LABELS, PADDING, WEIGHTS)
# One less than a multiple of every number to 10: an optimizer that accumulates then updates.
_SOON, _LATE = 5039, 1_441_439
# Neighbouring shares get unequal parts of each.
_WHOSE = (0, 0, 1, 2, 1, 0, 2)
_KEPT = (1.0, 0.5, 0.25, 0.75)
_FACTORS = (1.0, 0.0, 2.0, 1.0, 0.5)
# A coefficient for each of a few losses; what is longer is no setting.
_FEW = 8


@dataclasses.dataclass(frozen=True)
class View:
    """One way to look at a step.

    Attributes:
        ways: How the rows are varied, of `WAYS`.
        iterations: What counters of steps stand at; 0 leaves all state as it is.
        setting: What numbers that are 0 are set to, with `iterations`.
        counters: Whether whole numbers of the user's own count as counters too.
    """

    ways: tuple[str, ...] = ()
    iterations: int = 0
    setting: float = 0.0
    counters: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether everything is as it is."""
        return not self.ways and not self.iterations

    def __str__(self):
        what = [f"other {way}" for way in self.ways]
        if self.iterations:
            what.append(f"optimizer.iterations at {self.iterations}")
            what.append(f"variables that are 0 at {self.setting:g}")
        return ", ".join(what)


PLAIN = View()


def later_views(ways: tuple[str, ...]) -> list[tuple[View, View]]:
    """Returns views of state as it can be later, each with what to try where it fails.

    Args:
        ways: How the rows are varied.
    """
    pairs = ((_SOON, 1.0), (_LATE, 1000.0))
    return [(View(ways, *pair), View(ways, *pair, counters=False)) for pair in pairs]


def vary_rows(rows, parts: list, ways: tuple[str, ...]) -> tuple[list, tuple[str, ...]]:
    """Returns rows with other labels, padding and weights; every value is one that was there.

    Labels, and other whole numbers of which a row has one, come from two rows, unevenly; where
    all are alike, some become 0 or 1. Sequences end in zeros. Given weights are 0 or doubled.

    Args:
        rows: The `Rows` that the parts are of.
        parts: What `Rows` holds, for some rows.
        ways: What to vary, of `WAYS`.

    Returns:
        The rows, and in which of the ways they are others now.
    """
    roles = rows.roles()
    # Ragged and sparse parts stay, and have lengths of their own.
    dense = all(isinstance(part, tf.Tensor) for part in parts)
    arrays = [part.numpy() if isinstance(part, tf.Tensor) else part for part in parts]
    used = []
    for way in ways:
        if way == PADDING and not dense:
            continue
        varied = _VARY[way](arrays, roles)
        if any(a is not b and not np.array_equal(a, b) for a, b in zip(arrays, varied)):
            used.append(way)
            arrays = varied
    new = [tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
    return new, tuple(used)


def _exchange(arrays, roles):
    moved = [i for i, (a, role) in enumerate(zip(arrays, roles)) if _is_label(a, role)]
    if not moved:
        return arrays
    first = {}
    for row in range(len(arrays[moved[0]])):
        first.setdefault(tuple(_key(arrays[i][row]) for i in moved), row)
    sources = list(first.values())[:3]
    whose = np.resize(_WHOSE, len(arrays[moved[0]]))
    taken = np.array(sources)[whose % len(sources)]
    return [_flip(a[taken], whose, roles[i]) if i in moved else a for i, a in enumerate(arrays)]


def _key(value):
    """What tells a row's value from others; of texts TensorFlow gives objects."""
    array = np.asarray(value)
    return repr(array.tolist()) if array.dtype.kind == "O" else array.tobytes()


def _is_label(array, role) -> bool:
    if not isinstance(array, np.ndarray) or role == 2:
        return False
    return role == 1 or (array.dtype.kind in "iubO" and array.size == len(array))


def _flip(array, whose, role):
    """Makes labels that are all alike differ; those of a model's inputs stay."""
    if role != 1 or array.dtype.kind not in "iubf" or (array != array[:1]).any():
        return array
    row = array[0]
    other = np.roll(row, 1, axis=-1) if row.ndim and (row != row.flat[0]).any() else row == 0
    chosen = whose.reshape([-1] + [1] * row.ndim) > 0
    return np.where(chosen, other.astype(array.dtype), array)


def _pad(arrays, roles):
    """Ends sequences in zeros, from the same step on wherever rows have as many."""
    dense = [a for a in arrays if isinstance(a, np.ndarray) and a.ndim > 1]
    lengths = {a.shape[1] for a in dense if a.dtype.kind in "iub" and a.shape[1] > 1}

    def pad(array, role):
        if not isinstance(array, np.ndarray) or array.ndim < 2 or array.dtype.kind not in "iubf":
            return array
        sequence = array.shape[1] in lengths or (array.ndim == 3 and role == 0)
        if not sequence or array.shape[1] < 2:
            return array
        kept = np.ceil(np.resize(_KEPT, len(array)) * array.shape[1])
        ended = np.arange(array.shape[1]) >= kept[:, None]
        return np.where(ended.reshape(ended.shape + (1,) * (array.ndim - 2)), 0, array).astype(
            array.dtype
        )

    return [pad(array, role) for array, role in zip(arrays, roles)]


def _weigh(arrays, roles):
    return [_weigh_one(a) if role == 2 else a for a, role in zip(arrays, roles)]


def _weigh_one(weights):
    if not isinstance(weights, np.ndarray) or weights.dtype.kind != "f":
        return weights
    factors = np.resize(_FACTORS, len(weights)).reshape([-1] + [1] * (weights.ndim - 1))
    # A zero with a sign would mark a filler row.
    return np.where(factors == 0, 0.0, weights * factors).astype(weights.dtype)


_VARY = {LABELS: _exchange, PADDING: _pad, WEIGHTS: _weigh}


def vary_state(state, values: list[np.ndarray], case, functions, view: View) -> list[np.ndarray]:
    """Returns values of state as it can be later: counters far on, settings no longer 0.

    Args:
        state: The `State`.
        values: What it is.
        case: What is verified.
        functions: The traced steps; only what these use is varied. None where they run eagerly.
        view: What to set.
    """
    used = {keras_compat.handle_key(h) for f in functions for h in keras_compat.handles_of(f)}
    optimizers = model_contents.optimizers_of(case.model, nested=True)
    counters = {optimizer.iterations.path for optimizer in optimizers}
    rates = [
        optimizer.learning_rate for optimizer in optimizers if hasattr(optimizer, "iterations")
    ]
    rates = {rate.path for rate in rates if isinstance(rate, keras.Variable)}
    varied = []
    for part, value in zip(state.parts, values):
        new = None
        if functions and keras_compat.handle_key(part.handle) not in used:
            pass
        elif part.kind == OPTIMIZER:
            new = view.iterations if part.name in counters else None
            new = view.setting if part.name in rates and not value.any() else new
        elif part.kind != METRIC and not value.any() and not part.is_random_state:
            new = _setting(value, view, part.kind)
        varied.append(value if new is None else _filled(value, new))
    return varied


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
