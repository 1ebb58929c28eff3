"""Runs the comparisons of a step one after the other, until all workers have a result."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import logging

from tfmulti import keras_compat
from tfmulti.verification import telling
from tfmulti.verification.own import neutral_layers
from tfmulti.verification.runs import TRAIN, Case
from tfmulti.verification.trial import NothingChanges, NotVerified, Trial
from tfmulti.verification.views import PLAIN, WAYS, View, later_views

# Results of one comparison; workers reduce them by minimum and maximum.
_FAILED, _UNKNOWN, _NOTHING, _SAME, _DIFFERS = range(5)


class Workers(NamedTuple):
    """Collective functions of the workers.

    Attributes:
        compare: Function of a strategy and a whole number; returns the minimum and the maximum
            over all workers.
        broadcast: Function of a strategy and bytes, which are None except on the chief; returns
            the chief's bytes.
    """

    compare: Callable
    broadcast: Callable


class _Seen(NamedTuple):
    """The result of one comparison: minimum and maximum over workers, and the local error."""

    least: int
    most: int
    error: ValueError | None
    reason: str


def find_out(case: Case, workers: Workers) -> tuple[ValueError | None, str]:
    """Returns the error or None, and the reason why the step could not be verified, or "".

    Args:
        case: The step to verify.
        workers: Collective functions of the workers.
    """

    def agree(can: bool) -> bool:
        return bool(workers.compare(case.strategy, int(can))[0])

    reason = ""
    for static in dict.fromkeys((case.static, True)):
        case.static = static
        trial, reason = _try(lambda: Trial(case, agree), case.model)
        if not agree(trial is not None):
            continue
        first = _look(trial, PLAIN, case, workers)
        reason = first.reason
        if first.most == _DIFFERS:
            return first.error, ""
        if first.least == _UNKNOWN:
            break
        if first.least > _UNKNOWN:
            drift = _find_drift(trial, case, workers)
            if drift is not None:
                return drift, ""
            if trial.shuffles:
                warnings.warn(telling.SHUFFLES, stacklevel=3)
            error, proven = _look_further(trial, case, workers)
            return error, "" if error or proven or first.least == _SAME else reason
    return None, reason or "another worker could not run it"


def _find_drift(trial, case, workers) -> ValueError | None:
    """Returns the error where replicas would end with different weights."""
    if case.kind != TRAIN or not trial.draws:
        return None
    found, _ = _try(trial.drifting, case.model)
    name, number = found or ("", 0)
    # If a worker could not run the step, the other workers have nothing to compare with.
    ran, _ = workers.compare(case.strategy, int(found is not None))
    least, most = workers.compare(case.strategy, number)
    named = workers.compare(case.strategy, int(bool(name)))[1]
    drifts = ran and (named or least != most)
    return telling.describe_drift(case, name) if drifts else None


def _look_further(trial, case, workers) -> tuple[ValueError | None, bool]:
    """Returns the error or None, and whether a comparison showed equal results."""
    ways, proven = (), False
    for some in (WAYS, *((way,) for way in WAYS)):
        seen = _look(trial, View(some), case, workers)
        if seen.most == _DIFFERS:
            return seen.error, True
        if seen.least > _UNKNOWN:
            ways, proven = ways + some, proven or seen.least == _SAME
        if seen.least > _UNKNOWN and some == WAYS:
            break
    for views in later_views(ways):
        for view in views:
            seen = _look(trial, view, case, workers)
            if seen.most == _DIFFERS:
                return seen.error, True
            proven = proven or seen.least == _SAME
            if seen.least > _UNKNOWN:
                break
    return None, proven


def _look(trial, view, case, workers) -> _Seen:
    found, reason, kind = _found(trial, view, case.model)
    error = None
    if trial.outside:
        error, kind = telling.describe_outside(case, trial.outside), _DIFFERS
    elif trial.attributes:
        error, kind = telling.describe_attributes(case, trial.attributes), _DIFFERS
    elif found:
        known = trial.growth, trial.place, trial.made_up
        error, kind = telling.describe(case, found, *known), _DIFFERS
    return _Seen(*workers.compare(case.strategy, kind), error, reason)


def _found(trial, view, model):
    try:
        found, reason = _try(lambda: trial.differences(view), model)
    except NothingChanges as error:
        return None, str(error), _NOTHING
    except NotVerified as error:
        return None, str(error), _UNKNOWN
    return found, reason, _FAILED if found is None else _SAME


def _try(function, model):
    """Returns the result of a function and "", or None and the reason why it failed."""
    try:
        with same_random_numbers(), neutral_layers(model):
            return function(), ""
    except NotVerified:
        raise
    except Exception as error:
        logging.debug("A step could not be verified.", exc_info=True)
        words = " ".join(str(error).split())
        return None, f"{type(error).__name__}: {words[:300]}"


@contextlib.contextmanager
def same_random_numbers():
    """Restores the random states of Python, NumPy and TensorFlow on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with keras_compat.same_eager_numbers():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
