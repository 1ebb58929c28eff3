"""`predict_on_batch` on several replicas, which predict each given row once.

Keras's own parts predict a row from that row alone, so replicas divide the rows. Other parts might
combine rows, and a comparison with one device would need all workers: one replica then predicts
all of the rows.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks, verification
from tfmulti.step import wrapped_step
from tfmulti.strategies import program_order
from tfmulti.verification.case import PREDICT


def predict(original, model: keras.Model, x):
    """Predicts a batch on this worker's replicas.

    Each of them predicts a part of the rows, or the first one all of them, where a model has parts
    that are not Keras's own, unless the strategy has `verify="never"`. Keras would give every
    replica the whole batch, and concatenate all predictions. No other worker takes part, so each
    worker can predict different rows at any time, unless workers hold weights for one another, or
    the first call creates some: then every worker must make the call, each with rows of its own.

    Args:
        original: Keras's own method, which one replica has.
        model: The model.
        x: The inputs, with rows first: an array, a tensor, or a structure of them.

    Returns:
        The predictions for these rows, in their order, as NumPy arrays; ragged and sparse tensors
        stay tensors.

    Raises:
        ValueError: If only some workers make a call that all must make, and on several replicas
            for a class with a `make_predict_function` of its own.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return original(model, x)
    if keras_compat.has_own_function(model, "predict"):
        raise ValueError(
            "On several replicas `predict_on_batch` predicts by the model's `predict_step`. "
            f"Received: {type(model).__name__} with a `make_predict_function` of its own. Call "
            "predict, or override predict_step in its place."
        )
    if _needs_all_workers(model):
        program_order.compare_call(strategy, "predict_on_batch", {}, waits=True)
    function, made_for = marks.PREDICT.get(model)
    # Keras forgets its own function wherever the model has changed.
    model.make_predict_function()
    by_one_device = _is_by_one_device(model)
    how = model.run_eagerly, by_one_device, model.predict_function
    if function is None or made_for != how:
        function = _create_function(model, by_one_device)
        marks.PREDICT.set(model, (function, how))
    x = tf.nest.map_structure(
        lambda part: tf.convert_to_tensor(part) if isinstance(part, np.ndarray) else part, x
    )
    with _as_one_device(strategy) if by_one_device else contextlib.nullcontext():
        outputs = function((x,))
    return tf.nest.map_structure(
        lambda part: part.numpy() if isinstance(part, tf.Tensor) else part,
        outputs,
        expand_composites=False,
    )


def _needs_all_workers(model) -> bool:
    """Whether a prediction on one worker uses what others hold, or creates variables."""
    weights = model.weights
    creates = not (weights or model.built)
    return creates or any(isinstance(each, keras_compat.HeldVariable) for each in weights)


def _is_by_one_device(model) -> bool:
    in_stages = marks.MICRO_BATCHES_ON_DEVICES.get(model) > 1
    return not in_stages and verification.may_be_verified(model, PREDICT, in_loop=True)


@contextlib.contextmanager
def _as_one_device(strategy):
    with keras_compat.as_one_device(strategy), keras_compat.on_first_replica(strategy):
        yield


def _create_function(model, by_one_device):
    strategy, fn = model.distribute_strategy, model.predict_step
    if not by_one_device:
        fn = wrapped_step.wrap_step(fn, "predict", model)
        fn = wrapped_step.divide_whole_batch(fn)

    def predict_rows(data):
        outputs = strategy.run(fn, args=(data,))
        return tf.nest.map_structure(
            lambda part: _join(strategy.experimental_local_results(part)),
            outputs,
            expand_composites=False,
        )

    return predict_rows if model.run_eagerly else tf.function(predict_rows, reduce_retracing=True)


def _join(parts):
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, axis=0) if parts[0].shape.rank else tf.stack(parts)
