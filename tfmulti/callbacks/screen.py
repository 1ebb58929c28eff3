"""The bar of a terminal, and the lines above it."""

from __future__ import annotations

import sys

from absl import logging
from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tfmulti.callbacks.speed import Pace, show_seconds, show_value

_WIDE, _MEDIUM = 70, 45
_ROOM_FOR_RATE = len("1,234,567 examples/s")


class Screen:
    """A bar at the bottom of a terminal; what others print meanwhile goes above it.

    No thread draws it: it changes when it is told to.

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
        # Room for what a terminal shows of Ctrl-C: the bar must stay one line.
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
        """Leaves the line of an epoch above the bar.

        Args:
            title: Which epoch.
            values: (name, value, value in validation or None) for each log.
            rate: The speed, in words.
        """
        # As many places for the first epoch as for the last.
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
