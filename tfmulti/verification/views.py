"""Synthetic variations of rows and state, which show differences that the first rows do not.

Both sides of a comparison get the same values, so a variation alone cannot cause a difference. If
a step fails on a variation, or its result is not finite, the variation is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import tensorflow as tf

LABELS, PADDING, WEIGHTS = "labels", "padding", "sample weights"
WAYS = (LABELS, PADDING, WEIGHTS)
# Some rows become so large, or NaN, that a step which decides by its loss decides otherwise there.
OUTLIERS, SMALL_OUTLIERS, NOT_NUMBERS = "outliers", "small outliers", "numbers that are NaN"
NAN_LABELS, NAN_INPUTS = "labels that are NaN", "inputs that are NaN"
# The factor of outliers.
ENLARGED = 1000.0
SPOILED = (NOT_NUMBERS, NAN_LABELS, NAN_INPUTS)
# Some rows have the opposite sign: a mask or a count may be by a sign that no row has yet.
SIGNS, INPUT_SIGNS = "opposite signs", "opposite signs of inputs"
# Sequences are longer or shorter, where later batches may have such.
LENGTHS = "sequences of length"
# Some labels, or some numbers of the inputs, become one number.
SOME_LABELS, SOME_INPUTS = "some labels", "some inputs"
_WHOLE_LABELS = "some labels of whole numbers"
# What many programs give rows, pixels or words that have no label.
_IGNORED = (-1, -100)
# Many rows of the first batch, as they are: a limit, a rank or a rare row may show only there.
MANY = "many rows"
# The longest sequence that a number which the step compares with is tried as.
_LONGEST = 1024
# Numbers of rows of parts that differ, and cannot be divided equally among replicas.
UNLIKE = "other numbers of rows"
# An optimizer that accumulates updates in the step after these, and other things happen every so
# many steps: 8,400 is a multiple of 25, 50 and 100, and 1,441,440 of every number to 16.
_SOON, _LATE = 8399, 1_441_439
# Chosen so that neighbouring replica batches differ.
_WHOSE = (0, 0, 1, 2, 1, 0, 2)
_KEPT = (1.0, 0.5, 0.25, 0.75)
_FACTORS = (1.0, 0.0, 2.0, 1.0, 0.5)
# Moments of a training: the first steps one by one, which show what comes round every few steps,
# and later ones, a third apart. The first four are far apart, if there is time for four alone.
_STEPS = (6, 60, 600, 6000, *(n for n in range(1, 17) if n != 6))
_STEPS += tuple(n for n in (round(20 * 4**i / 3**i) for i in range(30)) if n not in _STEPS)
# Meanwhile averages and ratios become smaller, larger, and negative.
_RATIOS = (0.5, 0.1, 2.0, 0.75, 0.25, 10.0, 0.01, 1.1, -1.0)


@dataclasses.dataclass(frozen=True)
class View:
    """One variation of rows and state.

    Attributes:
        ways: How the rows are varied, of `WAYS`.
        iterations: The value of step counters; 0 leaves all state unchanged.
        setting: The value of variables that are 0, if `iterations` is set.
        counters: Whether custom integer variables count as counters too.
        number: What some labels or inputs become, or else small variables and counters; None to
            leave them.
        ratio: What scalar variables, of those that no optimizer trains, are multiplied by; None to
            leave them.
    """

    ways: tuple[str, ...] = ()
    iterations: int = 0
    setting: float = 0.0
    counters: bool = True
    number: float | None = None
    ratio: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows and state are unchanged."""
        return not self.ways and not self.varies_state

    @property
    def varies_state(self) -> bool:
        """Whether variables have other values."""
        return bool(self.iterations) or (self.number is not None and not self.ways)

    def __str__(self):
        what = [f"other {way}" if way in WAYS else way for way in self.ways]
        if self.number is not None:
            word = " " if LENGTHS in self.ways else " at "
            what = [f"{' and '.join(what) or 'variables'}{word}{self.number:g}"]
        if self.iterations:
            what.append(f"optimizer.iterations at {self.iterations}")
        if self.ratio is not None:
            what.append(f"scalar variables times {self.ratio:g}")
        elif self.iterations:
            what.append(f"variables that are 0 at {self.setting:g}")
        return ", ".join(what)


PLAIN = View()
NUM_MOMENTS = len(_STEPS)


def later_views(ways: tuple[str, ...]) -> list[tuple[View, ...]]:
    """Returns views with the state of later steps, each with a fallback in case it fails.

    Args:
        ways: How the rows are varied.
    """
    pairs = ((_SOON, 1.0), (_LATE, 1000.0))
    return [(View(ways, *pair), View(ways, *pair, counters=False)) for pair in pairs]


def views_of_moments(count: int) -> list[tuple[View, ...]]:
    """Returns views with the state of other moments of a training.

    A phase that comes and goes, or the weight of a loss that rises and falls, is there at some of
    them.

    Args:
        count: How many.
    """
    moments = zip(_STEPS[:count], itertools.cycle(_RATIOS))
    return [(View(iterations=number, ratio=ratio),) for number, ratio in moments]


def views_of_outliers(tests_numbers: bool) -> list[tuple[View, ...]]:
    """Returns views in which replicas have rows of unlike sizes, each with fallbacks.

    A step that skips an update, or changes its loss, by the size of the loss must decide for the
    whole batch; otherwise each replica decides by its own rows, which ordinary rows rarely show.

    Args:
        tests_numbers: Whether the step tests numbers for NaN or infinity.
    """
    now = (View((OUTLIERS,)), View((SMALL_OUTLIERS,)))
    later = [View((way,), _SOON, 1.0) for way in (OUTLIERS, SMALL_OUTLIERS)]
    spoiled = [(View((way,)),) for way in SPOILED] if tests_numbers else []
    if tests_numbers:
        infinite = [View((way,), number=np.inf) for way in (SOME_LABELS, SOME_INPUTS)]
        spoiled += [(view,) for view in infinite]
    return [now, tuple(later), *spoiled]


def views_of_numbers(compared: list[float], may_fail: bool) -> list[tuple[View, ...]]:
    """Returns views in which some labels, some inputs or the variables have one number.

    Args:
        compared: The numbers that the step compares with.
        may_fail: Whether the step may fail, as with a label that is no class.
    """
    # Masks and weights among the inputs may all be 1 in the first rows.
    views = [View((SOME_INPUTS,), number=0)]
    if may_fail:
        views += [View((_WHOLE_LABELS,), number=label) for label in _IGNORED]
    for number in compared:
        # Rows are on both sides of most limits that are no whole numbers.
        of_rows = may_fail and number == int(number)
        ways = ((SOME_LABELS,), (SOME_INPUTS,), ()) if of_rows else ((),)
        views += [View(way, number=number) for way in ways]
    return [(view,) for view in views]


def views_of_signs() -> list[tuple[View, ...]]:
    """Returns views in which some rows have the opposite sign, with a fallback."""
    return [(View((SIGNS,)), View((INPUT_SIGNS,)))]


def views_of_lengths(rows, compared: list[float]) -> list[tuple[View, ...]]:
    """Returns views with other lengths of sequences, where the data may have such.

    Args:
        rows: The `Rows`.
        compared: The numbers that the step compares with, which may be lengths.
    """
    have = sorted({part.shape[axis] for part, axis in _open_axes(rows)})
    if not have:
        return []
    lengths = [have[-1] * 2, max(have[-1] // 2, 1)]
    lengths += [int(n) for n in compared if 1 <= n <= _LONGEST and n == int(n)]
    return [(View((LENGTHS,), number=n),) for n in dict.fromkeys(lengths) if n != have[-1]]


def _open_axes(rows):
    return [(part, axis) for part, axes in zip(rows.parts, rows.open_axes) for axis in axes]


def _with_length(rows, parts, number):
    """Returns parts whose longest open axis has a length, and those of others that go with it.

    A part that lacks a few steps, as targets do, lacks as many then.
    """
    longest = max(part.shape[axis] for part, axis in _open_axes(rows))
    resized = []
    for part, axes in zip(parts, rows.open_axes):
        for axis in axes:
            have = part.shape[axis]
            near = have + int(number) - longest
            size = near if 2 * have > longest else round(have * number / longest)
            part = tf.gather(part, tf.range(max(1, size)) % have, axis=axis)
        resized.append(part)
    return resized


def vary_rows(rows, parts: list, view: View) -> tuple[list, tuple[str, ...]]:
    """Returns rows with other labels, padding and sample weights.

    Labels, and inputs with one whole number per row, are exchanged between rows, unevenly; if all
    are equal, some become 0 or 1. Sequences end in zeros. Given weights become 0 or are scaled.

    Args:
        rows: The `Rows` that the parts belong to.
        parts: The tensors of some rows.
        view: What to vary.

    Returns:
        The rows, and the ways in which they changed.
    """
    if UNLIKE in view.ways:
        return rows.first(rows.unlike), view.ways
    if LENGTHS in view.ways:
        return _with_length(rows, parts, view.number), view.ways
    roles = rows.roles()
    # Ragged and sparse parts stay unchanged: their lengths vary already.
    dense = all(isinstance(part, tf.Tensor) for part in parts)
    arrays = [part.numpy() if isinstance(part, tf.Tensor) else part for part in parts]
    used = []
    for way in view.ways:
        if way == PADDING and not dense:
            continue
        vary = _VARY[way]
        if view.number is not None:
            vary = functools.partial(vary, number=view.number)
        varied = _vary_alike(vary, arrays, roles)
        if any(a is not b and not np.array_equal(a, b) for a, b in zip(arrays, varied)):
            used.append(way)
            arrays = varied
    new = [tf.convert_to_tensor(a) if isinstance(a, np.ndarray) else a for a in arrays]
    return new, tuple(used)


def _vary_alike(vary, arrays, roles):
    """Varies arrays together that have the same number of rows."""
    numbers = [len(a) if isinstance(a, np.ndarray) else None for a in arrays]
    varied = list(arrays)
    for number in dict.fromkeys(numbers):
        chosen = [i for i, other in enumerate(numbers) if other == number]
        new = vary([arrays[i] for i in chosen], [roles[i] for i in chosen])
        for i, array in zip(chosen, new):
            varied[i] = array
    return varied


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
    """Returns a hashable key of a row's value; TensorFlow returns strings as objects."""
    array = np.asarray(value)
    return repr(array.tolist()) if array.dtype.kind == "O" else array.tobytes()


def _is_label(array, role) -> bool:
    if not isinstance(array, np.ndarray) or role == 2:
        return False
    return role == 1 or (array.dtype.kind in "iubO" and array.size == len(array))


def _flip(array, whose, role):
    """Makes labels that are all equal differ; inputs stay unchanged."""
    if role != 1 or array.dtype.kind not in "iubf" or (array != array[:1]).any():
        return array
    row = array[0]
    other = np.roll(row, 1, axis=-1) if row.ndim and (row != row.flat[0]).any() else row == 0
    chosen = whose.reshape([-1] + [1] * row.ndim) > 0
    return np.where(chosen, other.astype(array.dtype), array)


def _pad(arrays, roles):
    """Pads sequences with zeros, all sequences of a row from the same step on."""
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


def _weight_rows(arrays, roles):
    return [_weigh_one(a) if role == 2 else a for a, role in zip(arrays, roles)]


def _weigh_one(weights):
    if not isinstance(weights, np.ndarray) or weights.dtype.kind != "f":
        return weights
    factors = np.resize(_FACTORS, len(weights)).reshape([-1] + [1] * (weights.ndim - 1))
    # A negative zero would mark a padding row.
    return np.where(factors == 0, 0.0, weights * factors).astype(weights.dtype)


def _enlarge(arrays, roles, factor):
    """Multiplies numbers of some rows by a factor, in neighbouring replica batches others."""

    def enlarge(array, role):
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or role == 2:
            return array
        whose = np.resize(_WHOSE, len(array)).reshape([-1] + [1] * (array.ndim - 1))
        is_even = np.arange(array.shape[-1] if array.ndim > 1 else 1) % 2 == 0
        powers = np.where(whose == 1, is_even * 0.25, np.where(is_even, 0.5, 1.0) * (whose == 2))
        powers = powers.reshape(len(array)) if array.ndim == 1 else powers
        return (array * factor**powers).astype(array.dtype)

    return [enlarge(array, role) for array, role in zip(arrays, roles)]


def _change_some(arrays, roles, of_roles, change):
    """Changes the numbers of some rows; the first replica batch keeps its numbers."""

    def change_some(array, role):
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or role not in of_roles:
            return array
        chosen = np.resize(_WHOSE, len(array)).reshape([-1] + [1] * (array.ndim - 1)) == 2
        return np.where(chosen, change(array), array)

    return [change_some(array, role) for array, role in zip(arrays, roles)]


_spoil = functools.partial(_change_some, change=lambda array: array.dtype.type(np.nan))
_negate = functools.partial(_change_some, change=np.negative)


def _set_some(arrays, roles, of_role, kinds, number):
    """Gives some rows, or some numbers of each row, another number."""

    def set_some(array, role):
        is_meant = isinstance(array, np.ndarray) and role == of_role and array.dtype.kind in kinds
        if not is_meant or not holds(array.dtype, number):
            return array
        whose = np.resize(_WHOSE, array.size)
        return np.where(whose.reshape(array.shape) == 2, number, array).astype(array.dtype)

    return [set_some(array, role) for array, role in zip(arrays, roles)]


def holds(dtype, number) -> bool:
    """Whether numbers of a dtype can have a value.

    Args:
        dtype: NumPy's.
        number: The value.
    """
    if dtype.kind == "f":
        return True
    is_integer = dtype.kind in "iu" and float(number).is_integer()
    return is_integer and np.iinfo(dtype).min <= number <= np.iinfo(dtype).max


_VARY = {
    LABELS: _exchange,
    PADDING: _pad,
    WEIGHTS: _weight_rows,
    OUTLIERS: functools.partial(_enlarge, factor=ENLARGED),
    SMALL_OUTLIERS: functools.partial(_enlarge, factor=10.0),
    NOT_NUMBERS: functools.partial(_spoil, of_roles=(0, 1)),
    NAN_LABELS: functools.partial(_spoil, of_roles=(1,)),
    NAN_INPUTS: functools.partial(_spoil, of_roles=(0,)),
    SIGNS: functools.partial(_negate, of_roles=(0, 1)),
    INPUT_SIGNS: functools.partial(_negate, of_roles=(0,)),
    SOME_LABELS: functools.partial(_set_some, of_role=1, kinds="iuf"),
    SOME_INPUTS: functools.partial(_set_some, of_role=0, kinds="iuf"),
    _WHOLE_LABELS: functools.partial(_set_some, of_role=1, kinds="i"),
}
