"""The progress bar of a terminal, the lines above it, and the speed that they show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from absl import logging
from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_WIDE, _MEDIUM = 70, 45
_ROOM_FOR_RATE = len("1,234,567 examples/s")


class Screen:
    """A bar at the bottom of a terminal; all other output appears above it.

    No thread draws it: it changes only in calls of `draw`.

    Args:
        console: Where to draw; by default standard output.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._live, self._stream, self._width = None, None, 0

    def open(self) -> None:
        """Begins to draw."""
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start(refresh=False)
        # absl has kept the stream that was standard error when it was imported.
        handler = logging.get_absl_handler().python_handler
        self._stream = handler.setStream(sys.stderr)
        self._width = 0

    def close(self) -> None:
        """Removes the bar."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            if self._stream is not None:
                logging.get_absl_handler().python_handler.setStream(self._stream)

    def draw(self, title: str, phase: str, pace: Pace, loss: float | None) -> None:
        """Draws the bar anew.

        Args:
            title: Which epoch.
            phase: `"train"` or `"validation"`.
            pace: How far training is.
            loss: The running loss, or None.
        """
        if self._live is not None:
            self._live.update(self._bar(title, phase, pace, loss), refresh=True)

    def _bar(self, title, phase, pace, loss):
        width = self._console.width
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        cells = [Text(title, "bold")]
        total = pace.steps or (None if phase == "train" else pace.done)
        if width >= _MEDIUM:
            cells.append(ProgressBar(total, pace.done, pulse=total is None, complete_style="cyan"))
        cells.append(Text(f"{pace.done}/{total or '?'}"))
        cells += [Text(word) for word in self._words(phase, pace, loss, width)]
        for cell in cells:
            flexible = isinstance(cell, ProgressBar)
            grid.add_column(no_wrap=True, ratio=1 if flexible else None)
        grid.add_row(*cells)
        # Leave room for the terminal's echo of Ctrl-C: the bar must stay one line.
        return Padding(grid, (0, 3, 0, 0))

    def _words(self, phase, pace, loss, width) -> list[str]:
        if width < _MEDIUM:
            return []
        if phase == "validation":
            return ["validation"]
        if pace.steps_per_second is None:
            return ["compiling the first step"] if not pace.done else []
        words = [] if loss is None else [f"loss {show_value(loss)}"]
        if width >= _WIDE:
            words.append(pace.show_rate())
        left = pace.seconds_left
        return words if left is None else [*words, f"{show_seconds(left)} left"]

    def leave_line(self, title: str, values, rate: str) -> None:
        """Prints the line of an epoch above the bar.

        Args:
            title: Which epoch.
            values: (name, value, value in validation or None) for each log.
            rate: The speed, in words.
        """
        # Pad the number of the epoch, so that columns align.
        self._width = max(self._width, 2 * len(title.split("/")[-1]) + len("Epoch /"))
        parts = [Text(title.ljust(self._width), "bold")]
        for name, value, validation in values:
            part = Text.assemble((f"{name} ", "dim"), show_value(value))
            if validation is not None:
                part.append_text(Text.assemble((" val ", "dim"), (show_value(validation), "cyan")))
            parts.append(part)
        room = self._console.width - sum(part.cell_len + 2 for part in parts)
        if room < _ROOM_FOR_RATE:
            rate = rate.replace("examples/s", "ex/s")
        self._console.print(Text("  ").join([*parts, Text(rate, "dim")]))


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
        """Begins an epoch, possibly at a later step than the first."""
        self._last_rate = self.steps_per_second
        self.epoch, self.done, self._first = epoch, first_step, first_step
        self._began = self._now = self.clock()
        # The first call compiles: timing starts after it.
        self._timed_from = first_step if self._has_stepped else None
        self._timed_at = self._began

    def count(self, done: int) -> None:
        """Records the number of completed steps of the epoch."""
        self.done, self._now = done, self.clock()
        self._has_stepped = True
        if self._timed_from is None:
            self._timed_from, self._timed_at = done, self._now

    def end_steps(self) -> None:
        """Records the end of an epoch's steps, before its validation."""
        self.steps = self.steps or self.done

    def end_epoch(self) -> None:
        """Records the end of an epoch, after its validation."""
        self._validation_s = self.clock() - self._now

    @property
    def seconds(self) -> float:
        """Seconds from the start of the epoch to its last step."""
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
