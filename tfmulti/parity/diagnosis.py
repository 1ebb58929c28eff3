"""Looks for the cause of a difference: by verification, and among the causes that this ignores."""

from __future__ import annotations

import dataclasses
import warnings

import keras
import tensorflow as tf

from tfmulti import keras_compat, strategies
from tfmulti.parity.config import ParityConfig
from tfmulti.parity.training import Case, create_compiled_model, create_data, load_case, rounding_of
from tfmulti.verification import causes
from tfmulti.verification.custom_parts import local_normalization
from tfmulti.verification.origin import watched_layers

_FLOAT32 = 2**-23


def diagnose(config: ParityConfig, strategy: tf.distribute.Strategy) -> list[dict]:
    """Returns the likely causes, in the order of a report.

    Args:
        config: The comparison.
        strategy: As many replicas as the configuration that differs has; it verifies always.

    Returns:
        The fields of a `causes.Finding` each; none where nothing was found.
    """
    case = load_case(config)
    model, found, reason = _verify(case, strategy)
    layers = local_normalization(model)
    if layers:
        names = [layer.path or layer.name for layer in layers]
        found.append(causes.find(causes.STATISTICS, *names, advice=causes.SYNCHRONIZED))
    random = _random_parts(case)
    if random:
        found.append(causes.find(causes.RANDOMNESS, *random))
    if not found and rounding_of(model) > _FLOAT32:
        dtypes = sorted({layer.compute_dtype for layer in keras_compat.all_layers(model)})
        found.append(causes.find(causes.COARSE, *dtypes))
    if not found and reason:
        found.append(causes.find(causes.UNKNOWN, reason))
    return [dataclasses.asdict(finding) for finding in causes.in_order(found)]


def _verify(case: Case, strategy) -> tuple[keras.Model, list[causes.Finding], str]:
    """Verifies the model's first step.

    Returns:
        The model, the finding, if there is one, and why the step could not be verified, or "".
    """
    train = create_data(case, strategy)
    model = create_compiled_model(case, strategy, train)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model.fit(train, epochs=1, steps_per_epoch=1, shuffle=False, verbose=0)
        except ValueError as error:
            if not hasattr(error, "finding"):
                raise
            return model, [error.finding], ""
    reasons = [str(each.message) for each in told if "was not verified" in str(each.message)]
    return model, [], "; ".join(reasons)


def _random_parts(case: Case) -> list[str]:
    """Returns the layers that draw random numbers in a step, and the step where it does itself.

    Verification keeps these numbers fixed.
    """
    strategy = strategies.create_strategy("one_device", devices=["CPU:0"])
    train = create_data(case, strategy)
    model = create_compiled_model(case, strategy, train)
    batch, names, claimed = next(iter(train)), {}, 0
    rows = len(tf.nest.flatten(batch)[0])

    def on_call(layer, call, args, kwargs):
        nonlocal claimed
        before = _number(draws), claimed
        outputs = call(*args, **kwargs)
        drawn = _number(draws) - before[0] - (claimed - before[1])
        claimed += drawn
        if drawn:
            names[layer.path or layer.name] = None
        return outputs

    tf.config.run_functions_eagerly(True)
    try:
        with keras_compat.fixed_random_numbers(lambda: (0, rows)) as draws:
            with watched_layers([model, *keras_compat.all_layers(model)], on_call):
                strategy.run(model.train_step, args=(batch,))
    finally:
        tf.config.run_functions_eagerly(False)
    if _number(draws) > claimed:
        names[f"the training step of {type(model).__name__}"] = None
    return list(names)


def _number(draws) -> int:
    return draws.number + len(draws.not_replaced)
