"""Decides whether two results differ by more than rounding.

A number differs if its distance to the number of one device exceeds the sum of 4 units in the last
place, 10 times the measured noise, and a small fraction of the largest change that the step made
to its variable; a float32 gradient is accurate to about that fraction.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# For each compute dtype: how far sums of the same numbers can differ, relative to the largest
# number. Keras computes losses in float32 under every policy.
CLOSE = {"float64": 2e-4, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
# How far GPUs' copies of a weight come apart by rounding alone, relative to its largest number:
# of a sparse gradient with equal rows, each GPU adds them in another order.
CLOSE_ON_GPUS = 1e-3
_FIRST_MOMENTS = ("momentum", "_m", "_u")
_LAST_PLACES = 4
# How many times the last place of the largest number rounding may move another one.
EPSILONS = 8
# Half a unit in the last place, relative.
_HALVES = {"bfloat16": 2**-8, "float16": 2**-11}
# The weights of replica batches, and logs, are float32 in a float64 model too.
_ROUNDINGS = {**_HALVES, "float64": 2**-24}
_NOISE = 10
# How many numbers are compared at a time.
_CHUNK = 2**18


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs between one device and the replicas.

    Attributes:
        what: The name of the value.
        one_device: The number of one device, at the position where they differ most.
        on_replicas: The number of the replicas at that position.
        size: The distance, in multiples of the allowed distance.
        row: The position, an index into the value.
        replica: The local replica; None if all replicas have one value.
        step: The number of the step, from 1.
    """

    what: str
    one_device: object
    on_replicas: object
    size: float
    row: tuple[int, ...] = ()
    replica: int | None = None
    step: int = 1


def are_apart(value: np.ndarray, first: np.ndarray, close: float) -> bool:
    """Whether two copies of a variable differ.

    Args:
        value: One.
        first: Another.
        close: The fraction of the largest number that is rounding; 0.0 compares bits.

    Example:
    >>> are_apart(np.float32([1.0, 2.0]), np.float32([1.0, 2.0000002]), 1e-4)
    False
    """
    if not close or not _is_float(first):
        return not same_bits(value, first)
    limit = max(close, _LAST_PLACES * _HALVES.get(first.dtype.name, 0.0))
    return distance(value, first) > limit * largest_change(first)


def compare(value, reference, change=None, noise: float = 0.0, close: float = CLOSE["float32"]):
    """Compares two arrays number by number.

    Args:
        value: The array of the replicas.
        reference: The array of one device.
        change: For a variable, the largest change that a step made to it; None takes the largest
            number of `reference`.
        noise: How far rounding alone moves a number of the array; or an array of that.
        close: The fraction of the largest change that counts as rounding.

    Returns:
        None if they are equal up to rounding, else `(one_device, on_replicas, size, index)`.

    Example:
    >>> compare(np.float32([1.0, 2.0]), np.float32([1.0, 2.0000002])) is None
    True
    >>> compare(np.float32([1.0, 2.5]), np.float32([1.0, 2.0]))[:2]
    (2.0, 2.5)
    """
    a, b = np.asarray(value), np.asarray(reference)
    if a.shape != b.shape:
        return f"of shape {b.shape}", f"of shape {a.shape}", np.inf, ()
    if same_bits(a, b):
        return None
    if not _is_float(a) or not _is_float(b):
        return _first_unequal(a, b)
    change = largest_change(b) if change is None else change
    flat, expected = a.reshape(-1), b.reshape(-1)
    noise = np.broadcast_to(noise, b.shape).reshape(-1) if np.ndim(noise) else noise
    worst, found = 0, 1.0
    for part in _chunks(flat):
        some = noise[part] if np.ndim(noise) else noise
        size = _sizes(flat[part], expected[part], change, some, close)
        index = int(np.argmax(size))
        if size[index] > found:
            worst, found = part.start + index, float(size[index])
    if found == 1:
        return None
    index = tuple(int(i) for i in np.unravel_index(worst, b.shape)) if b.ndim else ()
    return expected[worst].item(), flat[worst].item(), found, index


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays have the same bits: two zeros of opposite signs are not the same.

    >>> same_bits(np.float32([0.0, np.nan]), np.float32([0.0, np.nan]))
    True
    >>> same_bits(np.float32([0.0]), np.float32([-0.0]))
    False
    """
    if a is b:
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        # Its bytes are where the texts are.
        return np.array_equal(a, b)
    flat, other = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b))
    return np.array_equal(flat, other)


def _chunks(flat: np.ndarray) -> list[slice]:
    """Returns slices of a flat array that fit in a processor's cache, and need little memory."""
    return [slice(start, start + _CHUNK) for start in range(0, flat.size, _CHUNK)]


def _sizes(value, reference, change, noise, close) -> np.ndarray:
    """Returns the distances of numbers, in multiples of what is allowed."""
    with np.errstate(invalid="ignore", over="ignore"):
        # Most pairs are as near as the largest change alone allows.
        if np.abs(_widened(value) - _widened(reference)).max() <= 0.9 * close * change:
            return np.zeros(1)
        return _apart(value, reference) / _allowed(reference, change, noise, close)


def _apart(value, reference) -> np.ndarray:
    """Returns the distances of numbers: 0 if equal or both NaN; infinity if one is not finite."""
    a, b = value.astype(np.float64), reference.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def without_gradient(moments: dict[str, np.ndarray], close: float) -> np.ndarray | bool:
    """Finds the numbers of a variable whose gradient is nothing but rounding.

    Adam and its like divide a gradient by its size: one of 1e-8, which is rounding beside others
    of 1e-1, moves its weight as far as they do.

    Args:
        moments: What the optimizer keeps for the variable, of its shape, by name.
        close: The fraction of the largest number that counts as rounding.

    Returns:
        A boolean array; False without moments.

    Example:
    >>> without_gradient({"w_momentum": np.float32([0.1, 1e-9])}, 2e-4)
    array([False,  True])
    """
    found = [
        np.abs(moment.astype(np.float64))
        # The others are squares.
        <= (close if name.endswith(_FIRST_MOMENTS) else close**2) * largest_change(moment)
        for name, moment in moments.items()
    ]
    if all(largest_change(moment) == 0 for moment in moments.values()):
        # No optimizer has updated the variable.
        return False
    return np.logical_and.reduce(found) if found else False


def share_of_rounding(
    slots: list[tuple], largest: list[float], noise: list[float]
) -> np.ndarray | float:
    """Returns the share of rounding in a variable's gradient, from 0 to 1 for each number.

    Terms as large as other gradients can cancel. A loss that stays the same if all outputs are
    shifted, such as Cox's or RankNet's, leaves the bias of the last layer nothing but rounding,
    which Adam enlarges to a whole step. Many layers of batch normalization enlarge rounding until
    small gradients have an uncertain sign.

    Args:
        slots: For each slot of the variable its name, and its values on one device and on the
            replicas.
        largest: For each, the largest number of the slots of this kind of all variables.
        noise: For each, how far rounding was measured to move a number of it.

    Returns:
        An array; 0 without slots, and for numbers that no gradient has reached.

    Example:
    >>> slot = ("b_m", np.float32([0, 0.1, 0]), np.float32([1e-9, 0.1, 0]))
    >>> share_of_rounding([slot], [0.1], [0.0])
    array([1.00000000e+00, 1.19209288e-07, 0.00000000e+00])
    >>> share_of_rounding([slot], [0.1], [0.02]).round(3)
    array([1. , 0.2, 0. ])
    """
    shares = []
    for (name, one, many), most, measured in zip(slots, largest, noise):
        sizes = np.maximum(np.abs(one.astype(np.float64)), np.abs(many.astype(np.float64)))
        if not name.endswith(_FIRST_MOMENTS):
            # The others are squares.
            sizes, most, measured = np.sqrt(sizes), most**0.5, measured**0.5
        rounding = np.full_like(sizes, max(eps_of(one) * most, measured))
        share = np.divide(rounding, sizes, out=np.zeros_like(sizes), where=sizes > 0)
        shares.append(np.minimum(share, 1.0))
    return np.minimum.reduce(shares) if shares else 0.0


def eps_of(value: np.ndarray) -> float:
    """Returns the relative size of the last place of a float64 array, else of a float32 number."""
    return float(np.finfo(np.float64 if value.dtype == np.float64 else np.float32).eps)


def largest_change(value, before=None) -> float:
    """Returns the largest finite change of an array; `before` defaults to zeros.

    >>> largest_change(np.float32([1.0, 2.5]), np.float32([1.0, 2.0]))
    0.5
    """
    value = np.asarray(value)
    if not _is_float(value):
        return 0.0
    flat, most = value.reshape(-1), 0.0
    earlier = None if before is None else np.asarray(before).reshape(-1)
    for part in _chunks(flat):
        pair = flat[part], 0.0 if earlier is None else earlier[part]
        with np.errstate(invalid="ignore", over="ignore"):
            largest = np.abs(_widened(pair[0]) - _widened(pair[1])).max()
            if not np.isfinite(largest):
                change = np.abs(np.float64(pair[0]) - np.float64(pair[1]))
                largest = np.max(change, where=np.isfinite(change), initial=0.0)
        most = max(most, float(largest))
    return most


def _widened(value):
    """Returns numbers of a dtype whose differences of near numbers are exact."""
    narrow = np.asarray(value).dtype not in (np.float32, np.float64)
    return np.asarray(value).astype(np.float64) if narrow else value


def distance(value, reference) -> float:
    """Returns the largest difference of two arrays of numbers; infinity where one is NaN."""
    a, b = (np.asarray(each) for each in (value, reference))
    if a.shape != b.shape or not _is_float(a) or not a.size:
        return 0.0
    return float(_apart(a, b).max())


def move_last_place(value: np.ndarray, name: str, compute_dtype: str, units: int = 1) -> np.ndarray:
    """Returns an array with each number moved up or down by about a unit in its last place.

    Args:
        value: The array; others than float32 and float64 are returned unchanged.
        name: A name, on which the directions depend.
        compute_dtype: The dtype in which the model computes.
        units: By how many units; by one if the model computes in half precision.
    """
    if value.dtype not in (np.float32, np.float64):
        return value
    way = np.random.default_rng([*name.encode()]).choice([-1, 1], value.shape)
    way, rounding = way.astype(value.dtype), _ROUNDINGS.get(compute_dtype)
    if rounding is not None:
        # A smaller change would be lost in the model's low precision.
        return value * (1 + rounding * way).astype(value.dtype)
    return value + units * (np.nextafter(value, way * np.inf) - value)


def _allowed(reference, change, noise, close):
    kind = np.finfo(np.float64) if reference.dtype == np.float64 else np.finfo(np.float32)
    eps = _HALVES.get(reference.dtype.name, float(kind.eps))
    b = np.abs(reference.astype(np.float64))
    b = np.where(np.isfinite(b), b, 0.0)
    noise = np.where(np.isfinite(noise), noise, 0.0)
    # Some devices flush denormal numbers to zero.
    return _LAST_PLACES * eps * b + _NOISE * noise + close * change + 1e-37


def _first_unequal(a, b):
    unequal = np.asarray(a != b)
    if not unequal.any():
        return None
    index = np.unravel_index(int(np.argmax(unequal)), unequal.shape)
    return b[index], a[index], np.inf, tuple(int(i) for i in index)


def _is_float(array) -> bool:
    return "float" in array.dtype.name
