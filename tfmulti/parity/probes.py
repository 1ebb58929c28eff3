"""Experiments on one device that tell why shares of a batch do not make up the whole."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parity.calls import Call, Calls, is_of_rows
from tfmulti.parity.relations import MEAN, SUM, is_close, relate
from tfmulti.parity.steps import Bench, Step
from tfmulti.parity.training import rounding_of
from tfmulti.verification import causes
from tfmulti.verification.causes import Finding

_FLOAT32 = 2**-23


def probe_calls(bench: Bench) -> list[Finding]:
    """Looks at every layer and loss of a step by itself, on the whole batch and on shares.

    Returns:
        Findings on random numbers, batch statistics, losses and `add_loss`.
    """
    layers = [bench.model, *keras_compat.all_layers(bench.model)]
    losses = keras_compat.compiled_losses(bench.model) + keras_compat.own_losses(bench.model)
    found: dict[str, list[str]] = {}
    with Calls([*layers, *losses]).watched() as calls:
        bench.step()
        bench.restore()
        for call in calls.finished:
            cause = _judge(bench, calls, call)
            if cause:
                found.setdefault(cause, []).append(_name(call.thing))
    findings = [causes.find(cause, *dict.fromkeys(names)) for cause, names in found.items()]
    return [*findings, *_local_normalization(calls)]


def _judge(bench, calls, call: Call) -> str | None:
    """Returns the cause that a call's own code is, or None."""
    is_loss = isinstance(call.thing, keras.losses.Loss)
    if not is_loss and not any(is_of_rows(v, bench.num_rows) for v in tf.nest.flatten(call.args)):
        return None
    if isinstance(call.thing, keras.layers.BatchNormalization):
        return None
    try:
        whole = calls.play(call, bench.cut)
        parts = [
            calls.play(call, lambda values, part=part: bench.cut(values, part))
            for part in bench.parts
        ]
    except (ValueError, TypeError, tf.errors.InvalidArgumentError):
        # A layer that cannot be called by itself is no evidence.
        return None
    finally:
        bench.restore()
    if not all(is_close(_numbers(a), _numbers(b), bench.close) for a, b in _pairs(call, whole)):
        return causes.RANDOMNESS
    if is_loss and not is_of_rows(call.outputs, bench.num_rows):
        names = {SUM: causes.SUM_LOSS, MEAN: None}
        outputs = [part.outputs for part in parts]
        relation = relate(call.outputs, outputs, bench.weights, bench.close)
        return names.get(relation, causes.BATCH_LOSS)
    if not _rows_stand_alone(bench, call, parts):
        return causes.BATCH_LOSS if is_loss else causes.STATISTICS
    return _judge_added(bench, call, parts)


def _pairs(call: Call, again: Call):
    """Pairs what a call gave, and handed to the calls within it, with what it does again."""
    yield from zip(_tensors(call.outputs), _tensors(again.outputs))
    for inner in again.within:
        yield from zip(_tensors(inner.first.args), _tensors(inner.args))


def _rows_stand_alone(bench, call, parts) -> bool:
    """Whether what becomes of each row is the same whatever other rows there are."""
    for part, again in zip(bench.parts, parts):
        for value, other in _pairs(call, again):
            if is_of_rows(value, bench.num_rows):
                if not is_close(_numbers(other), _numbers(bench.cut(value, part)), bench.close):
                    return False
    return True


def _judge_added(bench, call, parts) -> str | None:
    for number, loss in enumerate(call.added):
        values = [part.added[number] for part in parts if number < len(part.added)]
        if len(values) < len(parts):
            return causes.BATCH_ADD_LOSS
        relation = relate(loss, values, bench.weights, bench.close)
        if relation != MEAN:
            return causes.SUM_ADD_LOSS if relation == SUM else causes.BATCH_ADD_LOSS
    return None


def _local_normalization(calls) -> list[Finding]:
    layers = [
        call.thing
        for call in calls.finished
        if isinstance(call.thing, keras.layers.BatchNormalization)
        and call.thing.trainable
        and not call.thing.synchronized
    ]
    names = dict.fromkeys(layer.path for layer in layers)
    return [causes.find_local_normalization(*names)] if names else []


def probe_steps(bench: Bench, pretending: Callable[[], Bench]) -> list[Finding]:
    """Looks at whole training steps: what they draw, scale, update by hand, and sum.

    Args:
        bench: The model on one device.
        pretending: Makes the same on one device that says it is two replicas.
    """
    whole, again = bench.step(), bench.step()
    own = type(bench.model).__name__
    if not _same_gradients(whole, again, bench.close):
        return [causes.find(causes.RANDOMNESS, f"the training step of {own}")]
    findings = []
    by_hand = [
        variable.path
        for variable in bench.model.trainable_variables
        if variable.path in whole.changed and variable.path not in whole.gradients
    ]
    if by_hand:
        findings.append(causes.find(causes.BARE, *by_hand[:3]))
    if not _same_gradients(whole, pretending().step(), bench.close):
        return [*findings, causes.find(causes.SCALED, own)]
    overridden = [
        f"{own}.{name}"
        for name in ("train_step", "compute_loss")
        if getattr(type(bench.model), name) is not getattr(keras.Model, name)
    ]
    if not overridden or keras_compat.synchronized_variables(bench.model):
        return findings
    relations = _relate_gradients(bench, whole)
    if relations - {MEAN}:
        cause = causes.SUM_STEP if relations <= {MEAN, SUM} else causes.BATCH_STEP
        findings.append(causes.find(cause, *overridden))
    return findings


def _same_gradients(one: Step, other: Step, close: float) -> bool:
    paths = one.gradients.keys() | other.gradients.keys()
    return all(
        path in one.gradients
        and path in other.gradients
        and is_close(one.gradients[path], other.gradients[path], close)
        for path in paths
    )


def _relate_gradients(bench, whole) -> set[str]:
    parts = [bench.step(part).gradients for part in bench.parts]
    found = set()
    for path, gradient in whole.gradients.items():
        values = [part[path] for part in parts if path in part]
        # Rounding alone is no relation.
        if np.abs(gradient).max(initial=0.0) > 1e-6 and len(values) == len(parts):
            found.add(relate(gradient, values, bench.weights, bench.close))
    return found


def probe_state(bench: Bench, differing: list[str]) -> list[Finding]:
    """Looks for variables without a gradient that are made from the rows of a share.

    Args:
        bench: The model on one device.
        differing: The variables that differ; others are not told.
    """
    known = keras_compat.synchronized_variables(bench.model)
    known |= {variable.path for variable in keras_compat.local_statistics(bench.model)}
    whole, part = bench.step().changed, bench.step(bench.parts[0]).changed
    names = [
        variable.path
        for variable in bench.model.non_trainable_variables
        if variable.path in whole
        and variable.path in differing
        and variable.path not in known
        and not is_close(whole[variable.path], part.get(variable.path, np.nan), bench.close)
    ]
    return [causes.find(causes.STATE, *names)] if names else []


def probe_rounding(bench: Bench) -> list[Finding]:
    """Tells of a model that computes with fewer digits than float32 has."""
    dtypes = sorted({layer.compute_dtype for layer in keras_compat.all_layers(bench.model)})
    coarse = rounding_of(bench.model) > _FLOAT32
    return [causes.find(causes.COARSE, *dtypes)] if coarse else []


def _tensors(structure):
    values = tf.nest.flatten(structure, expand_composites=True)
    return [value for value in values if isinstance(value, tf.Tensor)]


def _numbers(value) -> np.ndarray:
    array = value.numpy()
    return array if array.dtype.kind in "fiub" else array.astype(np.float64)


def _name(thing) -> str:
    return getattr(thing, "path", None) or getattr(thing, "name", type(thing).__name__)
