"""Lets a `fit` go on as before after a callback of its own has called `fit` of the same model.

Such a call, as with pseudo-labels or replay, notes its own data on the model and ends the check of
gradients, as every `fit` does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import keras

from tfmulti import marks
from tfmulti.step import finite
from tfmulti.strategies import guarded

_OF_A_CALL = (marks.FEED, marks.SAMPLES, marks.PENDING)


class StepsTaken:
    """How many steps have been taken with each iterator: the outer one goes on after the inner."""

    def __init__(self):
        # Not every iterator has a hash.
        self._counts: list[tuple[weakref.ref, int]] = []

    def of(self, iterator) -> int:
        """Returns the number of steps of an iterator."""
        return next((count for each, count in self._counts if each() is iterator), 0)

    def add(self, iterator, number: int) -> int:
        """Adds steps, and returns the number with them."""
        count = self.of(iterator) + number
        others = [
            pair for pair in self._counts if pair[0]() is not None and pair[0]() is not iterator
        ]
        self._counts = [(weakref.ref(iterator), count), *others]
        return count


@contextlib.contextmanager
def keeping_outer(model: keras.Model, name: str) -> Iterator[None]:
    """Gives an outer call back, on exit, what it had noted on the model, and its guard.

    Args:
        model: The model whose method is called.
        name: The name of the method.
    """
    strategy = model.distribute_strategy
    # Validation is a call within `fit` too, and notes its data for all epochs.
    if name != "fit" or getattr(strategy, "in_call_of", None) is not model:
        yield
        return
    noted = [(mark, mark.get(model)) for mark in _OF_A_CALL]
    optimizer = getattr(model, "optimizer", None)
    guard = finite.guard_of(optimizer) if optimizer is not None else None
    counts = guard.counts if guard is not None else None
    try:
        yield
    finally:
        for mark, value in noted:
            mark.set(model, value)
        if guard is not None:
            guarded.guard(model)
            # A guard of the inner call is the same object, and counts from zero.
            guard.reset(counts)
