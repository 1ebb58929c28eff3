"""Finds the likely cause of differences that verification has found."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfmulti.step import gradients
from tfmulti.verification import causes, custom_parts
from tfmulti.verification.case import PREDICT, Case
from tfmulti.verification.differences import Difference
from tfmulti.verification.origin import Origin
from tfmulti.verification.state import OPTIMIZER, OWN, TRAINABLE, WEIGHT

MOST_NAMED = 3
# A sum plus a penalty less than doubles when every row is repeated.
_DOUBLES = 1.8
# A loss that compares rows can grow by any factor.
_MORE_THAN_DOUBLES = 2.2
_SAME = 1e-4


@dataclasses.dataclass
class Clues:
    """What is known of the differences of a step.

    Attributes:
        growth: The factor by which each output grows if every row is repeated: 1 for a mean, 2 for
            a sum.
        origin: Where the first difference begins; None if unknown.
        repeated_noise: Where the step draws numbers for rows that are the same on each replica.
        containers: Names of Python lists and others that the step changes, if it runs eagerly.
    """

    growth: dict[str, float] = dataclasses.field(default_factory=dict)
    origin: Origin | None = None
    repeated_noise: list[str] = dataclasses.field(default_factory=list)
    containers: list[str] = dataclasses.field(default_factory=list)


def explain(case: Case, found: list[Difference], clues: Clues) -> causes.Finding:
    """Returns the likely cause of differences, and where it is.

    Args:
        case: The verified step.
        found: The differences; not empty.
        clues: What else is known of them.
    """
    origin = clues.origin
    parts = custom_parts.find_custom_parts(case.model, case.kind)
    steps = [part for part in parts if part.kind == custom_parts.STEP]
    first, changed = found[0], _changes_weights(found, found[0].step)
    has_unequal_parts = case.rows.are_unequal and not case.shares_alike(
        case.sizes()[first.step - 1]
    )
    if case.kind == PREDICT and has_unequal_parts:
        return causes.find(causes.UNEQUAL, name_parts(steps or parts))
    if case.kind == PREDICT:
        begins = _parts_of(parts, origin) if origin and origin.layer else []
        layers = [part for part in parts if part.kind == custom_parts.LAYER and not origin]
        return causes.find(causes.PREDICTION, name_parts(begins or [*steps, *layers]))
    if _is_of_metric(case.model, first) and not changed:
        metrics = [part for part in parts if part.kind == custom_parts.METRIC]
        of_list = causes.METRIC_OF_LIST if clues.containers else causes.METRIC
        cause = of_list if metrics else causes.METRIC_OF_NUMBERS
        return causes.find(cause, name_parts(metrics or steps))
    state = [each for each in found if _is_of(each, WEIGHT, OWN) and each.step == first.step]
    holders = [part for each in state for part in _holders(parts, each)]
    if steps:
        holders = [part for part in holders if part.thing is not case.model]
    is_log = first.what != "loss" and not _is_of(first, TRAINABLE, OPTIMIZER) and not changed
    begins = origin and origin.layer in [p.thing for p in holders]
    # A log, or a loss, that is computed from such a state differs with it.
    if state and (first in state or is_log or begins or any(map(_is_count, state))):
        return causes.find(causes.STATE, name_parts(holders or steps or parts))
    if has_unequal_parts:
        return causes.find(causes.UNEQUAL, name_parts(steps or parts))
    if is_log:
        logging = [part for part in parts if part.kind == custom_parts.METRIC]
        return causes.find(causes.LOG, name_parts(steps or logging or parts))
    if origin and origin.layer:
        return _explain_origin(origin, name_parts(_parts_of(parts, origin)))
    return _explain_loss(
        case, found, clues, [p for p in parts if not origin or p.kind != custom_parts.LAYER]
    )


def _explain_origin(origin: Origin, name: str) -> causes.Finding:
    if origin.changes_number:
        return causes.find(causes.PYTHON_STATE, name)
    if not origin.adds:
        return causes.find(causes.STATISTICS, name)
    if origin.layer.activity_regularizer is not None:
        return causes.find(causes.BATCH_ADD_LOSS, name, advice=causes.SUM_OVER_ROWS)
    return causes.find(causes.SUM_ADD_LOSS if origin.sums else causes.BATCH_ADD_LOSS, name)


def _is_count(difference) -> bool:
    """Whether a variable counts, as the rows that were seen."""
    return isinstance(difference.one_device, (int, np.integer))


def _explain_loss(case, found, clues, parts) -> causes.Finding:
    order = [custom_parts.STEP, custom_parts.LOSS, custom_parts.LAYER, custom_parts.OPTIMIZER]
    suspects = sorted((p for p in parts if p.kind in order), key=lambda p: order.index(p.kind))
    stepped = bool(suspects) and suspects[0].kind == custom_parts.STEP
    most = max((clues.growth.get(each.what, 1.0) for each in found), default=1.0)
    if _DOUBLES < most < _MORE_THAN_DOUBLES:
        cause = causes.SUM_STEP if stepped else causes.SUM_LOSS
    elif clues.repeated_noise:
        return causes.find(causes.REPEATED_NOISE, *clues.repeated_noise[:MOST_NAMED])
    elif _is_scaled(found[0], case.num_replicas):
        cause = causes.SCALED
    elif stepped and gradients.has_taken_of_inputs(case.model):
        cause = causes.INPUT_GRADIENT
    elif suspects and suspects[0].kind == custom_parts.LAYER:
        # The loss is Keras's own: what mixes rows comes before it.
        cause = causes.STATISTICS
    else:
        cause = causes.BATCH_STEP if stepped else causes.BATCH_LOSS
    return causes.find(cause, name_parts(suspects))


def _is_scaled(difference, number) -> bool:
    """Whether a number is that of one device, times or divided by the number of replicas."""
    one, many = np.asarray(difference.one_device), np.asarray(difference.on_replicas)
    if one.ndim or one.dtype.kind != "f" or not one or not many:
        return False
    return any(abs(many / one / factor - 1) < _SAME for factor in (number, 1 / number))


def _parts_of(parts, origin) -> list:
    """Returns the custom parts in the layer where a difference begins, or the layer's name."""
    layer = origin.layer
    found = [part for part in parts if part.kind == custom_parts.LAYER and part.thing is layer]
    return found or [f"{type(layer).__name__} {layer.name!r}"]


def _holders(parts, difference) -> list:
    path = difference.what.split(" ")[-1].split("/")[:-1]
    layers = [part for part in parts if part.kind == custom_parts.LAYER]
    inner = [part for part in layers if getattr(part.thing, "name", None) == "".join(path[-1:])]
    return inner or [part for part in layers if getattr(part.thing, "name", None) in path]


def name_parts(parts: list) -> str:
    """Returns the names of parts in words, each once."""
    named = list(dict.fromkeys(str(part) for part in parts))
    return " or ".join(named[:MOST_NAMED]) or "a part of Keras or of tfmulti"


def _is_of(difference, *kinds) -> bool:
    return difference.what.startswith(tuple(f"{kind} " for kind in kinds))


def _is_of_metric(model, difference) -> bool:
    name = difference.what.removeprefix("metric ")
    names = {m.name for each in model.metrics for m in getattr(each, "metrics", [each])}
    return difference.what.startswith("metric ") or name in names - {"loss"}


def _changes_weights(found, step) -> bool:
    return any(_is_of(each, TRAINABLE, OPTIMIZER) for each in found if each.step <= step)
