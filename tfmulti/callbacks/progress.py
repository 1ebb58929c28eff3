"""Shows training progress: a bar on a terminal, lines elsewhere, events on other workers."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Mapping

import keras
import numpy as np
from absl import logging
from rich import progress
from rich.console import Console
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from tfmulti import hardware
from tfmulti.callbacks import throughput
from tfmulti.callbacks.throughput import Meter, steps_before
from tfmulti.runtime.console import is_terminal

_WIDE, _MEDIUM = 70, 45
_ROOM_FOR_RATE = len("1,234,567 examples/s")


class _Bar(progress.Progress):
    """A bar that leaves room for the terminal's echo of Ctrl-C, so that it stays one line."""

    def get_renderables(self):
        """Yields the bar."""
        yield Padding(self.make_tasks_table(self.tasks), (0, 2, 0, 0))


class Screen:
    """A bar at the bottom of a terminal; all other output appears above it.

    No thread draws it: it changes only in calls of `draw`.

    Args:
        console: Where to draw; by default standard output.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(highlight=False)
        self._bar, self._stream, self._width = None, None, 0

    def open(self) -> None:
        """Starts to draw."""
        self._bar = _Bar(console=self._console, auto_refresh=False, transient=True, expand=True)
        self._task = self._bar.add_task("")
        self._bar.columns = ()
        self._bar.start()
        # absl has kept the stream that was standard error when it was imported.
        handler = logging.get_absl_handler().python_handler
        self._stream = handler.setStream(sys.stderr)
        self._width = 0

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            bar, self._bar = self._bar, None
            bar.stop()
            if self._stream is not None:
                logging.get_absl_handler().python_handler.setStream(self._stream)

    def draw(self, title: str, phase: str, meter: Meter, loss: float | None, speed: str) -> None:
        """Redraws the bar.

        Args:
            title: Which epoch.
            phase: `"train"` or `"validation"`.
            meter: How far training is.
            loss: The running loss, or None.
            speed: As text.
        """
        if self._bar is None:
            return
        width = self._console.width
        total = meter.steps_per_epoch or (None if phase == "train" else meter.done)
        words = [f" {meter.done}/{total or '?'}", *_words(phase, meter, loss, speed, width)]
        texts = [Text(title, "bold"), *map(Text, words)]
        columns = [_column(text) for text in texts]
        if width >= _MEDIUM:
            style = {"complete_style": "cyan", "finished_style": "cyan"}
            columns.insert(1, progress.BarColumn(None, table_column=Column(ratio=1), **style))
        self._bar.columns = columns
        self._bar.update(self._task, completed=meter.done, total=total, refresh=True)

    def leave_line(self, title: str, values, speed: str) -> None:
        """Prints the line of an epoch above the bar.

        Args:
            title: Which epoch.
            values: (name, value, value in validation or None) for each log.
            speed: As text.
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
            speed = speed.replace("examples/s", "ex/s")
        self._console.print(Text("  ").join([*parts, Text(speed, "dim")]))


def _column(text):
    column = Column(no_wrap=True)
    return progress.RenderableColumn(Padding(text, (0, 1, 0, 0)), table_column=column)


def _words(phase, meter, loss, speed, width) -> list[str]:
    if width < _MEDIUM:
        return []
    if phase == "validation":
        return ["validation"]
    if not speed:
        return ["compiling the first step"] if not meter.done else []
    words = [] if loss is None else [f"loss {show_value(loss)}"]
    if width >= _WIDE:
        words.append(speed)
    left = meter.seconds_left
    return words if left is None else [*words, f"{show_seconds(left)} left"]


def show_speed(steps_per_second: float | None, batch_size: int | None) -> str:
    """Returns a readable speed: examples per second, or steps if their size is unknown.

    >>> show_speed(12.5, 64), show_speed(0.123, None), show_speed(None, 64)
    ('800 examples/s', '0.12 steps/s', '')
    """
    if steps_per_second is None:
        return ""
    speed, unit = steps_per_second * (batch_size or 1), "examples/s" if batch_size else "steps/s"
    return f"{speed:,.0f} {unit}" if speed >= 10 else f"{speed:.2g} {unit}"


def show_seconds(seconds: float) -> str:
    """Returns a readable duration.

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


def show_value(value) -> str:
    """Returns a value of the logs with four digits; of an array, such as a score by class, each.

    >>> show_value(0.25), show_value(0.00001), show_value(12345.678)
    ('0.2500', '1.000e-05', '1.235e+04')
    >>> show_value(np.array([0.5, 1.0]))
    '[0.5000 1.0000]'
    """
    if np.ndim(value):
        return f"[{' '.join(map(show_value, np.ravel(value)))}]"
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


_REFRESH_S = 0.25
_SAY_SOMETHING_S = 60.0
_NOT_SHOWN = ("learning_rate", *throughput.NAMES, *hardware.NAMES)


class Progress(keras.callbacks.Callback):
    """Shows training progress, instead of Keras's own bar.

    On a terminal a bar with epoch, step, loss, examples per second and the time left, drawn four
    times a second at most, and above it one line for each epoch that is done. Elsewhere (a file,
    a pipe, a notebook) plain lines without control characters: one for each epoch, and one a
    minute within longer ones. Use it on the chief, after callbacks that add to the logs, and call
    `close` where `fit` may be left by an exception.

    Args:
        dataset: The result of `distribute_train`, which knows its number of examples. Without it
            speed is in steps per second.
        print_fn: Function of one line of text; with it there is never a bar. By default standard
            output, with a bar if that is a terminal.
        clock: Returns seconds.

    Example:
    >>> lines = []
    >>> callback = Progress(print_fn=lines.append)
    """

    def __init__(
        self,
        dataset=None,
        *,
        print_fn: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__()
        throughput.check_dataset(dataset)
        self._dataset, self._meter = dataset, Meter(clock)
        self._screen = Screen() if print_fn is None and is_terminal() else None
        self._print_fn = print_fn or print
        self._callbacks, self._next = (), 0.0
        # None where `evaluate` runs and no `fit`.
        self._phase, self._loss = None, None

    def set_callbacks(self, callbacks):
        """Receives all callbacks of this `fit`, usually including Keras's own bar."""
        self._callbacks = callbacks

    def on_train_begin(self, logs=None):
        """Replaces Keras's bar."""
        for callback in self._callbacks:
            if isinstance(callback, keras.callbacks.ProgbarLogger):
                callback.verbose = 0
        self._meter.begin(self.params.get("epochs", 1), self.params.get("steps"))
        self._phase, self._loss = "train", None
        self._wait()
        if self._screen is not None:
            self.close()
            atexit.register(self.close)
            self._screen.open()

    def _wait(self):
        seconds = _SAY_SOMETHING_S if self._screen is None else _REFRESH_S
        self._next = self._meter.clock() + seconds

    @property
    def _is_time(self) -> bool:
        return self._meter.clock() >= self._next

    @property
    def _speed(self) -> str:
        size = None if self._dataset is None else self._dataset.plan.global_batch_size
        return show_speed(self._meter.steps_per_second_now, size)

    def on_epoch_begin(self, epoch, logs=None):
        """Begins a line."""
        self._meter.begin_epoch(epoch, steps_before(self._dataset))
        self._phase = "train"
        if self._screen is not None and (not self._loss or self._is_time):
            self._show({})

    def on_train_batch_end(self, batch, logs=None):
        """Draws the bar if it is time."""
        self._meter.count(throughput.steps_done(self.params, batch))
        if self._is_time:
            self._show(logs or {})

    def on_test_begin(self, logs=None):
        """Shows that validation runs, within `fit`."""
        if self._phase == "train":
            self._phase = "validation"
            if self._screen is not None and self._is_time:
                self._show({})

    def on_epoch_end(self, epoch, logs=None):
        """Prints the epoch's line."""
        self._meter.end_epoch()
        logs = dict(logs or {})
        # Keras sorts them by name.
        names = sorted(logs, key=lambda name: name.removeprefix("val_") != "loss")
        shown = {name: logs[name] for name in names if name not in _NOT_SHOWN}
        if self._screen is None:
            values = [f"{name}: {show_value(value)}" for name, value in shown.items()]
            self._print_parts(show_seconds(self._meter.seconds), *values, self._speed)
        else:
            self._screen.leave_line(self._title, pair_logs(shown), self._speed)

    def on_train_end(self, logs=None):
        """Removes the bar."""
        self.close()

    def close(self) -> None:
        """Removes the bar and restores the terminal; needed if an exception ended `fit`."""
        if self._screen is not None:
            self._screen.close()
            atexit.unregister(self.close)

    @property
    def _title(self) -> str:
        return f"Epoch {self._meter.epoch + 1}/{self._meter.epochs}"

    def _show(self, logs):
        self._wait()
        self._loss = logs.get("loss", self._loss)
        if self._screen is None:
            left = self._meter.seconds_left
            values = [f"{name}: {show_value(value)}" for name, value in logs.items()]
            step = f"step {self._meter.done}/{self._meter.steps_per_epoch or '?'}"
            self._print_parts(
                step, *values, self._speed, f"{show_seconds(left)} left" if left else ""
            )
        else:
            self._screen.draw(self._title, self._phase, self._meter, self._loss, self._speed)

    def _print_parts(self, *parts):
        self._print_fn(" - ".join(filter(None, (self._title, *parts))))


class Events(keras.callbacks.Callback):
    """Prints when training begins and when an epoch is done, for workers other than the chief.

    Args:
        print_fn: Function of one line of text.
        clock: Returns seconds.
    """

    def __init__(
        self, print_fn: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ):
        super().__init__()
        self._print_fn, self._clock, self._began = print_fn, clock, 0.0

    def on_train_begin(self, logs=None):
        """Says so."""
        steps = self.params.get("steps")
        size = f" of {steps} steps" if steps else ""
        self._print_fn(f"began: {self.params.get('epochs')} epochs{size}")

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self._began = self._clock()

    def on_epoch_end(self, epoch, logs=None):
        """Says so."""
        seconds = show_seconds(self._clock() - self._began)
        self._print_fn(f"epoch {epoch + 1}/{self.params.get('epochs')} done in {seconds}")

    def on_train_end(self, logs=None):
        """Says so."""
        self._print_fn("training has ended")
