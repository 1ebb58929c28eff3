"""`predict_on_batch` on several replicas, which predict each given row once."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfmulti import marks
from tfmulti.step import wrapped_step


def predict(model: keras.Model, x):
    """Predicts a batch on this worker's replicas, each of which predicts a part of the rows.

    Keras would give every replica the whole batch, and concatenate all predictions. No other
    worker takes part, so each worker can predict different rows at any time.

    Args:
        model: The model.
        x: The inputs, with rows first: an array, a tensor, or a structure of them.

    Returns:
        The predictions for these rows, in their order, as NumPy arrays; ragged and sparse tensors
        stay tensors.
    """
    function, eager = marks.PREDICT.get(model)
    if function is None or eager != model.run_eagerly:
        function = _create_function(model)
        marks.PREDICT.set(model, (function, model.run_eagerly))
    x = tf.nest.map_structure(
        lambda part: tf.convert_to_tensor(part) if isinstance(part, np.ndarray) else part, x
    )
    outputs = function((x,))
    return tf.nest.map_structure(
        lambda part: part.numpy() if isinstance(part, tf.Tensor) else part,
        outputs,
        expand_composites=False,
    )


def _create_function(model):
    strategy = model.distribute_strategy
    fn = wrapped_step.wrap_step(model.predict_step, "predict", model, padded=False)
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
