"""Messages of verification: an error or a warning, with its likely cause and advice."""

from __future__ import annotations

import re

import numpy as np

from tfmulti import marks
from tfmulti.verification import causes, custom_parts, explanation
from tfmulti.verification.case import TRAIN, Case
from tfmulti.verification.differences import Difference
from tfmulti.verification.explanation import MOST_NAMED


def describe(
    case: Case,
    found: list[Difference],
    clues: explanation.Clues,
    view: str,
    counts: list[list[int]],
) -> ValueError:
    """Returns the error for the differences of a `Trial`; its attribute `finding` is the cause.

    Args:
        case: The verified step.
        found: The differences; not empty.
        clues: What else is known of them.
        view: The synthetic rows or state, in words; empty if there were none.
        counts: For each step, the number of rows of each part.
    """
    finding = explanation.explain(case, found, clues)
    number, parts = case.num_replicas, case.num_micro_batches
    how, advice = f"on {number} replicas", finding.advice
    stages = custom_parts.advice_for_stages(case.model)
    if stages:
        in_stages = (
            "In a pipeline a layer sees one micro-batch at a time, and cannot gather rows: "
            f"{stages}, or combine rows in the loss or in `train_step`."
        )
        # On workers what is not a layer may differ too.
        advice = in_stages if parts > 1 else f"{advice} {in_stages}"
    if parts > 1:
        how = f"in {parts} micro-batches"
    first = found[0]
    names = list(dict.fromkeys(each.what for each in found[1:] if each.what != first.what))
    more = ", ".join(names[:MOST_NAMED])
    values = f", with {view}" if view else ""
    more += f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return _error(
        f"`{case.method}` must give one device's result {how}; {_so_far(case)}.",
        f"{_say(first, case, counts)}{values}{f'; also {more}' if more else ''}",
        finding,
        f"{advice} {_advise_few(first, case)}",
    )


def _so_far(case) -> str:
    """Says what has been done before the step that was verified."""
    if case.num_later:
        return f"this held on the first rows, but not {case.num_later} steps later"
    if case.kind == TRAIN and marks.FEED.get(case.model) is not None:
        return "it was exact before it was changed"
    return f"nothing has been {'trained' if case.kind == TRAIN else 'computed'} yet"


def _error(rule, received, finding, advice) -> ValueError:
    error = ValueError(
        f"{rule} Received: {received}. Likely cause: {finding.cause}, in {finding.where}. "
        f'{advice.strip()} Set `verify="never"` in create_strategy to skip this check.'
    )
    error.finding, error.received, error.advice = finding, received, advice.strip()
    return error


def describe_replicated(case: Case, error: ValueError | None, reason: str) -> str:
    """Returns the warning for a step that every replica computes from the whole batch.

    Args:
        case: The verified step.
        error: The error that this worker would have raised; None if only others found one.
        reason: Why it could not run in parts, or "".
    """
    number = case.num_replicas
    head, later = "Every replica computes", ""
    if case.num_later:
        head = "From now on every replica computes"
        again = "train" if case.kind == TRAIN else "evaluate"
        later = (
            f" The difference showed {case.num_later} steps after verification, with rows of a "
            f"later batch. Earlier steps may have differed too: change it, then {again} again."
        )
    rule = (
        f"{head} `{case.method}` from the whole global batch, because in "
        f"{number} parts it {'cannot run' if reason else 'differs from one device'}. The result is "
        f"that of one device; so are the time and the memory that a step takes.{later}"
    )
    stop = 'Set `on_difference="error"` in create_strategy to stop instead.'
    if error is None and reason:
        return (
            f"{rule} Received, in parts: {reason}. To be faster: let the step run "
            f"on a part of the batch, of any number of rows. {stop}"
        )
    if error is None:
        return f"{rule} Received, in parts: a difference on another worker. {stop}"
    finding = error.finding
    return (
        f"{rule} Received, in parts: {error.received}. Likely cause: {finding.cause}, in "
        f"{finding.where}. To be faster: {error.advice} {stop}"
    )


def why_not_exact(error: ValueError | None, reason: str) -> str:
    """Returns why a step is not exact where every replica computes the whole batch.

    Args:
        error: What this worker has found there, or None.
        reason: Why it could not be verified there, or "".
    """
    received = getattr(error, "received", "")
    if error is not None and not received:
        return str(error)
    return f"it differs there too ({received})" if received else reason or "it differs there too"


def with_reason(error: ValueError, why: str) -> ValueError:
    """Returns an error that also says why no replica can compute the whole batch instead.

    Args:
        error: The error.
        why: The reason, or "".
    """
    if not why:
        return error
    told = ValueError(
        f"{error} Computing the whole batch on every replica does not help: "
        f"{why.removesuffix('.')}."
    )
    told.__dict__.update(error.__dict__)
    return told


def describe_cannot_run(case: Case, reason: str) -> ValueError:
    """Returns the error for a step that no part of a batch can run, nor parts of the first batch.

    Args:
        case: The step.
        reason: Its own error, in words.
    """
    shared = f"{case.num_replicas} replicas share each batch"
    other = 'leave out on_difference="error": every replica then computes the whole batch.'
    if case.num_micro_batches > 1:
        shared = f"its stages compute {case.num_micro_batches} micro-batches"
        other = "use tfmulti.pipeline(..., micro_batches=1)."
    return ValueError(
        f"`{case.method}` must run on a part of a batch, since {shared}. "
        f"Received: {reason}. Let it run on any number of rows, or {other}"
    )


def describe_drift(case: Case, name: str) -> ValueError:
    """Returns the error for replicas that end a step, or have ended one, with other weights.

    Args:
        case: The verified step.
        name: A variable that differs, or "" where it does between workers.
    """
    parts = custom_parts.find_custom_parts(case.model, case.kind)
    steps = [part for part in parts if part.kind in (custom_parts.STEP, custom_parts.OPTIMIZER)]
    cause, when = causes.DRIFT, " after the first step"
    if case.num_later:
        cause, when = causes.REPLICAS, ""
    finding = causes.find(cause, explanation.name_parts(steps or parts))
    return _error(
        f"All {case.num_replicas} replicas must hold the same weights; {_so_far(case)}.",
        f"{name or 'a weight'}, which differs between replicas{when}",
        finding,
        finding.advice,
    )


def describe_outside(case: Case, names: list[str]) -> ValueError:
    """Returns the error for variables outside the scope that a step changes.

    Args:
        case: The verified step.
        names: Their names.
    """
    number, method = case.num_replicas, case.method
    many = "s" if len(names) > 1 else ""
    return ValueError(
        f"Variables that `{method}` changes must be created in the strategy's scope. "
        f"Received: the variable{many} {', '.join(names[:MOST_NAMED])}, created outside it, "
        f"which {number} replicas would each change. "
        "Create the objects that hold them within `with strategy.scope():`."
    )


def describe_shared(case: Case, places: list[str]) -> ValueError:
    """Returns the error for a table, a queue or an iterator that a step changes.

    Args:
        case: The verified step.
        places: The operations with file and line; not empty.
    """
    number, method = case.num_replicas, case.method
    return ValueError(
        f"What `{method}` changes must be variables, of which {number} replicas have copies; a "
        "table, a queue or an iterator exists once, and each replica would change it. Received: "
        f"{', '.join(places[:MOST_NAMED])}. Keep the numbers in a variable, "
        "self.add_weight(..., trainable=False), updated from tfmulti.gather_batch(rows); give rows "
        "of a second dataset to fit together with the first, as tf.data.Dataset.zip((one, other))."
    )


def describe_attributes(case: Case, names: list[str]) -> ValueError:
    """Returns the error for Python numbers that a step changes which runs eagerly.

    Args:
        case: The verified step.
        names: Their names, as paths from the model.
    """
    method, many = case.method, "s" if len(names) > 1 else ""
    return ValueError(
        f"A Python attribute that `{method}` changes in each step would be changed once by each "
        f"replica: all of them run in this process. Received: the attribute{many} "
        f"{', '.join(names[:MOST_NAMED])} of {type(case.model).__name__}, with "
        f"run_eagerly=True. Keep the number in a variable, self.add_weight(..., trainable=False), "
        "or count with self.optimizer.iterations."
    )


def _say(first, case, counts) -> str:
    where = f" at {list(first.row)}" if first.row else ""
    rows = " + ".join(str(count) for count in dict.fromkeys(counts[first.step - 1]))
    step = "the first step" if first.step == 1 else f"step {first.step}"
    step = "one step" if case.num_later else step
    one, many = _number(first.one_device), _number(first.on_replicas)
    few = _say_few(first, case)
    return (
        f"{first.what}{where}: {one} on one device, {many} here, after {step}, of {rows} rows{few}"
    )


def _say_few(first, case) -> str:
    number = case.num_replicas
    is_small = first.step > 1 and max(case.sizes()[first.step - 1]) < number
    return ", in a batch with fewer rows than replicas" if is_small else ""


def _advise_few(first, case) -> str:
    if not _say_few(first, case) or case.num_micro_batches > 1:
        return ""
    if case.batches is not None:
        return "A batch of your data leaves a replica without rows; larger ones are exact. "
    return (
        "A larger batch showed no difference. If every replica gets a row of every batch, use "
        "arrays, drop_remainder=True, or a dataset that ends with `batch`: their numbers of rows "
        "are known. "
    )


def _number(value) -> str:
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    return f"{array:.7g}" if array.ndim == 0 and array.dtype.kind in "fiub" else str(value)


def elsewhere(kind: str) -> str:
    """Returns the text of the error for the case that only another worker found a difference."""
    return (
        f"`{kind}_step` must give one device's result on all replicas. "
        "Received: a different result on another worker; the error of that worker has the details. "
        "Look for code that depends on the worker."
    )


def describe_failure(case: Case, reason: str) -> str:
    """Returns the text of the error for a step that fails on some workers while others wait in it.

    Args:
        case: The verified step.
        reason: Why it failed here; empty where it failed on another worker.
    """
    here = f"an error on this worker, with a few rows of the first batch: {reason}"
    there = "an error on another worker alone, which has the details"
    return (
        f"`{case.method}` must run on all workers or on none: the others wait in it. "
        f"Received: {here if reason else there}. Repair that error; if only the few rows cause it, "
        'set `verify="never"` in create_strategy to skip this check.'
    )


_ARGUMENTS = "Arguments received by"
_MARKS = re.compile(r"\x1b\[[0-9;]*m|\{\{function_node .*?\}\}")


def shorten(error: Exception) -> str:
    r"""Returns the type of an error and its own words, and the method that Keras says it came from.

    TensorFlow's stack of the graph and Keras's list of arguments are left out.

    >>> shorten(ValueError("in user code: ...\n\n    ValueError: None values not supported."))
    'ValueError: None values not supported'
    """
    text = re.split(r" for '\{\{node|\[\[\{\{node", _MARKS.sub("", str(error)))[0]
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    came = re.match(r"Exception encountered when calling (.*)\.$", paragraphs[0])
    own = [each for each in paragraphs if each and not each.startswith(_ARGUMENTS)]
    where = f" in {came[1]}" if came and len(own) > 1 else ""
    # Keras repeats the type in an error of a traced step.
    words = (own or [""])[-1].removeprefix(f"{type(error).__name__}: ")
    return f"{type(error).__name__}{where}: {words[:600].removesuffix('.')}"
