"""How fast training goes and how long it still takes: arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Pace:
    """Counts steps and times them; the first call of a `fit` is left out, since it compiles.

    Args:
        epochs: Epochs of this `fit`.
        steps: Steps of an epoch; None where only the end of the data tells. It is then taken
            from the first epoch.
        batch_size: Examples of a step over all replicas; None where unknown.
        clock: Returns seconds.

    Example:
    >>> times = iter([0.0, 5.0, 6.0, 7.0])
    >>> pace = Pace(epochs=2, steps=3, batch_size=10, clock=lambda: next(times))
    >>> pace.begin_epoch(0)
    >>> for done in (1, 2):
    ...     pace.count(done)
    >>> pace.rate, pace.seconds_left
    (10.0, 4.0)
    """

    def __init__(
        self,
        epochs: int,
        steps: int | None,
        batch_size: int | None,
        clock: Callable[[], float],
    ):
        self.epochs, self.steps, self.batch_size, self.clock = epochs, steps, batch_size, clock
        self.epoch = self.done = self._first = 0
        self._timed_from, self._timed_at, self._now = None, 0.0, 0.0
        self._began, self._validation_s, self._has_stepped = 0.0, 0.0, False
        self._last_rate = None

    def begin_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Begins an epoch, in whose midst training may go on."""
        self._last_rate = self.steps_per_second
        self.epoch, self.done, self._first = epoch, first_step, first_step
        self._began = self._now = self.clock()
        # The first call of all compiles: the time begins after it.
        self._timed_from = first_step if self._has_stepped else None
        self._timed_at = self._began

    def count(self, done: int) -> None:
        """Takes note that so many steps of the epoch are done."""
        self.done, self._now = done, self.clock()
        self._has_stepped = True
        if self._timed_from is None:
            self._timed_from, self._timed_at = done, self._now

    def end_steps(self) -> None:
        """Takes note of the end of an epoch's steps, before its validation."""
        self.steps = self.steps or self.done

    def end_epoch(self) -> None:
        """Takes note of the end of an epoch, after its validation."""
        self._validation_s = self.clock() - self._now

    @property
    def seconds(self) -> float:
        """Seconds from the epoch's begin to its last step."""
        return self._now - self._began

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second of this epoch, or of the one before it; None where not measured."""
        steps = self.done - self._timed_from if self._timed_from is not None else 0
        seconds = self._now - self._timed_at
        return steps / seconds if steps > 0 and seconds > 0 else self._last_rate

    @property
    def rate(self) -> float | None:
        """Examples per second over all replicas, steps per second without a batch size."""
        speed = self.steps_per_second
        return speed if speed is None else speed * (self.batch_size or 1)

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of training, with validation; None where not known."""
        if self.steps is None or self.steps_per_second is None:
            return None
        epochs = self.epochs - self.epoch - 1
        steps = self.steps - self.done + epochs * self.steps
        return steps / self.steps_per_second + epochs * self._validation_s

    def show_rate(self, rate: float | None = None) -> str:
        """Returns the rate in words, or an empty text where it is not known."""
        rate = self.rate if rate is None else rate
        if rate is None:
            return ""
        unit = "examples/s" if self.batch_size else "steps/s"
        return f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:.2g} {unit}"


def show_seconds(seconds: float) -> str:
    """Returns a duration in words.

    >>> show_seconds(4.26), show_seconds(75), show_seconds(7384)
    ('4.3 s', '1:15', '2:03:04')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def show_value(value: float) -> str:
    """Returns a value of the logs with four digits.

    >>> show_value(0.25), show_value(0.00001), show_value(12345.678)
    ('0.2500', '1.000e-05', '1.235e+04')
    """
    small = value != 0 and abs(value) < 1e-3
    return f"{value:.3e}" if small or abs(value) >= 1e4 else f"{value:.4f}"


def pair_logs(logs: Mapping[str, float]) -> list[tuple[str, float, float | None]]:
    """Returns (name, value, value in validation or None) for each log, in their order.

    >>> pair_logs({"loss": 1.0, "val_loss": 2.0, "val_only": 3.0})
    [('loss', 1.0, 2.0), ('val_only', 3.0, None)]
    """
    return [
        (name, value, logs.get(f"val_{name}"))
        for name, value in logs.items()
        if name.removeprefix("val_") == name or name.removeprefix("val_") not in logs
    ]
