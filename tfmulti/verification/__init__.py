"""Verifies the user's step before its first run.

A few rows go through the step twice: once whole on the first replica, with nothing reduced, which
is what one device computes; and once split into replica batches, as in training. A difference
raises an error that names it. All state is restored afterwards.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.choices import REPLICATE
from tfmulti.step import replicated
from tfmulti.verification import messages
from tfmulti.verification import rows as rows_lib
from tfmulti.verification.case import TRAIN, Case, Feed
from tfmulti.verification.custom_parts import is_stock, neutral_layers, num_micro_batches
from tfmulti.verification.outcomes import FailsHere, NothingChanges, NotVerified
from tfmulti.verification.runs import Distributed, same_random_numbers
from tfmulti.verification.state import Numbers, restored
from tfmulti.verification.trial import Trial
from tfmulti.verification.views import (
    MANY,
    PLAIN,
    UNLIKE,
    WAYS,
    View,
    later_views,
    views_of_outliers,
)


def verify_once(
    model: keras.Model, kind: str, feed: Feed, workers: Workers, *, early: bool = False
) -> None:
    """Verifies a step of a model, once for each `compile` and each form of data.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        feed: The description of its data.
        workers: Collective functions of the workers.
        early: Whether the step will get other data later. If it cannot run on the data at hand,
            it is verified with the later data.

    Raises:
        ValueError: If the result on several replicas differs from that of one device.
    """
    strategy = model.distribute_strategy
    if not _is_wanted(strategy, model, kind, feed):
        return
    drawn = feed.peek()
    batch = rows_lib.gather_local(strategy, drawn)
    if not rows_lib.can_be_cut(batch):
        _warn(kind, "a part of the batch has no rows")
        return
    case = Case.of(model, kind, rows_lib.Rows(batch), feed)
    if early and not feed.alone:
        # The numbers of rows of later data are not those of this feed.
        case.batches = None
    key = _key(case)
    if not _is_first_time(case, key):
        return
    _choose_rows(case, drawn, workers, early)
    begin = time.perf_counter()
    with restored(Numbers(model)), messages.quiet_tensorflow(), messages.announced(kind):
        error, reason, runs = find_out(case, workers)
        may = hasattr(error, "finding") or not runs
        differs, is_exact = _replicate(case, error, may, workers)
    seconds = time.perf_counter() - begin
    strategy.seconds_verified += seconds
    logging.info("Verified %s_step in %.2f s.", kind, seconds)
    if differs and not is_exact:
        # Another attempt shall verify, and raise, again.
        marks.VERIFIED.get(model)[1].discard(key)
        raise error or ValueError(messages.elsewhere(kind))
    if differs:
        warnings.warn(messages.describe_replicated(case, error, reason), stacklevel=2)
    elif reason and early:
        marks.VERIFIED.get(model)[1].discard(key)
    elif reason:
        _warn(kind, reason)


def build_by_step(model: keras.Model, kind: str, batch) -> bool:
    """Builds a model by tracing its step, in cases that Keras's own build could miss.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        batch: A batch, as the replicas receive it.

    Returns:
        Whether it built the model.
    """
    batch = rows_lib.gather_local(model.distribute_strategy, batch)
    dense = all(isinstance(p, tf.Tensor) for p in tf.nest.flatten(batch) if p is not None)
    own = keras_compat.has_custom_step(model, kind)
    if not rows_lib.can_be_cut(batch) or (dense and not own):
        return False
    case = Case(model, kind, rows_lib.Rows(batch))
    try:
        _build(case)
    except Exception:
        # A step that runs eagerly need not be traceable.
        if not case.eager:
            raise
        return False
    return True


def _build(case):
    """Builds a model in its step as the replicas run it, else as one that gets the whole batch."""
    rows = case.rows.first(case.most_rows())
    with restored(Numbers(case.model)):
        try:
            Distributed(case, rows, only_build=True)
        except Exception as error:
            if case.strategy.on_difference != REPLICATE:
                raise
            replicated.replicate(case.model, case.kind)
            try:
                Distributed(case, rows, only_build=True)
            except Exception:
                # A step that no replica can run has an error of its own, without ours.
                raise error from None
            finally:
                replicated.distribute_again(case.model, case.kind)


def _choose_rows(case, drawn, workers, early):
    """Chooses a few rows, and many, the same on all workers."""
    rows, strategy = case.rows, case.strategy
    several = topology.num_workers(strategy) > 1
    is_cut = any(isinstance(p, tf.distribute.DistributedValues) for p in tf.nest.flatten(drawn))
    if several and is_cut and not case.counted:
        rows.counts = [_count_of_all(strategy, count, workers) for count in rows.counts]
    few = case.most_rows()
    rows.many = rows.choose_many(max(few), _most_at_once(case), padded=case.padded)
    rows.parts = rows.spread(few, padded=case.padded)
    if several:
        known = rows.counts, case.batches, case.in_chunks
        known = rows_lib.of_the_chief(rows, known, strategy, workers.broadcast)
        rows.counts, case.batches, case.in_chunks = known
    if not early:
        rows.unlike = case.unlike_sizes()


def _most_at_once(case) -> int:
    """Returns how many rows one device may compute at once.

    On CPUs that is a batch. An accelerator has memory for what it trains with: a replica batch.
    """
    largest = max(max(counts) for counts in case.batches or [case.rows.counts])
    strategy = case.strategy
    on_cpus = all("CPU" in device for device in strategy.extended.worker_devices)
    return largest if on_cpus else -(-largest // strategy.num_replicas_in_sync)


def _count_of_all(strategy, count, workers) -> int:
    """Returns the rows of all workers; if they have unlike numbers, one with that property."""
    least, most = workers.compare(strategy, count)
    whole = most * topology.num_workers(strategy)
    return whole if least == most else whole - 1


def _is_wanted(strategy, model, kind, feed) -> bool:
    supported = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    several = strategy.num_replicas_in_sync > 1 and isinstance(strategy, supported)
    in_parts = several or num_micro_batches(model) > 1
    if not in_parts or strategy.verify == "never":
        return False
    return strategy.verify == "always" or feed.padded or not is_stock(model, kind)


def _is_first_time(case, key) -> bool:
    compiled = keras_compat.compiled_state(case.model)
    done = marks.VERIFIED.get(case.model)
    if done is None or done[0] is not compiled:
        done = (compiled, set())
        marks.VERIFIED.set(case.model, done)
    if key in done[1] or _key(case, small=True) in done[1]:
        return False
    done[1].add(key)
    return True


def _key(case, small=False):
    shares = case.rows.are_unequal and tuple(case.shares_alike(each) for each in case.sizes())
    return case.kind, case.rows.form(), case.padded, small or case.may_leave_empty, shares


def _warn(kind, reason):
    reason = reason.removesuffix(".")
    warnings.warn(f"`{kind}_step` was not verified: {reason}.", stacklevel=3)


# Results of one comparison; workers reduce them by minimum and maximum.
_FAILED, _UNKNOWN, _NOTHING, _SAME, _DIFFERS = range(5)


class Workers(NamedTuple):
    """Collective functions of the workers.

    Attributes:
        compare: Function of a strategy and a whole number; returns the minimum and the maximum
            over all workers.
        broadcast: Function of a strategy and bytes, which are None except on the chief; returns
            the chief's bytes.
        align: Function of a strategy, to call after some workers could not do what others did.
        all_fail: Function of a strategy, to call where a step fails that others may wait in;
            returns whether it fails on all workers. It is no collective.
    """

    compare: Callable
    broadcast: Callable
    align: Callable
    all_fail: Callable

    def agree(self, strategy: tf.distribute.Strategy, can: bool) -> bool:
        """Returns whether something is true on all workers; each must call it."""
        return bool(self.compare(strategy, int(can))[0])


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
        runs: Whether it can be traced on several replicas.
    """

    error: ValueError | None
    reason: str = ""
    runs: bool = True


def find_out(case: Case, workers: Workers) -> Verdict:
    """Compares a step on several replicas with one device.

    Args:
        case: The step to verify.
        workers: Collective functions of the workers.
    """
    agree = functools.partial(workers.agree, case.strategy)
    all_fail = functools.partial(workers.all_fail, case.strategy)
    reason, runs = "", False
    for static in (False, True):
        case.is_traced_static = static
        trial, reason = _try(lambda: Trial(case, agree, all_fail), case.model)
        if not agree(trial is not None):
            workers.align(case.strategy)
            continue
        runs = True
        first = _try_view(trial, PLAIN, case, workers)
        reason = first.reason
        if first.most == _DIFFERS:
            return Verdict(first.error)
        if first.least == _UNKNOWN:
            break
        if first.least > _UNKNOWN:
            drift = _find_drift(trial, case, workers)
            if drift is not None:
                return Verdict(drift)
            if case.is_replicated:
                return Verdict(None)
            _warn_of(trial, case)
            error, proven = _look_further(trial, case, workers)
            is_known = error or proven or first.least == _SAME
            return Verdict(error, "" if is_known else reason)
    return Verdict(None, reason or "another worker could not run it", runs)


def _find_drift(trial, case, workers) -> ValueError | None:
    """Returns the error where replicas would end with different weights."""
    if case.kind != TRAIN or not trial.distributed.draws:
        return None
    found, _ = _try(trial.drifting, case.model)
    name, number = found or ("", 0)
    # If a worker could not run the step, the other workers have nothing to compare with.
    ran, _ = workers.compare(case.strategy, int(found is not None))
    least, most = workers.compare(case.strategy, number)
    named = workers.compare(case.strategy, int(bool(name)))[1]
    drifts = ran and (named or least != most)
    return messages.describe_drift(case, name) if drifts else None


def _replicate(case, error, may, workers) -> tuple[bool, bool]:
    """Has every replica compute a step from all rows, if it differs or cannot run in parts.

    Args:
        case: The step.
        error: What this worker has found, or None.
        may: Whether that may come from the division of the rows.
        workers: Collective functions of the workers.

    Returns:
        Whether the step differs on any worker, and whether all replicas now compute it from all
        rows.
    """
    may = may and case.strategy.on_difference == REPLICATE
    may = may and replicated.can_be_replicated(case.model)
    cannot = error is not None and not may
    found = workers.compare(case.strategy, int(may) + 2 * int(cannot))[1]
    differs = workers.compare(case.strategy, int(error is not None))[1] > 0
    if found != 1:
        return differs, False
    replicated.replicate(case.model, case.kind)
    other, why, _ = find_out(case, workers)
    is_exact = not workers.compare(case.strategy, int(bool(other or why)))[1]
    if not is_exact:
        replicated.distribute_again(case.model, case.kind)
        logging.info("Replicas that compute the whole batch differ, too: %s", other or why)
    return differs or is_exact, is_exact


def _warn_of(trial, case):
    """Warns of what a comparison of results need not show."""
    step, several = trial.distributed, topology.num_local_replicas(case.strategy) > 1
    texts = [messages.describe_decisions(case, step.decisions)] if step.decisions else []
    texts += [messages.describe_own_noise(case, step.own_noise)] if step.own_noise else []
    texts += [messages.SHUFFLES] if step.shuffles else []
    if trial.containers and several:
        texts += [messages.describe_containers(case, trial.containers)]
    for text in texts:
        warnings.warn(text, stacklevel=4)


def _look_further(trial, case, workers) -> tuple[ValueError | None, bool]:
    """Returns the error or None, and whether a comparison showed equal results."""
    seen = _try_view(trial, View((MANY,)), case, workers)
    if seen.most == _DIFFERS:
        return seen.error, True
    ways, proven = (), seen.least == _SAME
    for some in (WAYS, *((way,) for way in WAYS)):
        seen = _try_view(trial, View(some), case, workers)
        if seen.most == _DIFFERS:
            return seen.error, True
        if seen.least > _UNKNOWN:
            ways, proven = ways + some, proven or seen.least == _SAME
        if seen.least > _UNKNOWN and some == WAYS:
            break
    for views in (*later_views(ways), *views_of_outliers(trial.tests_numbers)):
        for view in views:
            seen = _try_view(trial, view, case, workers)
            if seen.most == _DIFFERS:
                return seen.error, True
            proven = proven or seen.least == _SAME
            if seen.least > _UNKNOWN:
                break
    _warn_of_unlike(trial, case, workers)
    return None, proven


def _warn_of_unlike(trial, case, workers):
    """Warns of a step that is exact with the first batch, and may not be with later ones."""
    if case.rows.unlike and not (case.static or case.is_traced_static):
        if _try_view(trial, View((UNLIKE,)), case, workers).most == _DIFFERS:
            warnings.warn(messages.describe_unlike(case), stacklevel=5)


def _try_view(trial, view, case, workers) -> _Seen:
    found, reason, kind = _found(trial, view, case.model)
    error = None
    if trial.outside:
        error, kind = messages.describe_outside(case, trial.outside), _DIFFERS
    elif trial.attributes:
        error, kind = messages.describe_attributes(case, trial.attributes), _DIFFERS
    elif found:
        known = trial.growth, trial.origin, trial.synthetic_values, trial.counts
        error, kind = messages.describe(case, found, *known), _DIFFERS
    seen = _Seen(*workers.compare(case.strategy, kind), error, reason)
    if seen.least == _FAILED:
        workers.align(case.strategy)
    return seen


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
    except (NotVerified, FailsHere):
        raise
    except Exception as error:
        logging.debug("A step could not be verified.", exc_info=True)
        return None, messages.shorten(error)
