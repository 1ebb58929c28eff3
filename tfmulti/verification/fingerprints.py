"""Numbers that stand for the changes of a step's variables, to be compared between workers."""

from __future__ import annotations

import hashlib

import numpy as np

# Whole numbers below 2**24 can be compared.
_UNIT, _MOST = 1000, 100
_MOST_NUMBERS = 2**20


class Bits:
    """Stands for every bit of the new values.

    Attributes:
        tolerance: How far the numbers of equal values lie apart.
    """

    tolerance = 0

    def __init__(self):
        self._hash = hashlib.sha256()

    def add(self, before: np.ndarray, value: np.ndarray) -> None:
        """Adds a variable by its values before the step and after it."""
        self._hash.update(value.tobytes())

    @property
    def number(self) -> int:
        """The number, from 0 to 2**24 - 1."""
        return int.from_bytes(self._hash.digest()[:3], "little")


class Direction:
    """Stands for the direction of all changes, along one random axis: rounding moves it little.

    On GPUs the same sum of a sparse gradient ends in other last digits each time.

    Attributes:
        tolerance: How far the numbers of equal changes lie apart, in thousandths of their length.

    Example:
    >>> one, other = Direction(), Direction()
    >>> one.add(np.zeros(3), np.array([1.0, 2.0, 3.0]))
    >>> other.add(np.zeros(3), np.array([1.0, 2.0, 3.0001]))
    >>> abs(one.number - other.number) <= Direction.tolerance
    True
    """

    tolerance = 50

    def __init__(self):
        self._along = self._square = 0.0
        self._random = np.random.default_rng(0)

    def add(self, before: np.ndarray, value: np.ndarray) -> None:
        """Adds a variable by its values before the step and after it."""
        change = value.reshape(-1)[:_MOST_NUMBERS].astype(float)
        change -= before.reshape(-1)[:_MOST_NUMBERS].astype(float)
        signs = self._random.integers(0, 2, change.size, dtype=np.int8) * 2 - 1
        self._along += float(signs @ change)
        self._square += float(change @ change)

    @property
    def number(self) -> int:
        """The number, from 0 to 2**24 - 1; that of no change is in the middle."""
        along = self._along / np.sqrt(self._square) if self._square > 0 else 0.0
        if not np.isfinite(along):
            return 0
        return int(round(_UNIT * (_MOST + np.clip(along, -_MOST, _MOST))))
