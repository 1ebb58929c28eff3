"""Compares a step on several replicas with one device in all views, and says what comes of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import topology
from tfmulti.verification import hidden_differences, messages
from tfmulti.verification.case import TRAIN, Case
from tfmulti.verification.chiefs_values import receive_from_chief
from tfmulti.verification.comparison import FailsHere, NothingChanges, NotVerified
from tfmulti.verification.custom_parts import neutral_layers
from tfmulti.verification.differences import CLOSE_ON_GPUS, compare
from tfmulti.verification.runs import Reference, same_random_numbers
from tfmulti.verification.state import make_alike
from tfmulti.verification.trial import Trial
from tfmulti.verification.views import (
    MANY,
    PLAIN,
    UNLIKE,
    WAYS,
    View,
    later_views,
    views_of_lengths,
    views_of_moments,
    views_of_numbers,
    views_of_outliers,
    views_of_signs,
)

# Data have two sizes of batches, or as many as there are files.
_MOST_SIZES = 4
ELSEWHERE = "another worker could not run it"
# Results of one comparison; workers reduce them by minimum and maximum.
_FAILED, _UNKNOWN, _NOTHING, _SAME, _DIFFERS = range(5)


@contextlib.contextmanager
def without_tf32():
    """Computes without TF32, whose rounding would be taken for a difference."""
    was_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_enabled)


class Workers(NamedTuple):
    """Collective functions of the workers.

    Attributes:
        min_and_max: Function of a strategy and a whole number; returns the minimum and the maximum
            over all workers.
        broadcast: Function of a strategy and bytes, which are None except on the chief; returns
            the chief's bytes.
        align: Function of a strategy, to call after some workers could not do what others did.
        all_fail: Function of a strategy, to call where a step fails that others may wait in;
            returns whether it fails on all workers. It is no collective.
    """

    min_and_max: Callable
    broadcast: Callable
    align: Callable
    all_fail: Callable

    def agree(self, strategy: tf.distribute.Strategy, can: bool) -> bool:
        """Returns whether something is true on all workers; each must call it."""
        return bool(self.min_and_max(strategy, int(can))[0])

    def any(self, strategy: tf.distribute.Strategy, holds: bool) -> bool:
        """Returns whether something is true on any worker; each must call it."""
        return bool(self.min_and_max(strategy, int(holds))[1])


class _Seen(NamedTuple):
    """The result of one comparison: minimum and maximum over workers, and the local error."""

    least: int
    most: int
    error: ValueError | None
    reason: str


class Verdict(NamedTuple):
    """What verification says of a step.

    Attributes:
        error: The error, or None.
        reason: Why the step could not be verified, or "".
        runs: Whether it can be traced on several replicas, and run on parts of a whole batch.
        settings: Handles and values of small variables that it reads and leaves.
        warnings: What a comparison of results need not show, in words.
    """

    error: ValueError | None
    reason: str = ""
    runs: bool = True
    settings: Sequence[tuple[tf.Tensor, np.ndarray]] = ()
    warnings: Sequence[str] = ()


@without_tf32()
def find_out(case: Case, workers: Workers) -> Verdict:
    """Compares a step on several replicas with one device.

    Args:
        case: The step to verify.
        workers: Collective functions of the workers.
    """
    agree = functools.partial(workers.agree, case.strategy)
    reason, runs = "", False
    for static, whole in ((False, False), (True, False), (True, True)):
        if whole and not agree(bool(case.rows.whole)):
            break
        case.is_traced_static, case.takes_whole_batch = static, whole
        trial, reason = _try(lambda: Trial(case, workers), case)
        runs = (runs or trial is not None) and not whole
        if not agree(trial is not None):
            workers.align(case.strategy)
            continue
        first = _try_view(trial, PLAIN, case, workers)
        reason = first.reason
        if first.most == _DIFFERS:
            return Verdict(first.error)
        if first.least == _UNKNOWN:
            return Verdict(None, reason or ELSEWHERE)
        if first.least > _UNKNOWN:
            return _compare_more(trial, first, case, workers)
    return Verdict(None, reason or ELSEWHERE, runs)


def _compare_more(trial, first, case, workers) -> Verdict:
    """Compares a step in which a few rows have shown no difference."""
    case.trial = trial
    drift = _find_drift(trial, case, workers)
    if drift is not None:
        return Verdict(drift)
    if case.is_replicated:
        told = _lists_of_replicas(trial, case)
        return Verdict(None, settings=trial.settings, warnings=told)
    many = _try_view(trial, View((MANY,)), case, workers)
    takes_some = case.is_traced_static or many.least == _FAILED
    bad = _compare_sizes(case, workers) if takes_some else None
    if bad is not None:
        return bad
    later, error = _look_further(trial, many, case, workers)
    told = _found_in_graph(trial, case)
    if later == _DIFFERS:
        return Verdict(error, settings=trial.settings, warnings=told)
    # Equal results are chance in a step that gives another one each time.
    reason = trial.random or ("" if _SAME in (first.least, later) else first.reason)
    told += _unlike_later(trial, case, workers)
    return Verdict(None, reason, settings=trial.settings, warnings=told)


def _compare_sizes(case, workers) -> Verdict | None:
    """Compares a step that takes some numbers of rows only with the numbers that batches have.

    Returns:
        The verdict on the first of them for which it differs or cannot run in parts, or None.
    """
    if case.takes_whole_batch:
        return None
    agree = functools.partial(workers.agree, case.strategy)
    case.takes_whole_batch = True
    try:
        for sizes in case.batch_sizes()[:_MOST_SIZES]:
            case.whole_sizes = sizes
            trial, reason = _try(lambda: Trial(case, workers), case)
            if agree(trial is not None):
                seen = _try_view(trial, PLAIN, case, workers)
                if seen.most == _DIFFERS:
                    return Verdict(seen.error)
                if seen.least > _FAILED:
                    continue
                reason = seen.reason
            else:
                workers.align(case.strategy)
            on_one, _ = _try(lambda: Reference(case, case.examples()[0]), case)
            # What one device cannot run either fails there with TensorFlow's own error.
            if agree(on_one is not None):
                return Verdict(None, reason or ELSEWHERE, runs=False)
    finally:
        case.takes_whole_batch, case.whole_sizes = False, None
    return None


@without_tf32()
def look_again(case: Case, workers: Workers) -> tuple[bool, Verdict]:
    """Compares a verified step once more, with the rows that its case now has.

    Args:
        case: The step.
        workers: Collective functions of the workers.

    Returns:
        Whether it differs on any worker, and the verdict of this worker.
    """
    name = make_alike(case.model, CLOSE_ON_GPUS if topology.on_gpus(case.strategy) else 0.0)
    if not workers.agree(case.strategy, not name):
        drift = messages.describe_drift(case, name)
        if topology.num_workers(case.strategy) > 1:
            # Other workers may hold other weights still.
            del drift.finding
        return True, Verdict(drift)
    case.trial.begin_again()
    seen = _try_view(case.trial, View((MANY,)), case, workers)
    if seen.least == _UNKNOWN:
        # A step of a fixed number of rows, or one for which many rows take too long.
        seen = _try_view(case.trial, PLAIN, case, workers)
    case.trial.begin_again()
    return seen.most == _DIFFERS, Verdict(seen.error)


def _find_drift(trial, case, workers) -> ValueError | None:
    """Returns the error where replicas would end with different weights."""
    if case.kind != TRAIN or not trial.distributed.draws:
        return None
    found, _ = _try(trial.drifting, case)
    name, ends, close = found or ("", [], 0.0)
    # If a worker could not run the step, the other workers have nothing to compare with.
    ran = workers.agree(case.strategy, found is not None)
    if not ran:
        return None
    # Every worker takes part, whatever it has found itself.
    unlike = _find_unlike_chief(case, ends, close, workers)
    name = name or unlike
    return messages.describe_drift(case, name) if workers.any(case.strategy, bool(name)) else None


def _find_unlike_chief(case, ends, close, workers) -> str:
    """Returns the name of a variable that the chief holds differently after the same step."""
    values = [end.values for end in ends]
    theirs = receive_from_chief(case.strategy, values, workers.broadcast) or values
    for end, value in zip(ends, theirs):
        if compare(end.values, value, end.change, 0.0, close) is not None:
            return end.name
    return ""


def _found_in_graph(trial, case) -> list[str]:
    """Returns warnings of what a comparison of results need not show."""
    step, told = trial.distributed, []
    # A decision often comes before a division: one warning of them suffices.
    if step.decisions:
        told.append(hidden_differences.describe_decisions(case, step.decisions))
    elif step.ratios:
        told.append(hidden_differences.describe_ratios(case, step.ratios))
    if step.own_noise:
        told.append(hidden_differences.describe_own_noise(case, step.own_noise))
    if step.shuffles:
        told.append(hidden_differences.SHUFFLES)
    return told + _lists_of_replicas(trial, case)


def _unlike_later(trial, case, workers) -> list[str]:
    """Returns a warning if a step is exact with the first batch, and may not be with later ones."""
    takes_some = case.is_traced_static and not case.static
    if takes_some and case.batches is None and not case.takes_whole_batch:
        return [hidden_differences.describe_unknown_sizes(case)]
    if not case.rows.unlike or case.static or case.is_traced_static:
        return []
    differs = _try_view(trial, View((UNLIKE,)), case, workers).most == _DIFFERS
    return [hidden_differences.describe_unlike(case)] * differs


def _lists_of_replicas(trial, case) -> list[str]:
    if not trial.containers or topology.num_local_replicas(case.strategy) == 1:
        return []
    return [hidden_differences.describe_containers(case, trial.containers)]


def _look_further(trial, many, case, workers) -> tuple[int, ValueError | None]:
    """Compares rows and state that are made up, where many rows of the data show no difference.

    Args:
        trial: The comparison.
        many: What many rows of the data have shown.
        case: The step.
        workers: Collective functions of the workers.

    Returns:
        Whether results differ on any worker, are equal somewhere, or could not be compared; and
        this worker's error, or None.
    """
    if many.most == _DIFFERS:
        return _DIFFERS, many.error
    ways, proven = (), many.least == _SAME
    for some in (WAYS, *((way,) for way in WAYS)):
        seen = _try_view(trial, View(some), case, workers)
        if seen.most == _DIFFERS:
            return _DIFFERS, seen.error
        if seen.least > _UNKNOWN:
            ways, proven = ways + some, proven or seen.least == _SAME
        if seen.least > _UNKNOWN and some == WAYS:
            break
    moments, _ = workers.min_and_max(case.strategy, trial.num_moments)
    for views in (
        *later_views(ways),
        *views_of_outliers(trial.tests_numbers),
        *_views_that_may_fail(trial, case),
        *views_of_numbers(trial.compared_numbers, trial.may_fail),
        *views_of_moments(moments),
    ):
        for view in views:
            seen = _try_view(trial, view, case, workers)
            if seen.most == _DIFFERS:
                return _DIFFERS, seen.error
            proven = proven or seen.least == _SAME
            if seen.least > _UNKNOWN:
                break
    return (_SAME if proven else _UNKNOWN), None


def _views_that_may_fail(trial, case):
    if not trial.may_fail:
        return []
    has_lengths = not case.is_traced_static
    lengths = views_of_lengths(case.rows, trial.compared_numbers) if has_lengths else []
    return [*views_of_signs(), *lengths]


def _try_view(trial, view, case, workers) -> _Seen:
    found, reason, kind = _found(trial, view, case)
    error = None
    if trial.shared:
        error, kind = messages.describe_shared(case, trial.shared), _DIFFERS
    elif trial.outside:
        error, kind = messages.describe_outside(case, trial.outside), _DIFFERS
    elif trial.attributes:
        error, kind = messages.describe_attributes(case, trial.attributes), _DIFFERS
    elif found:
        known = trial.clues, trial.synthetic_values, trial.counts
        error, kind = messages.describe(case, found, *known), _DIFFERS
    seen = _Seen(*workers.min_and_max(case.strategy, kind), error, reason)
    if seen.least == _FAILED:
        workers.align(case.strategy)
    return seen


def _found(trial, view, case):
    try:
        found, reason = _try(lambda: trial.differences(view), case)
    except NothingChanges as error:
        return None, str(error), _NOTHING
    except NotVerified as error:
        return None, str(error), _UNKNOWN
    return found, reason, _FAILED if found is None else _SAME


def _try(function, case):
    """Returns the result of a function and "", or None and the reason why it failed."""
    try:
        with same_random_numbers(case), neutral_layers(case.model):
            return function(), ""
    except (NotVerified, FailsHere):
        raise
    except Exception as error:
        logging.debug("A step could not be verified.", exc_info=True)
        return None, messages.shorten(error)
