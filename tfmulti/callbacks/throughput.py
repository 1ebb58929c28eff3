"""Examples per second, global."""

from __future__ import annotations

import time
from collections.abc import Callable

import keras


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all replicas, and adds it to each epoch's logs.

    The first call of each `fit` is left out: it compiles. Validation is not timed. Put it before
    callbacks that write logs. Without `dataset` the number of examples is read from the mean that
    Keras keeps of the loss; a model without it is measured in steps per second only.

    Args:
        dataset: What `distribute_train` returned; it knows its examples.
        clock: Returns seconds.

    Attributes:
        examples: Examples trained on since `fit` began, over all replicas; None where unknown.
        steps: Steps since `fit` began.
        seconds: Seconds of training that were timed.

    Example:
    >>> callback = Throughput()
    >>> callback.examples_per_second is None
    True
    """

    def __init__(self, dataset=None, *, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        self._dataset, self._clock = dataset, clock
        self._reset()

    def _reset(self):
        self.examples, self.steps, self.seconds = 0, 0, 0.0
        self._timed_steps, self._last_step, self._began = 0, -1, None

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second of the steps that were timed, or None."""
        return self._timed_steps / self.seconds if self._timed_steps else None

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second over all replicas, or None."""
        if not self._timed_steps or not self.examples:
            return None
        return self.steps_per_second * self.examples / self.steps

    def on_train_begin(self, logs=None):
        """Starts anew."""
        self._reset()

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock, but for the first epoch, whose first call compiles."""
        self._first_step = 0
        if self._dataset is not None:
            # Not 0 where training goes on within an epoch.
            self._first_step = self._dataset.plan.steps_per_epoch - self._dataset.steps_left()
        self._last_step = self._first_step - 1
        self._began = self._clock() if self.steps else None

    def on_train_batch_end(self, batch, logs=None):
        """Counts the steps of a call; reads the examples at the epoch's last step."""
        done = batch - self._last_step
        self._last_step = batch
        self.steps += done
        if self._began is None:
            self._began = self._clock()
        else:
            self._timed_steps += done
        if self.params.get("steps") and batch + 1 >= self.params["steps"]:
            self._end_epoch()

    def on_epoch_end(self, epoch, logs=None):
        """Adds `examples_per_second` to the logs."""
        if logs is not None and self.examples_per_second:
            logs["examples_per_second"] = self.examples_per_second

    def _end_epoch(self):
        self.seconds += self._clock() - self._began
        if self._dataset is None:
            seen = _examples_seen(self.model)
        else:
            seen = self._dataset.plan.count_epoch(self._dataset.position[0], self._first_step)
        known = seen is not None and self.examples is not None
        self.examples = self.examples + seen if known else None


def _examples_seen(model) -> int | None:
    """Examples since the metrics were reset; a collective under several workers."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return int(metric.count.value.read_value())
    return None
