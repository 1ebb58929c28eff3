"""Spot checks: a verified step is compared with one device again and again while `fit` runs.

Before the first step, no one knows what later rows and a later state bring: a phase, a weight that
passes a limit, a rare class. So the step is compared again after 2, 3, 5, 8, 13, ... steps, with a
batch that it was just trained on and the state that it has then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Callable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, verification
from tfmulti.step.samples import fibonacci
from tfmulti.strategies import checks
from tfmulti.verification.case import TEST, TRAIN, Case

# Spot checks take at most these shares of the time of training, and of the first verification.
_OF_TRAINING, _OF_FIRST = 0.05, 0.25


@dataclasses.dataclass
class _Progress:
    """How far the training with a verified step has come.

    Attributes:
        case: The step.
        first: How many seconds its verification took.
        began: When the first step was taken.
        steps: How many steps have been taken.
        in_pass: How many of them with the current iterator.
        spent: How many seconds spot checks have taken.
        is_due: Whether it is time for one.
        is_over: Whether there are no more of them.
    """

    case: Case
    first: float
    began: float = dataclasses.field(default_factory=time.perf_counter)
    steps: int = 0
    in_pass: int = 0
    spent: float = 0.0
    is_due: bool = False
    is_over: bool = False
    iterator: Callable = lambda: None

    def __post_init__(self):
        self._due = iter(fibonacci())
        self._next = next(self._due)

    def count(self, iterator, number: int) -> bool:
        """Counts steps; returns whether a spot check is due."""
        if self.iterator() is not iterator:
            self.iterator, self.in_pass = weakref.ref(iterator), 0
        self.steps, self.in_pass = self.steps + number, self.in_pass + number
        if self.steps >= self._next:
            self._next = next(itertools.dropwhile(lambda each: each <= self.steps, self._due))
            self.is_due = True
        return self.is_due

    @property
    def is_affordable(self) -> bool:
        """Whether there is time for another spot check."""
        elapsed = time.perf_counter() - self.began
        return self.spent <= max(_OF_FIRST * self.first, _OF_TRAINING * elapsed)


def prepare(model: keras.Model, name: str) -> None:
    """Has the batches of `fit` and `evaluate` kept for spot checks, if there will be any.

    Args:
        model: The model whose method is called.
        name: The name of the method.
    """
    strategy = model.distribute_strategy
    if keras_compat.is_ours(strategy):
        kinds = {"fit": (TRAIN, TEST), "evaluate": (TEST,)}.get(name, ())
        several = strategy.num_replicas_in_sync > 1
        strategy.keeps_samples = several and any(
            verification.may_be_verified(model, kind) for kind in kinds
        )


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

    @functools.wraps(function)
    def step(iterator):
        nonlocal progress
        if kind in marks.PENDING.get(model):
            logs = _verify_and_run(model, kind, make, iterator)
        else:
            logs = function(iterator)
        samples = marks.SAMPLES.get(model).get(kind)
        case = marks.CHECKED.get(model).get(kind)
        if samples is None or case is None:
            return logs
        if progress is None or progress.case is not case:
            progress = _Progress(case, case.seconds)
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
    # A step that all replicas compute from the whole batch has another function.
    _make_function(model, kind)
    return make()(batches)


def _make_function(model, kind):
    model.make_train_function() if kind == TRAIN else model.make_test_function()


def _check(model, kind, samples, progress):
    if kind == TRAIN and verification.is_between_updates(model):
        return
    progress.is_due = False
    can = verification.can_check(model, kind)
    affordable = progress.is_affordable
    if not can or not checks.WORKERS.agree(model.distribute_strategy, affordable):
        progress.is_over = not can
        return
    begin = time.perf_counter()
    drawn = samples.latest(progress.in_pass - 1)
    verification.spot_check(model, kind, drawn, progress.steps, checks.WORKERS)
    progress.spent += time.perf_counter() - begin
    # A step that all replicas compute from the whole batch has another function.
    _make_function(model, kind)
