"""What is another result, and what is rounding.

One number counts as different where it is further from one device's than 4 units in its last
place, and 10 times the noise that was measured, and a small part of the largest change that the
step has made to its variable: a gradient of float32 is known to about that part.
"""

from __future__ import annotations

import dataclasses

import numpy as np

# For dtypes that a model computes in: how far apart sums of the same numbers can be, relative to
# the largest of them.
# Losses of Keras are computed in float32, whatever the policy.
CLOSE = {"float64": 2e-4, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1}
_LAST_PLACES = 4
_NOISE = 10


@dataclasses.dataclass(frozen=True)
class Difference:
    """One thing that came out another way.

    Attributes:
        what: What it is, by name.
        one_device: One device's number, where they differ most.
        shares: The replicas'.
        size: How far they are apart, in multiples of what is allowed.
        row: Where in the value, an index.
        replica: Of which local replica; None where all have one value.
        step: In which step, from 1.
    """

    what: str
    one_device: object
    shares: object
    size: float
    row: tuple[int, ...] = ()
    replica: int | None = None
    step: int = 1


def compare(value, reference, change=None, noise: float = 0.0, close: float = CLOSE["float32"]):
    """Compares two arrays number by number.

    Args:
        value: What the replicas have.
        reference: One device's.
        change: The largest change that a step has made to it, for a variable; without it the
            numbers themselves are what has changed.
        noise: How far rounding alone has moved a number of it.
        close: The part of the largest change that is rounding.

    Returns:
        None where they are the same, else `(one_device, shares, size, place)`.

    Example:
    >>> compare(np.float32([1.0, 2.0]), np.float32([1.0, 2.0000002])) is None
    True
    >>> compare(np.float32([1.0, 2.5]), np.float32([1.0, 2.0]))[:2]
    (2.0, 2.5)
    """
    a, b = np.asarray(value), np.asarray(reference)
    if a.shape != b.shape:
        return f"of shape {b.shape}", f"of shape {a.shape}", np.inf, ()
    if a.tobytes() == b.tobytes() and a.dtype == b.dtype:
        return None
    if not _is_float(a) or not _is_float(b):
        return _first_unequal(a, b)
    allowed = _allowed(b, change, noise, close)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        size = np.where(same, 0.0, np.where(np.isfinite(apart), apart / allowed, np.inf))
    place = np.unravel_index(int(np.argmax(size)), size.shape) if size.size else ()
    if not size.size or size[place] <= 1:
        return None
    return b[place].item(), a[place].item(), float(size[place]), tuple(int(i) for i in place)


def largest_change(value, before=None) -> float:
    """Returns the largest finite change of a number of an array; before it, it was 0 by default.

    >>> largest_change(np.float32([1.0, 2.5]), np.float32([1.0, 2.0]))
    0.5
    """
    value = np.asarray(value)
    if not _is_float(value):
        return 0.0
    change = value.astype(np.float64)
    if before is not None:
        with np.errstate(invalid="ignore"):
            change = change - np.asarray(before).astype(np.float64)
    change = np.abs(change[np.isfinite(change)])
    return float(change.max()) if change.size else 0.0


def distance(value, reference) -> float:
    """Returns the largest difference of two arrays of numbers; infinity where one is NaN."""
    a, b = (np.asarray(each) for each in (value, reference))
    if a.shape != b.shape or not _is_float(a) or not a.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b)
    both = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(both, 0.0, np.where(np.isfinite(apart), apart, np.inf)).max())


def _allowed(reference, change, noise, close):
    kind = np.finfo(np.float64) if reference.dtype == np.float64 else np.finfo(np.float32)
    eps = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(reference.dtype.name, float(kind.eps))
    b = np.abs(reference.astype(np.float64))
    largest = largest_change(reference) if change is None else change
    b = np.where(np.isfinite(b), b, 0.0)
    noise = noise if np.isfinite(noise) else 0.0
    # The smallest numbers are flushed to zero by some devices.
    return _LAST_PLACES * eps * b + _NOISE * noise + close * largest + 1e-37


def _first_unequal(a, b):
    unequal = np.asarray(a != b)
    if not unequal.any():
        return None
    place = np.unravel_index(int(np.argmax(unequal)), unequal.shape)
    return b[place], a[place], np.inf, tuple(int(i) for i in place)


def _is_float(array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name in CLOSE or "float" in array.dtype.name
