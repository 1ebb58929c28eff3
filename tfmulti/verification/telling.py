"""Says what differs from one device, why that can be, and what to write instead."""

from __future__ import annotations

import numpy as np

from tfmulti.verification import causes, own
from tfmulti.verification.differences import Difference
from tfmulti.verification.runs import TRAIN, Case
from tfmulti.verification.state import OPTIMIZER, OWN, TRAINABLE, WEIGHT

_MOST_NAMED = 3
# A sum beside a mean or a penalty grows, but does not quite double.
_GROWS, _DOUBLES = 1.01, 1.8
_METHODS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}
_METRIC_ADVICE = (
    "Keep sums in its variables, such as a total and a count, and compute the result of them in "
    "result(): the replicas' variables are added."
)
_PREDICT_ADVICE = "Compute each row's prediction from that row alone."
_NUMBER_ADVICE = "Return means over rows, or results of metrics."


def describe(case: Case, found: list[Difference], growth: dict, view: str = "") -> str:
    """Returns the text of the error for what `Trial.differences` has found.

    Args:
        case: What was verified.
        found: The differences; not empty.
        growth: By how much each output grows where every row is there twice.
        view: What was made up for the rows or the state; empty where nothing was.
    """
    number = case.strategy.num_replicas_in_sync
    first = found[0]
    sizes = case.sizes()
    names = list(dict.fromkeys(each.what for each in found[1:] if each.what != first.what))
    more = ", ".join(names[:_MOST_NAMED])
    made_up = f", with {view}" if view else ""
    more += f" and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else ""
    cause, advice = _cause(case, found, growth)
    return (
        f"`{_METHODS[case.kind]}` must give one device's result on {number} replicas; nothing has "
        f"been {'trained' if case.kind == TRAIN else 'computed'} yet. "
        f"Received: {_say(first, sizes)}{made_up}{f'; also {more}' if more else ''}. "
        f"Likely cause: {cause}. {advice} "
        '`verify="never"` of create_strategy leaves this check out.'
    )


def describe_outside(case: Case, names: list[str]) -> str:
    """Returns the text of the error for variables that a step changes, and no replica owns.

    Args:
        case: What was verified.
        names: Their names.
    """
    number, method = case.strategy.num_replicas_in_sync, _METHODS[case.kind]
    many = "s" if len(names) > 1 else ""
    return (
        f"Variables that `{method}` changes must be created in the strategy's scope. "
        f"Received: the variable{many} {', '.join(names[:_MOST_NAMED])}, created outside of it, "
        f"which {number} replicas would each change. "
        "Create what holds them within `with strategy.scope():`."
    )


def _say(first, sizes) -> str:
    where = f" at {list(first.row)}" if first.row else ""
    rows = sizes[first.step - 1]
    step = "the first step" if first.step == 1 else f"step {first.step}"
    one, many = _number(first.one_device), _number(first.shares)
    return f"{first.what}{where}: {one} on one device, {many} here, after {step}, of {rows} rows"


def _number(value) -> str:
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    return f"{array:.7g}" if array.ndim == 0 and array.dtype.kind in "fiub" else str(value)


def _cause(case, found, growth) -> tuple[str, str]:
    """Returns the likely cause and what to write instead."""
    parts = own.own_parts(case.model, case.kind)
    first = found[0]
    if case.kind == "predict":
        return _name([p for p in parts if p.kind == own.LAYER]), _PREDICT_ADVICE
    if _is_of_metric(case.model, first) and not _changes_weights(found, first.step):
        metrics = [part for part in parts if part.kind == own.METRIC]
        return _name(metrics or [p for p in parts if p.kind == own.STEP]), _METRIC_ADVICE
    kinds = {each.what.split(" ")[0] for each in found if each.step == first.step}
    if _is_of(first, WEIGHT, OWN) and not kinds & {TRAINABLE.split(" ")[0], "optimizer's"}:
        return _of_state(parts, first), causes.ADVICE[causes.STATE]
    named = _is_of(first, TRAINABLE, OPTIMIZER, WEIGHT, OWN)
    if first.what != "loss" and not named and not _changes_weights(found, first.step):
        return _name([p for p in parts if p.kind in (own.STEP, own.METRIC)]), _NUMBER_ADVICE
    return _of_loss(parts, max((growth.get(each.what, 1.0) for each in found), default=1.0))


def _of_loss(parts, growth):
    stepped = any(part.kind == own.STEP for part in parts)
    order = [own.STEP, own.LOSS] if stepped else [own.LOSS]
    suspects = [p for kind in order for p in parts if p.kind == kind]
    layers = [p for p in parts if p.kind == own.LAYER]
    adding = [part for part in layers if _adds_losses(part.thing)]
    if adding and not suspects:
        cause = causes.SUM_ADD_LOSS if growth > _GROWS else causes.BATCH_ADD_LOSS
        return f"{cause}, in {_name(adding)}", causes.ADVICE[cause]
    if layers and not suspects:
        return f"{causes.STATISTICS}, in {_name(layers)}", causes.ADVICE[causes.STATISTICS]
    suspects += [part for part in parts if part.kind in (own.LAYER, own.OPTIMIZER)]
    if growth > _DOUBLES:
        cause = causes.SUM_STEP if stepped else causes.SUM_LOSS
    else:
        cause = causes.BATCH_STEP if stepped else causes.BATCH_LOSS
    return f"{cause}, in {_name(suspects)}", causes.ADVICE[cause]


def _of_state(parts, first) -> str:
    path = first.what.split(" ")[-1].split("/")
    layers = [p for p in parts if p.kind == own.LAYER and getattr(p.thing, "name", None) in path]
    return f"{causes.STATE}, in {_name(layers or parts)}"


def _name(parts) -> str:
    named = list(dict.fromkeys(str(part) for part in parts))
    return " or ".join(named[:_MOST_NAMED]) or "a part of Keras's own, or of ours"


def _adds_losses(thing) -> bool:
    code = [getattr(m, "__code__", None) for k in type(thing).__mro__ for m in vars(k).values()]
    regularized = getattr(thing, "activity_regularizer", None) is not None
    own_code = [c for c in code if c is not None and "keras/src" not in c.co_filename]
    return regularized or any("add_loss" in c.co_names for c in own_code)


def _is_of(difference, *kinds) -> bool:
    return difference.what.startswith(tuple(f"{kind} " for kind in kinds))


def _is_of_metric(model, difference) -> bool:
    name = difference.what.removeprefix("metric ")
    names = {m.name for each in model.metrics for m in getattr(each, "metrics", [each])}
    return difference.what.startswith("metric ") or name in names - {"loss"}


def _changes_weights(found, step) -> bool:
    return any(_is_of(each, TRAINABLE, OPTIMIZER) for each in found if each.step <= step)


def elsewhere(kind: str) -> str:
    """Returns the text of the error where another worker has found a difference."""
    return (
        f"`{_METHODS[kind]}` must give one device's result on all replicas. "
        "Received: another one on another worker, whose own error says more. "
        "Look for what depends on the worker."
    )
