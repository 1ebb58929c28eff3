"""Spot checks: a verified step is compared with one device again and again while `fit` runs.

Before the first step, no one knows what later rows and a later state bring: a phase, a weight that
passes a limit, a rare class. So the step is compared again after 2, 3, 5, 8, 13, ... steps, with a
batch that it was just trained on and the state that it has then. In one process it is compared as
well before the step that follows a callback's change of a small variable that it reads.

`VerifyAgain` verifies a step from the beginning where such a change is there when an epoch begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, topology, verification
from tfmulti.runtime.scoped import with_attributes
from tfmulti.step.digests import fibonacci
from tfmulti.strategies import checks, coordination
from tfmulti.strategies.nested_calls import StepsTaken
from tfmulti.strategies.same_batches import BatchComparison
from tfmulti.verification import verified
from tfmulti.verification.case import PREDICT, TEST, TRAIN, Case
from tfmulti.verification.differences import same_bits
from tfmulti.verification.python_values import attributes_of

# Spot checks take at most these shares of the time of training, and of the first verification.
_OF_TRAINING, _OF_FIRST = 0.05, 0.25
# After so many changes a step is verified again at the changes of which the number is 2^k.
_ALWAYS = 3


@dataclasses.dataclass
class _Progress:
    """How far the training with a verified step has come.

    Attributes:
        case: The step.
        first: How many seconds its verification took.
        changes: What callbacks change between its runs.
        began: When the first step was taken.
        steps: How many steps have been taken.
        in_pass: How many of them with the current iterator.
        spent: How many seconds spot checks have taken.
        is_due: Whether it is time for one.
        is_over: Whether there are no more of them.
        passes: How many steps have been taken with each iterator.
    """

    case: Case
    first: float
    changes: _Changes | None = None
    began: float = dataclasses.field(default_factory=time.perf_counter)
    steps: int = 0
    in_pass: int = 0
    spent: float = 0.0
    is_due: bool = False
    is_over: bool = False
    passes: StepsTaken = dataclasses.field(default_factory=StepsTaken)

    def __post_init__(self):
        self._due = iter(fibonacci())
        self._next = next(self._due)

    def count(self, iterator, number: int) -> bool:
        """Counts steps; returns whether a spot check is due."""
        self.steps += number
        self.in_pass = self.passes.add(iterator, number)
        if self.steps >= self._next:
            self._next = next(itertools.dropwhile(lambda each: each <= self.steps, self._due))
            self.is_due = True
        return self.is_due

    def must_look(self, model: keras.Model, iterator) -> bool:
        """Whether callbacks have changed what the step reads: it is checked before it runs."""
        is_current = marks.CHECKED.get(model).get(self.case.kind) is self.case
        if self.is_over or not is_current or not self.changes.are_new():
            return False
        self.is_due, self.in_pass = True, self.passes.of(iterator)
        # Of another pass no batch has been kept yet.
        return self.in_pass > 0

    @property
    def is_affordable(self) -> bool:
        """Whether there is time for another spot check."""
        elapsed = time.perf_counter() - self.began
        return self.spent <= max(_OF_FIRST * self.first, _OF_TRAINING * elapsed)


class _Changes:
    """The small variables that a step reads and leaves, which a callback may set between two steps.

    Workers would have to agree in every step on whether one of them has set any, so they do not
    look: they find it at the next spot check, or when an epoch begins.

    Args:
        case: The step.
    """

    def __init__(self, case: Case):
        looks = case.kind == TRAIN and topology.num_workers(case.strategy) == 1
        self._settings = list(marks.SETTINGS.get(case.model) or ()) if looks else []
        self._variables = [keras_compat.container_of(handle) for handle, _ in self._settings]
        self._assigned = self._count()
        self._number, self._due = 0, itertools.chain([1], fibonacci())
        self._next = next(self._due)
        self._were_new = False

    def are_new(self) -> bool:
        """Whether values were set since the last call; after several times, mostly False."""
        assigned = self._count()
        if assigned == self._assigned:
            return False
        self._assigned = assigned
        if self._were_new and self._number + 1 < self._next:
            # An average of weights, say, changes with every step: no need to read it.
            self._number += 1
            return False
        now = [(handle, keras_compat.read_handle(handle)) for handle, _ in self._settings]
        pairs = zip(now, self._settings)
        self._were_new = not all(same_bits(value, then) for (_, value), (_, then) in pairs)
        self._settings, self._number = now, self._number + self._were_new
        if not self._were_new or self._number < self._next:
            return False
        self._next = next(self._due)
        return True

    def _count(self) -> int:
        return sum(marks.NUM_ASSIGNED.get(variable) for variable in self._variables)


@contextlib.contextmanager
def keeping_samples(model: keras.Model, name: str) -> Iterator[None]:
    """Has the batches of `fit` and `evaluate` kept for spot checks, if there will be any.

    The strategy knows within the context whose call it is.

    Args:
        model: The model whose method is called.
        name: The name of the method.
    """
    strategy = model.distribute_strategy
    if not keras_compat.is_ours(strategy):
        yield
        return
    kinds = {"fit": (TRAIN, TEST), "evaluate": (TEST,)}.get(name, ())
    several = strategy.num_replicas_in_sync > 1
    keeps = several and any(verification.may_be_verified(model, kind) for kind in kinds)
    # Only within the call: a callback may call `predict`, and `fit` then goes on.
    with with_attributes(strategy, keeps_samples=keeps, in_call_of=model):
        yield


def watched(model: keras.Model, kind: str, make: Callable) -> Callable:
    """Returns Keras's function of a step, after which spot checks are made.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        make: Makes Keras's function of an iterator.
    """
    function = make()
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return function
    progress: _Progress | None = None
    comparison = BatchComparison(model, kind)

    @functools.wraps(function)
    def step(iterator):
        nonlocal progress
        if progress is not None and progress.must_look(model, iterator):
            other = _check(model, kind, marks.SAMPLES.get(model)[kind], progress)
            if other is not None:
                return other(iterator)
        if kind in marks.PENDING.get(model):
            logs = _verify_and_run(model, kind, make, iterator)
        else:
            logs = function(iterator)
        comparison.after(iterator, model.steps_per_execution)
        if kind == TRAIN and not keras_compat.runs_eagerly(model):
            marks.ATTRIBUTES.set(model, None)
        samples = marks.SAMPLES.get(model).get(kind)
        case = marks.CHECKED.get(model).get(kind)
        if samples is None or case is None:
            return logs
        if progress is None or progress.case is not case:
            progress = _Progress(case, case.seconds, _Changes(case))
        if progress.count(iterator, model.steps_per_execution) and not progress.is_over:
            _check(model, kind, samples, progress)
        return logs

    return step


def _verify_and_run(model, kind, make, iterator):
    """Verifies a step with the next batch, and then runs it on this batch."""
    batches = [iterator.get_next()]
    # The last batches can be fewer than are run at once.
    with contextlib.suppress(tf.errors.OutOfRangeError, StopIteration):
        while len(batches) < model.steps_per_execution:
            batches.append(iterator.get_next())
    checks.verify_with(model, kind, batches[0])
    # A step that all replicas compute from the whole batch has another function, and so has one
    # that has moved its weights: both are made for what was verified here.
    verified.expect_function(model, kind)
    getattr(model, f"make_{kind}_function")()
    verified.take_function(model, kind)
    return make()(batches)


@contextlib.contextmanager
def verifying_predictions(model: keras.Model, name: str) -> Iterator[None]:
    """Has `predict` verified with the first batch that it draws, if it is to be.

    Args:
        model: The model whose method is called.
        name: The name of the method.
    """
    if name != "predict":
        yield
        return
    make, made = model.make_predict_function, None

    def verify_and_run(data):
        model.predict_function = made
        if PREDICT in marks.PENDING.get(model):
            checks.verify_with(model, PREDICT, data[0])
            # A step that all replicas compute from the whole batch has another function.
            make()
        return model.predict_function(data)

    def make_function(*args, **kwargs):
        nonlocal made
        make(*args, **kwargs)
        if PREDICT in marks.PENDING.get(model) and model.predict_function is not verify_and_run:
            made, model.predict_function = model.predict_function, verify_and_run
        return model.predict_function

    try:
        with with_attributes(model, make_predict_function=make_function):
            yield
    finally:
        checks.take_pending(model, PREDICT)
        if model.predict_function is verify_and_run:
            model.predict_function = made


def _check(model, kind, samples, progress) -> Callable | None:
    """Compares a step once more, if there is time; returns the function of one that is replaced."""
    if verification.is_between_updates(model):
        return None
    progress.is_due = False
    can = verification.can_check(model, kind)
    affordable = progress.is_affordable
    if not can or not checks.WORKERS.agree(model.distribute_strategy, affordable):
        progress.is_over = not can
        return None
    begin, before = time.perf_counter(), getattr(model, f"{kind}_function")
    drawn = samples.latest(progress.in_pass - 1)
    verification.spot_check(model, kind, drawn, progress.steps, checks.WORKERS)
    progress.spent += time.perf_counter() - begin
    getattr(model, f"make_{kind}_function")()
    now = getattr(model, f"{kind}_function")
    return None if now is before else now


def verify_again(model: keras.Model, kind: str) -> None:
    """Verifies a step again if its function is made anew, with other Python attributes perhaps.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
    """
    if not verified.take_function(model, kind):
        verified.forget(model, kind)
        if kind == TRAIN:
            _verify_within_fit(model)


def _verify_within_fit(model):
    feed = marks.FEED.get(model)
    if feed is not None and feed.by_python:
        checks.verify_at_first_batch(model, TRAIN, feed)
    elif feed is not None:
        verification.verify_once(model, TRAIN, feed, checks.WORKERS)


class VerifyAgain(keras.callbacks.Callback):
    """Verifies a step again where a callback has changed what it reads, as the phase of training.

    That is a small variable which the step does not change itself, or an attribute of the model or
    of an object that it holds: with `run_eagerly=True` at any time, else before the step is traced.
    """

    def __init__(self):
        super().__init__()
        self._is_first, self._changes = True, 0

    def on_train_begin(self, logs=None):
        """Notes that the step's function is the one that was verified."""
        verified.take_function(self.model, TRAIN)
        self._is_first = True

    def on_epoch_begin(self, epoch, logs=None):
        """Compares the values; a collective of all workers, where a step has such values."""
        # A step can have been verified in an earlier call, before an attribute was set.
        reads_attributes = self._is_first or keras_compat.runs_eagerly(self.model)
        nothing = not reads_attributes and marks.SETTINGS.get(self.model) is None
        self._is_first = False
        if marks.FEED.get(self.model) is None or nothing:
            return
        # All workers must take part, also one whose model is not changed.
        if not coordination.any_worker(self.model.distribute_strategy, self._has_changed()):
            return
        self._changes += 1
        # What changes with every epoch, as a weight of the loss, is not verified every time.
        if self._changes <= _ALWAYS or self._changes.bit_count() == 1:
            verified.forget(self.model, TRAIN)
            _verify_within_fit(self.model)
            self.model.make_train_function()
        if keras_compat.runs_eagerly(self.model):
            marks.ATTRIBUTES.set(self.model, attributes_of(self.model))

    def on_train_end(self, logs=None):
        """Lets go of the data."""
        marks.FEED.set(self.model, None)
        marks.SAMPLES.set(self.model, {})

    def _has_changed(self) -> bool:
        settings = marks.SETTINGS.get(self.model) or ()
        values = [(keras_compat.read_handle(handle), value) for handle, value in settings]
        attributes = marks.ATTRIBUTES.get(self.model)
        by_attribute = attributes is not None and attributes != attributes_of(self.model)
        return by_attribute or any(not same_bits(now, then) for now, then in values)
