"""Finds losses that sum over a batch, before several replicas train with them.

A replica knows the mean over its rows and averages it with the others'. What a function of the
user's own does with rows cannot be seen from one batch; the batch and its double tell: a mean
stays, a sum doubles.
"""

from __future__ import annotations

import types

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, losses, slices

_TOLERANCE = 1e-3
_ADDED = "`add_loss` (or an `activity_regularizer`, which before Keras 3.14 is a sum)"


def probe_once_built(strategy, model: keras.Model, batch) -> None:
    """Looks at a model that several replicas are going to train: `refuse_sums`, positions."""
    if strategy.num_replicas_in_sync > 1 and model.optimizer is not None:
        refuse_sums(model, batch)
        if model.run_eagerly or tf.config.functions_run_eagerly():
            slices.note_positions(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def refuse_sums(model: keras.Model, batch) -> None:
    """Raises for a loss or an `add_loss` of the user's own that sums over rows.

    Args:
        model: A model that is built.
        batch: Some rows as `fit` has them: `x`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        ValueError: Where a term doubles with the batch.
    """
    if getattr(model, "tfmulti_probed", False) or not _has_own_terms(model):
        return
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    rows = [part for part in tf.nest.flatten((x, y)) if part is not None]
    if not rows or not all(isinstance(part, tf.Tensor) and part.shape[0] for part in rows):
        return
    object.__setattr__(model, "tfmulti_probed", True)
    try:
        once, twice = _terms(model, x, y), _terms(model, _double(x), _double(y))
    except Exception as error:
        logging.info("Whether losses sum over rows could not be found out: %s", error)
        return
    for (name, one), (_, two) in zip(once, twice):
        if _is_close(two, 2 * one) and not _is_close(two, one):
            raise ValueError(
                f"{name} must be a mean over the rows of a batch, so that replicas can be "
                f"averaged. Received: {one:.6g} for a batch, {two:.6g} for the same batch twice: "
                "a sum. Use tf.reduce_mean over rows, or a keras.losses.Loss that returns one "
                'value for each row, with reduction="sum".'
            )


def _has_own_terms(model) -> bool:
    fns = [getattr(loss, "fn", loss) for loss in keras_compat.compiled_losses(model)]
    if any(_is_own(fn if hasattr(fn, "__name__") else type(fn)) for fn in fns):
        return True
    layers = [model, *keras_compat.all_layers(model)]
    if any(getattr(layer, "activity_regularizer", None) is not None for layer in layers):
        return True
    return any(_adds_losses(kind) for layer in layers for kind in type(layer).__mro__)


def _is_own(thing) -> bool:
    return not str(thing.__module__).startswith("keras.")


def _adds_losses(kind) -> bool:
    methods = [m for m in vars(kind).values() if isinstance(m, types.FunctionType)]
    return _is_own(kind) and any("add_loss" in method.__code__.co_names for method in methods)


def _terms(model, x, y) -> list[tuple[str, float]]:
    """Values of `add_loss` and of losses that give one number, with their names."""
    states = [
        [keras.ops.convert_to_tensor(variable) for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    ]
    prediction, _, added = model.stateless_call(*states, x, training=True, return_losses=True)
    terms = [(_ADDED, float(loss)) for loss in added if loss.shape.rank == 0]
    if y is None or not keras_compat.compiled_losses(model):
        return terms
    with losses.noting_single_numbers() as numbers:
        model.compute_loss(x=x, y=y, y_pred=prediction, training=True)
    return [*terms, *(("A loss that returns one number", float(n)) for n in numbers)]


def _double(data):
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.concat([part, part], axis=0), data
    )


def _is_close(one, other) -> bool:
    return bool(np.isclose(one, other, rtol=_TOLERANCE, atol=0))
