"""Training progress: a bar on a terminal, a line for each epoch everywhere."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable

import keras

from tfmulti import hardware
from tfmulti.callbacks import throughput
from tfmulti.callbacks.meter import Meter, steps_before
from tfmulti.callbacks.screen import Screen, pair_logs, show_rate, show_seconds, show_value
from tfmulti.runtime.console import is_terminal

_REFRESH_S = 0.25
_SAY_SOMETHING_S = 60.0
_SHOWN_ELSEWHERE = ("learning_rate", *throughput.NAMES, *hardware.NAMES)


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
        print_fn: Function of one line of text: then there is no bar, wherever this runs. By default
            standard output, with a bar where that is a terminal.
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
    def _rate(self) -> str:
        size = None if self._dataset is None else self._dataset.plan.global_batch_size
        return show_rate(self._meter.steps_per_second_now, size)

    def on_epoch_begin(self, epoch, logs=None):
        """Begins a line."""
        self._meter.begin_epoch(epoch, steps_before(self._dataset))
        self._phase = "train"
        if self._screen is not None and (not self._loss or self._is_time):
            self._show({})

    def on_train_batch_end(self, batch, logs=None):
        """Draws the bar if it is time."""
        self._meter.count(batch + 1)
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
        shown = {name: logs[name] for name in names if name not in _SHOWN_ELSEWHERE}
        if self._screen is None:
            values = [f"{name}: {show_value(value)}" for name, value in shown.items()]
            self._print_parts(show_seconds(self._meter.seconds), *values, self._rate)
        else:
            self._screen.leave_line(self._title, pair_logs(shown), self._rate)

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
                step, *values, self._rate, f"{show_seconds(left)} left" if left else ""
            )
        else:
            self._screen.draw(self._title, self._phase, self._meter, self._loss, self._rate)

    def _print_parts(self, *parts):
        self._print_fn(" - ".join(filter(None, (self._title, *parts))))
