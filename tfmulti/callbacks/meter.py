"""The one meter of speed: of the bar, of the plain lines, and of `Throughput`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass
class TimedSteps:
    """Steps, and the seconds that they took.

    Attributes:
        steps: The number of steps.
        seconds: Their duration.
    """

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        """Adds steps."""
        self.steps += steps
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        """Steps per second, or None where none was timed."""
        return self.steps / self.seconds if self.steps and self.seconds > 0 else None


class Meter:
    """Counts the steps of one `fit` and times them, without the first call, which compiles.

    What lies between the last step of an epoch and the next epoch (validation, a checkpoint) is
    no part of the steps' time, and of the time that is left.

    Args:
        clock: Returns seconds.

    Attributes:
        epochs: Epochs of this `fit`.
        steps_per_epoch: Steps of an epoch; None where only the end of the data tells. It is then
            taken from the first epoch.
        epoch: The number of this epoch, from 0.
        done: Steps of this epoch that are done, with those before training was resumed.
        steps: Steps since `fit` began.
        all: The timed steps since `fit` began.
        now: The timed steps of this epoch.

    Example:
    >>> times = iter([0.0, 5.0, 6.0])
    >>> meter = Meter(clock=lambda: next(times))
    >>> meter.begin(epochs=2, steps_per_epoch=3)
    >>> meter.begin_epoch(0)
    >>> for done in (1, 2):
    ...     meter.count(done)
    >>> meter.steps_per_second, meter.seconds_left
    (1.0, 4.0)
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.begin()

    def begin(self, epochs: int = 1, steps_per_epoch: int | None = None) -> None:
        """Begins a `fit`."""
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.epoch = self.done = self.steps = 0
        self.all, self.now, self._before = TimedSteps(), TimedSteps(), TimedSteps()
        self._began = self._last = self._between = 0.0
        self._is_between = False

    def begin_epoch(self, epoch: int, done: int = 0) -> None:
        """Begins an epoch, possibly at a later step than the first."""
        now = self.clock()
        if self.steps:
            self._between = now - self._last
        self._began = self._last = now
        self._before, self.now = self.now, TimedSteps()
        self.epoch, self.done, self._is_between = epoch, done, False

    def count(self, done: int) -> None:
        """Records the number of steps of this epoch that are done."""
        now, steps = self.clock(), done - self.done
        if self.steps:
            self.now.add(steps, now - self._last)
            self.all.add(steps, now - self._last)
        self.done, self.steps, self._last = done, self.steps + steps, now

    def end_epoch(self) -> None:
        """Records the end of an epoch, after its validation."""
        self._between, self._is_between = self.clock() - self._last, True
        self.steps_per_epoch = self.steps_per_epoch or self.done

    @property
    def seconds(self) -> float:
        """Seconds from the start of the epoch to its last step, with the first call."""
        return self._last - self._began

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second since `fit` began, or None."""
        return self.all.rate

    @property
    def steps_per_second_now(self) -> float | None:
        """Steps per second of this epoch, or where it has none of the one before, or None."""
        return self.now.rate or self._before.rate

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of `fit`, with what lies between epochs; None where not known."""
        if self.steps_per_epoch is None or self.steps_per_second is None:
            return None
        epochs = self.epochs - self.epoch - 1
        steps = self.steps_per_epoch - self.done + epochs * self.steps_per_epoch
        pauses = epochs + (not self._is_between)
        return steps / self.steps_per_second + pauses * self._between


def steps_before(dataset) -> int:
    """Returns the steps of this epoch before training was resumed within it; usually 0.

    Args:
        dataset: The result of `distribute_train`, or None.
    """
    return 0 if dataset is None else dataset.plan.steps_per_epoch - dataset.steps_left()
