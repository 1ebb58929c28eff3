"""Measures the throughput of training, and adds it to the logs."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping

import keras

from tfmulti.data.epochs import EpochDataset
from tfmulti.settings import check_type


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

    Validation and checkpoints between epochs count in the time that is left, but not in the time
    of the steps.

    Args:
        clock: Returns seconds.

    Attributes:
        epochs: Epochs of this `fit`.
        steps_per_epoch: Steps of an epoch; None until the first epoch has ended if the length of
            the data is unknown.
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
        """Steps per second of this epoch, or of the previous one before the first step, or None."""
        return self.now.rate or self._before.rate

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end of `fit`, with the time between epochs; None if unknown."""
        if self.steps_per_epoch is None or self.steps_per_second is None:
            return None
        epochs = self.epochs - self.epoch - 1
        steps = self.steps_per_epoch - self.done + epochs * self.steps_per_epoch
        pauses = epochs + (not self._is_between)
        return steps / self.steps_per_second + pauses * self._between


def check_dataset(dataset) -> None:
    """Raises ValueError for a callback's dataset that has no position.

    Args:
        dataset: What the callback was given; None for none.
    """
    if dataset is not None:
        advice = "Give the same that `fit` gets, or leave it out."
        kind = "a result of distribute_train"
        check_type("dataset", dataset, EpochDataset, kind, advice)


def steps_before(dataset) -> int:
    """Returns the steps of this epoch before training was resumed within it; usually 0.

    Args:
        dataset: The result of `distribute_train`, or None.
    """
    return 0 if dataset is None else dataset.plan.steps_per_epoch - dataset.steps_left()


def steps_done(params: Mapping, batch: int) -> int:
    """Returns the steps of this epoch that are done after a call of the training function.

    Keras counts `steps_per_execution` for each call, also where fewer were left for the last one.

    Args:
        params: What Keras gives to callbacks.
        batch: The argument of `on_train_batch_end`.

    >>> steps_done({"steps": 23}, 23), steps_done({"steps": None}, 23)
    (23, 24)
    """
    return min(batch + 1, params.get("steps") or batch + 1)


NAMES = (
    "examples_per_second",
    "examples_per_second_now",
    "examples_per_second_per_replica",
    "steps_per_second",
    "input_share",
)
"""The names that are added to an epoch's logs."""


def describe(found: Mapping[str, float], seconds_left: float | None = None) -> str:
    """Returns a readable line with the values that `Throughput` adds to the logs.

    >>> describe({"examples_per_second": 1234.5, "input_share": 0.031}, seconds_left=125.0)
    '1,234 examples/s so far, 3% of the time waiting for data, about 0:02:05 left'
    """
    formats = {
        "examples_per_second_now": "{:,.0f} examples/s now",
        "examples_per_second": "{:,.0f} examples/s so far",
        "examples_per_second_per_replica": "{:,.0f} per replica",
        "steps_per_second": "{:,.4g} steps/s",
        "input_share": "{:.0%} of the time waiting for data",
    }
    parts = [text.format(found[name]) for name, text in formats.items() if name in found]
    if seconds_left is not None:
        parts.append(f"about {datetime.timedelta(seconds=round(seconds_left))} left")
    return ", ".join(parts)


class Throughput(keras.callbacks.Callback):
    """Measures examples per second over all replicas, and adds it to each epoch's logs.

    It skips the first call of each `fit`, which compiles, and validation. Put it before callbacks
    that write logs. Without `dataset` it reads the number of examples from Keras's running mean
    of the loss; for a model without that mean it measures only steps per second.

    It adds to the logs, if known: `examples_per_second`, over all replicas, since `fit` began;
    `examples_per_second_now`, in this epoch; `examples_per_second_per_replica` and
    `steps_per_second`, since `fit` began; `input_share`, the fraction of this epoch's step time,
    from 0 to 1, that this worker has waited for data.

    Args:
        dataset: The result of `distribute_train`, which knows its number of examples, and how
            long steps wait for them (with one step per call; otherwise the two overlap).
        clock: Returns seconds.
        print_fn: Function of one line of text, called after each epoch; None to stay quiet.

    Attributes:
        examples: Examples trained on since `fit` began, over all replicas; None where unknown.

    Example:
    >>> callback = Throughput()
    >>> callback.examples_per_second is None
    True
    """

    def __init__(
        self,
        dataset=None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        print_fn: Callable[[str], None] | None = None,
    ):
        super().__init__()
        check_dataset(dataset)
        self._dataset, self._print_fn, self._meter = dataset, print_fn, Meter(clock)
        if dataset is not None:
            # Before the step is traced, of which it becomes a part.
            dataset.measure_waiting()
        self._reset()

    def _reset(self):
        # With the steps that they were counted in.
        self.examples, self._counted_steps = 0, 0
        self._first_step, self._has_ended, self._line = 0, True, None
        # Seconds waited for data: when the timed steps of this epoch began, and in all of them.
        self._waited_before = self._waited = None

    @property
    def steps(self) -> int:
        """Steps since `fit` began."""
        return self._meter.steps

    @property
    def seconds(self) -> float:
        """Seconds of training that were timed."""
        return self._meter.all.seconds

    @property
    def steps_per_second(self) -> float | None:
        """Steps per second of the steps that were timed, or None."""
        return self._meter.steps_per_second

    @property
    def examples_per_second(self) -> float | None:
        """Examples per second over all replicas, or None."""
        return _times(self.steps_per_second, self._examples_per_step())

    @property
    def examples_per_second_now(self) -> float | None:
        """The same for this epoch, also before it ends, or None."""
        return _times(self._meter.now.rate, self._examples_per_step())

    @property
    def examples_per_second_per_replica(self) -> float | None:
        """Examples per second of one replica, or None."""
        if self.model is None:
            return None
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        return _times(self.examples_per_second, 1.0 / replicas)

    @property
    def input_share(self) -> float | None:
        """The fraction of the last epoch's step time spent waiting for data, or None."""
        seconds = self._meter.now.seconds
        if self._waited is None or not seconds:
            return None
        return min(1.0, max(0.0, self._waited / seconds))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of `fit`, including validation; None if unknown."""
        return self._meter.seconds_left

    def on_train_begin(self, logs=None):
        """Starts anew."""
        self._reset()
        self._meter.begin(self.params.get("epochs", 1), self.params.get("steps"))

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock, except in the first epoch, whose first call compiles."""
        self._print_line()
        self._first_step, self._has_ended = steps_before(self._dataset), False
        self._meter.begin_epoch(epoch, self._first_step)
        self._waited, self._waited_before = None, self._seconds_waited() if self.steps else None

    def on_train_batch_end(self, batch, logs=None):
        """Counts the steps of a call; reads the examples at the epoch's last step."""
        is_first = not self.steps
        done = steps_done(self.params, batch)
        self._meter.count(done)
        if is_first:
            self._waited_before = self._seconds_waited()
        if done == self.params.get("steps"):
            self._end_steps()

    def on_test_begin(self, logs=None):
        """Ends the epoch's steps if their number was unknown."""
        self._end_steps()

    def on_epoch_end(self, epoch, logs=None):
        """Adds what is known to the logs."""
        self._end_steps()
        self._meter.end_epoch()
        found = {name: getattr(self, name) for name in NAMES}
        found = {name: _shorten(name, value) for name, value in found.items() if value is not None}
        if logs is not None:
            logs.update(found)
        if self._print_fn is not None and found:
            self._line = describe(found, self.seconds_left)

    def on_train_end(self, logs=None):
        """Reports the last epoch."""
        self._print_line()

    def _print_line(self):
        # Not at the end of the epoch, when a progress bar's line is not ended.
        if self._line is not None:
            self._print_fn(self._line)
            self._line = None

    def _end_steps(self):
        # `evaluate` outside of `fit` has no steps to end.
        if self._has_ended:
            return
        self._has_ended, waited = True, self._seconds_waited()
        if waited is not None and self._waited_before is not None:
            self._waited = waited - self._waited_before
        self._counted_steps = self.steps
        if self._dataset is None:
            seen = _examples_seen(self.model)
        else:
            # A callback may have stopped training before the epoch's end.
            plan, epoch = self._dataset.plan, self._dataset.position[0]
            first, end = (plan.count_before(epoch, n) for n in (self._first_step, self._meter.done))
            seen = end - first
        known = seen is not None and self.examples is not None
        self.examples = self.examples + seen if known else None

    def _seconds_waited(self) -> float | None:
        if self._dataset is None or self.model.steps_per_execution != 1:
            return None
        return self._dataset.seconds_waited

    def _examples_per_step(self) -> float | None:
        if self.examples:
            return self.examples / self._counted_steps
        # Of the first epoch, while it is under way: its short batch is the last.
        known = self.examples is not None and self._dataset is not None and self.steps
        return self._dataset.plan.global_batch_size if known else None


def _shorten(name: str, value: float) -> float:
    # Of the result, and so left as it is.
    return value if name == "examples_per_second" else float(f"{value:.5g}")


def _times(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first * second


def _examples_seen(model) -> int | None:
    """Examples since the metrics were reset; a collective under several workers."""
    for metric in model.metrics:
        if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
            return int(metric.count.value.read_value())
    return None
