"""Numbers that stand for batches on their way to the replicas, by which workers compare them."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf


def fibonacci() -> list[int]:
    """Returns the numbers 2, 3, 5, 8, 13, ..., up to more than any training has steps."""
    numbers = [2, 3]
    while numbers[-1] < 2**50:
        numbers.append(sum(numbers[-2:]))
    return numbers


NUMBERS = (0, *(number - 1 for number in fibonacci()))
"""The numbers of the batches of a pass that have digests."""
# Of each tensor of a batch so many values are looked at.
_MAX_VALUES = 2**12
_MASK = 2**24 - 1


class Digest(NamedTuple):
    """What stands for the values of some tensors.

    Attributes:
        exact: A number below 2**24 that stands for whole numbers and texts; 0 for what was not
            read.
        near: One from 0 to 2**23 that is near where floating-point numbers are near.
    """

    exact: int = 0
    near: int = 0

    @classmethod
    def of(cls, tensors: Iterable[tf.Tensor]) -> Digest:
        """Returns the digest of tensors.

        >>> Digest.of([]), Digest.of([tf.constant([1.0, 2.0])]).exact
        (Digest(exact=1, near=0), 1)
        """
        exact, floats = 0, [np.zeros(1)]
        for tensor in tensors:
            values = tensor.numpy().reshape(-1)[:_MAX_VALUES]
            if tensor.dtype.is_floating:
                floats.append(np.nan_to_num(values.astype(np.float64), posinf=1, neginf=-1))
            else:
                is_text = values.dtype == object
                exact = zlib.crc32(b"\0".join(values) if is_text else values.tobytes(), exact)
        return cls(exact & _MASK or 1, _mean_sign(np.concatenate(floats)))

    @staticmethod
    def of_bits(values) -> int:
        """Returns a number below 2**24 that stands for all bits of arrays and tensors.

        It is 0 if there are none, or if something else is among them.

        >>> Digest.of_bits([np.zeros(2), None]) == Digest.of_bits([tf.zeros(2, tf.float64)]) > 0
        True
        >>> Digest.of_bits([None]), Digest.of_bits([object()])
        (0, 0)
        """
        found = 0
        for part in tf.nest.flatten(values, expand_composites=True):
            if part is None:
                continue
            try:
                array = np.asarray(part)
            except (TypeError, ValueError, RuntimeError):
                return 0
            if array.dtype == object:
                if not tf.is_tensor(part):
                    return 0
                array = array.astype("S")
            found = zlib.crc32(array.tobytes(), found)
        return found & _MASK

    def differs(self, other: Digest) -> bool:
        """Whether values differ by more than what processors round differently."""
        return self.exact != other.exact or abs(self.near - other.near) > _ROUNDING


# In the numbers that `_mean_sign` returns.
_ROUNDING = 2**22 * 1e-4


def _mean_sign(values: np.ndarray) -> int:
    """Returns a mean of random signs, weighted by the size of values, as a whole number."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], len(values))
    size = np.abs(values).sum()
    return int(2**22 * (1 + (signs * values).sum() / size)) if size else 0


class Digests:
    """Digests of the inputs of some batches of a dataset, and of all else in them, as labels."""

    def __init__(self):
        # A thread of tf.data adds them while the training looks for one.
        self._lock = threading.Lock()
        self._found: dict[int, tuple[Digest, Digest]] = {}

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset; digests of some of its batches are kept as they are read.

        Args:
            dataset: Batches of all rows.
        """

        def note(number, element):
            inputs, others = _split(element)
            count = len(inputs)

            def keep():
                keep = lambda number, *parts: self._keep(number, parts[:count], parts[count:])
                tf.py_function(keep, [number, *inputs, *others], [])
                return True

            is_wanted = tf.reduce_any(number == tf.constant(NUMBERS, tf.int64))
            tf.cond(is_wanted, keep, lambda: False)
            return element

        return dataset.enumerate().map(note)

    def at(self, number: int) -> tuple[Digest, Digest]:
        """Returns the digests of a batch of the latest pass."""
        with self._lock:
            return self._found.get(number, (Digest(), Digest()))

    def _keep(self, number, inputs, others):
        with tf.device("CPU:0"):
            found = Digest.of(inputs), Digest.of(others)
        with self._lock:
            if not int(number):
                # Another pass begins.
                self._found.clear()
            self._found[int(number)] = found


def _split(element) -> tuple[list, list]:
    """Returns the tensors of a batch's inputs, and all others."""
    inputs, *others = element if isinstance(element, tuple) else (element,)
    return _tensors(inputs), _tensors(others)


def _tensors(structure) -> list:
    parts = tf.nest.flatten(structure, expand_composites=True)
    return [x for x in parts if tf.is_tensor(x) and x.dtype not in (tf.variant, tf.resource)]
