"""Verifies the user's step before its first run.

A few rows go through the step twice: once whole on the first replica, with nothing reduced, which
is what one device computes; and once split into replica batches, as in training. A step that
differs is computed by every replica from the whole batch from then on, with a warning; if it still
differs, or the user wants no such step, an error names the difference. All state is restored
afterwards.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.choices import REPLICATE
from tfmulti.step import accumulation, local_steps, model_contents, parameters, replicated
from tfmulti.step.rows import parts_of
from tfmulti.verification import messages, verified
from tfmulti.verification import rows as rows_lib
from tfmulti.verification.case import PREDICT, TRAIN, Case, Feed
from tfmulti.verification.custom_parts import has_stock_step, num_micro_batches
from tfmulti.verification.notices import announced, quiet_tensorflow
from tfmulti.verification.python_values import Containers, Numbers, attributes_of, restored
from tfmulti.verification.runs import Distributed
from tfmulti.verification.verdict import ELSEWHERE, Verdict, find_out, look_again
from tfmulti.verification.verdict import Workers as Workers


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
    if not _is_wanted(strategy, model, kind, feed, workers):
        # In `fit` a callback may make the step one that is. Elsewhere each call is one step, and
        # going through all attributes would take longer than it.
        if strategy.verify != "never" and marks.CALL.get(model)[0] == "fit":
            _note_attributes(model, kind)
        if not feed.alone:
            _note_any_rows(model, kind, strategy.verify == "auto" or has_stock_step(model, kind))
        return
    drawn = feed.peek()
    batch = keras_compat.gather_local(strategy, drawn)
    if parts_of(batch) is None:
        _warn(kind, "a part of the batch has no rows")
        return
    case = Case.of(model, kind, rows_lib.Rows(batch), feed)
    if early and not feed.alone:
        # The numbers of rows of later data are not those of this feed.
        case.batches = None
    form = verified.note(case, functools.partial(workers.any, strategy))
    if form is None:
        return
    try:
        _verify(case, drawn, workers, early, form)
    except BaseException:
        # Also after Ctrl-C another attempt shall verify again.
        verified.withdraw(model, form)
        raise


def _verify(case, drawn, workers, early, form):
    model, kind, strategy = case.model, case.kind, case.strategy
    # Amid an accumulation, as in a validation, replicas hold sums of their own; one device has one.
    accumulation.settle_compiled(model)
    _choose_rows(case, drawn, workers, early)
    begin = time.perf_counter()
    # A step that runs eagerly fills its lists in each run.
    lists = restored(Containers(model if case.eager else None))
    with restored(Numbers(model)), lists, quiet_tensorflow(), announced(kind):
        found = find_out(case, workers)
        whole, error = _replicate(case, found, workers, early)
    if kind == TRAIN:
        on_any = workers.any(strategy, bool(found.settings))
        marks.SETTINGS.set(model, found.settings if on_any else None)
    _note_attributes(model, kind)
    verified.note_done(case, form)
    seconds = time.perf_counter() - begin
    strategy.seconds_verified += seconds
    case.seconds = seconds
    # Predictions get no spot checks.
    keeps = kind != PREDICT and found.error is None and case.trial is not None
    checked = case if keeps else None
    if keeps:
        # It holds copies of the state, which are read anew for each spot check.
        case.trial.begin_again()
    marks.CHECKED.set(model, {**marks.CHECKED.get(model), kind: checked})
    _note_any_rows(model, kind, keeps and not case.is_traced_static)
    logging.info("Verified %s_step in %.2f s.", kind, seconds)
    unknown = whole is None and bool(found.reason)
    if unknown and early:
        # Another attempt shall verify again.
        verified.withdraw(model, form)
    elif unknown and error is None:
        _warn(kind, found.reason)
    _warn_of_findings(case, found, whole)
    if error is not None:
        raise error


def _note_attributes(model, kind):
    if kind == TRAIN:
        several = model.distribute_strategy.num_replicas_in_sync > 1
        marks.ATTRIBUTES.set(model, attributes_of(model) if several else None)


def _note_any_rows(model, kind, takes):
    others = marks.ANY_ROWS.get(model) - {kind}
    marks.ANY_ROWS.set(model, others | {kind} if takes else others)


def may_be_verified(model: keras.Model, kind: str, *, in_loop: bool = False) -> bool:
    """Whether a step is verified on several replicas, whatever its data.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        in_loop: Whether it is asked before each step of a loop, of which a search of the whole
            model would take longer than the step: then once for each function of the step.
    """
    strategy = model.distribute_strategy
    if strategy.verify != "auto":
        return strategy.verify == "always"
    known = verified.notes(model, kind) if in_loop else {}
    if "may" not in known or getattr(model, f"{kind}_function") is None:
        # The conformance tests have no copies of pipeline stages.
        in_copies = any(parameters.has_copies(each, strategy) for each in model.variables)
        known["may"] = in_copies or not has_stock_step(model, kind)
    return known["may"]


def can_check(model: keras.Model, kind: str) -> bool:
    """Whether a step was verified, and can be compared again while it runs; on all workers alike.

    Not if it runs Python code each time, which may count how often, or has been replicated.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
    """
    case = marks.CHECKED.get(model).get(kind)
    return case is not None and not (case.eager or case.is_replicated or case.trial.calls_python)


def is_between_updates(model: keras.Model) -> bool:
    """Whether replicas or workers hold sums or weights of their own until the next update.

    Args:
        model: The model.
    """
    sums = [each for each in model_contents.optimizers_of(model) if marks.HAS_LOCAL_SUMS.get(each)]
    return bool(local_steps.num_pending(model)) or any(map(keras_compat.is_accumulating, sums))


def spot_check(model: keras.Model, kind: str, drawn, number: int, workers: Workers) -> None:
    """Compares a verified step with one device once more, during training; a collective.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        drawn: A batch that the step had, or None if this worker has kept none.
        number: How many steps ago the step was verified.
        workers: Collective functions of the workers.

    Raises:
        ValueError: If the result on several replicas differs from that of one device, and the
            step cannot be replicated.
    """
    strategy, case = model.distribute_strategy, marks.CHECKED.get(model)[kind]
    rows = None
    if drawn is not None:
        batch = keras_compat.gather_local(strategy, drawn)
        rows = rows_lib.Rows(batch) if parts_of(batch) else None
    if not workers.agree(strategy, rows is not None and case.takes(rows)):
        return
    begin = time.perf_counter()
    # A worker that got no row of this batch takes those of the first worker, as all do.
    rows.counts = [max(count, 1) for count in rows.counts]
    case.rows, case.num_later, case.is_read_meanwhile = rows, number, True
    # A step that needs all rows of its batch takes them from those that are chosen here.
    takes_whole_batch, case.takes_whole_batch = case.takes_whole_batch, False
    try:
        _choose_rows(case, drawn, workers, early=True)
        case.takes_whole_batch = takes_whole_batch
        with restored(Numbers(model)), quiet_tensorflow():
            differs, found = look_again(case, workers)
    except Exception as error:
        if topology.num_workers(strategy) > 1:
            # Others may wait for what this worker does next.
            raise
        marks.CHECKED.set(model, {**marks.CHECKED.get(model), kind: None})
        reason = messages.shorten(error)
        warnings.warn(f"`{kind}_step` is not compared any more: {reason}.", stacklevel=3)
        return
    with restored(Numbers(model)), quiet_tensorflow():
        whole, error = None, None
        if differs:
            whole, error = _replicate(case, found, workers, early=False)
    strategy.seconds_verified += time.perf_counter() - begin
    if whole is not None:
        # Its function, made next, is for what was verified here.
        verified.expect_function(model, kind)
        _warn_of_findings(case, found, whole)
    if error is not None:
        raise error


def _warn_of_findings(case, found, whole):
    if whole is not None:
        warnings.warn(messages.describe_replicated(case, found.error, found.reason), stacklevel=3)
    for text in (whole or found).warnings:
        warnings.warn(text, stacklevel=3)


def build_by_step(model: keras.Model, kind: str, batch, workers: Workers) -> bool:
    """Builds a model by tracing its step, in cases that Keras's own build could miss.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        batch: A batch, as the replicas receive it.
        workers: Collective functions of the workers.

    Returns:
        Whether it built the model.
    """
    batch = keras_compat.gather_local(model.distribute_strategy, batch)
    dense = all(isinstance(p, tf.Tensor) for p in tf.nest.flatten(batch) if p is not None)
    own = keras_compat.has_custom_step(model, kind)
    if parts_of(batch) is None or (dense and not own):
        return False
    case = Case(model, kind, rows_lib.Rows(batch))
    # What a step never calls stays unbuilt, and would be looked for in each pass.
    if _what_is_built(case) in verified.notes(model, kind).get("built", ()):
        return True
    error = _build(case, workers)
    # A step that runs eagerly need not be traceable.
    if error is not None and not case.eager:
        raise error
    if error is None:
        verified.notes(model, kind).setdefault("built", set()).add(_what_is_built(case))
    return error is None


def _what_is_built(case) -> tuple:
    return case.rows.form(), keras_compat.unbuilt_layers(case.model)


def _build(case, workers) -> Exception | None:
    """Builds a model in its step, which some replicas can run with the whole batch only.

    Returns:
        None, or the error of a step that no replica can run.
    """
    first, strategy = None, case.strategy
    replicates = (False, True) if _replicates(strategy) else (False,)
    with restored(Numbers(case.model)):
        for whole, number in itertools.product(replicates, ("any", "few", "all")):
            case.is_traced_static, error = number != "any", None
            if whole:
                replicated.replicate(case.model, case.kind)
            rows = case.rows.parts if number == "all" else case.rows.first(case.most_rows())
            try:
                Distributed(case, rows, only_build=True)
            except Exception as caught:
                error = caught
                first = first or caught
            if whole:
                replicated.distribute_again(case.model, case.kind)
            if workers.agree(strategy, error is None):
                return None
            workers.align(strategy)
    return first or RuntimeError(messages.describe_failure(case, ""))


def _replicate(case, found, workers, early) -> tuple[Verdict | None, ValueError | None]:
    """Makes every replica compute a step from all rows, if it differs or cannot run in parts.

    Args:
        case: The step.
        found: What this worker has found of the step in parts.
        workers: Collective functions of the workers.
        early: Whether the step will get other data later.

    Returns:
        The verdict on the step that all replicas now compute from all rows, or None; and the error
        of a step that they cannot compute, or None.
    """
    strategy, wanted = case.strategy, _replicates(case.strategy)
    # Only these may come from the division of the rows.
    may = hasattr(found.error, "finding") or not found.runs
    why = replicated.why_not_replicated(case.model) if wanted and may else ""
    may = may and wanted and not why
    cannot = found.error is not None and not may
    if workers.any(strategy, may) and not workers.any(strategy, cannot):
        replicated.replicate(case.model, case.kind)
        whole = find_out(case, workers)
        if not workers.any(strategy, bool(whole.error or whole.reason)):
            return whole, None
        replicated.distribute_again(case.model, case.kind)
        why = messages.why_not_exact(whole.error, whole.reason)
    if workers.any(strategy, found.error is not None):
        error = found.error or ValueError(messages.elsewhere(case.kind))
        # A worker that ended now could close a connection on which another one still receives.
        workers.all_fail(strategy)
        return None, messages.with_reason(error, why)
    runs = workers.agree(strategy, found.runs)
    could = found.reason == ELSEWHERE
    if not runs and not early and workers.any(strategy, could):
        # A worker that fails would leave the others waiting in the first step.
        return None, ValueError(messages.describe_failure(case, "" if could else found.reason))
    if not (runs or wanted or early):
        return None, messages.describe_cannot_run(case, found.reason)
    return None, None


def _replicates(strategy) -> bool:
    return strategy.on_difference == REPLICATE


def _choose_rows(case, drawn, workers, early):
    """Chooses a few rows, and many, the same on all workers."""
    rows, strategy = case.rows, case.strategy
    several = topology.num_workers(strategy) > 1
    is_cut = any(isinstance(p, tf.distribute.DistributedValues) for p in tf.nest.flatten(drawn))
    if several and is_cut and not case.counted:
        rows.counts = [_count_of_all(strategy, count, workers) for count in rows.counts]
    few = case.most_rows()
    rows.many = rows.choose_many(max(few), _most_at_once(case), padded=case.padded)
    rows.keep_all()
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
    least, most = workers.min_and_max(strategy, count)
    whole = most * topology.num_workers(strategy)
    return whole if least == most else whole - 1


def _is_wanted(strategy, model, kind, feed, workers) -> bool:
    supported = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    several = strategy.num_replicas_in_sync > 1 and isinstance(strategy, supported)
    in_parts = several or num_micro_batches(model) > 1
    if not in_parts or strategy.verify == "never":
        return False
    if feed.padded or may_be_verified(model, kind, in_loop=feed.alone):
        return True
    # A replica has one weight, its share of the rows of the first part.
    unequal = strategy.verify == "auto" and feed.has_unequal_parts(strategy)
    # Each worker has seen its own rows of what Python code makes.
    asks = several and feed.may_be_unequal and feed.batches is None
    return workers.any(strategy, unequal) if asks else unequal


def _warn(kind, reason):
    reason = reason.removesuffix(".")
    warnings.warn(f"`{kind}_step` was not verified: {reason}.", stacklevel=3)
