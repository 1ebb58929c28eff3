"""Tells the differences between two computations of a step from rounding."""

from __future__ import annotations

from collections.abc import Callable

from tfmulti.verification.comparison import add_noise
from tfmulti.verification.differences import Difference

# Measures of rounding: runs, by how many units in the last place these move weights, and the share
# of the distance that counts. Where a difference remains, larger moves show jumps that rounding
# seldom makes: of a ReLU at 0, or of the share of rows whose largest output is the right one.
_NOISY_RUNS = ((range(2), 1, 1.0), (range(2, 10), 10, 0.2))
# Starts from which a difference must show as well, and by how many units these are moved.
_AGAIN, _UNITS = range(20, 22), 10


class Rounding:
    """Measures how far rounding moves what a step computes, and compares beyond that.

    The noise is measured with weights that are changed in their last place. Permuting the rows
    instead would fail if the result depends on their order, for example through pairs of rows or
    random numbers.

    Args:
        moved: Function that returns the state with moved weights, of `run` and `units`.
        on_one_device: Function of an initial state; returns the result of one device.
        on_replicas: The same of the replicas.
        compare: Function of an initial state, both results and the noise, or None; returns the
            differences.
        is_on_any: Function that returns whether something was found, on any worker.
    """

    def __init__(
        self,
        moved: Callable,
        on_one_device: Callable,
        on_replicas: Callable,
        compare: Callable,
        is_on_any: Callable,
    ):
        self._moved, self._one, self._many = moved, on_one_device, on_replicas
        self._compare, self._is_on_any = compare, is_on_any

    def differences(self, begin, expected, found) -> list[Difference]:
        """Returns the differences beyond the noise.

        It is measured only where results differ, since most steps show no difference at all.

        Args:
            begin: The initial state.
            expected: The results of one device.
            found: Those of the replicas.
        """
        noise: list[dict] = [{} for _ in expected]
        for runs, units, share in _NOISY_RUNS:
            for run in runs:
                add_noise(noise, expected, self._one(self._moved(run=run, units=units)), share)
            differences = self._compare(begin, expected, found, noise)
            if not self._is_on_any(differences):
                break
        return differences

    def differences_that_last(self, begin, expected, found) -> list[Difference]:
        """Returns the differences, or none if they are gone with weights of another last place.

        Amid a training some value is often at a jump, as of a ReLU at 0, that rounding can take.

        Args:
            begin: The initial state.
            expected: The results of one device.
            found: Those of the replicas.
        """
        differences = self.differences(begin, expected, found)
        for run in _AGAIN:
            if not self._is_on_any(differences):
                break
            start = self._moved(run=run, units=_UNITS)
            again = self.differences(start, self._one(start), self._many(start))
            differences = differences if self._is_on_any(again) else []
        return differences
