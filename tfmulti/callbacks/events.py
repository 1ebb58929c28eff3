"""The output of workers other than the chief: one line for each event."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras

from tfmulti.callbacks.screen import show_seconds


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
