"""Makes of a program what it describes: model, rows, and the call of `fit`."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from conformance.guarantee import TOLD, Guarantee
from conformance.guarantees import common, custom_losses, custom_metrics, row_state
from keras import layers, ops

from generated import steps

SGD = keras.optimizers.SGD


def guarantee(program) -> Guarantee:
    """Returns the program as a guarantee of the matrix: exact or told."""
    settings = {"fit": {"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}}}
    return Guarantee(
        f"program {program.seed}",
        functools.partial(create, program),
        data=functools.partial(load, program),
        num_rows=program.num_rows,
        batch_size=program.batch_size,
        feed=program.feed.split(",")[0],
        remainder="pad" if program.feed.endswith("padded") else "uneven",
        validate=program.validate,
        must=TOLD,
        **(settings if program.weights == "class" else {}),
    )


def load(program, num_rows):
    """Returns `(x, y)` or `(x, y, weights)`."""
    x = common.tokens(num_rows)[0] if program.tokens else common.features(num_rows)
    y = common.labels(num_rows)
    if program.target == "numbers":
        y = common.numbers(num_rows)[1]
    return (x, y, common.weights(num_rows)) if program.weights == "sample" else (x, y)


def create(program, wrap):
    """Returns the program's model, compiled; `wrap` takes the optimizer."""
    width = common.NUM_CLASSES if program.target == "classes" else 1
    shape = (6,) if program.tokens else (5,)
    body = [layer for name in program.body for layer in LAYERS[name]()]
    head = layers.Dense(width, kernel_regularizer=keras.regularizers.L2(0.01))
    net = keras.Sequential([keras.Input(shape), *body, head])
    kind = steps.STEPS[program.step]
    model = kind(net) if kind else net
    metrics = [METRICS[name]() for name in program.metrics if "weighted" not in name]
    weighted = [METRICS[name]() for name in program.metrics if "weighted" in name]
    settings = {"metrics": metrics, "weighted_metrics": weighted}
    optimizer = wrap(OPTIMIZERS[program.optimizer]())
    if isinstance(model, steps.TwoOptimizers):
        model.keep(optimizer, wrap(SGD(0.05, momentum=0.5)))
        # As in Keras's GANs: `compile` gives it another one, which stays idle.
        optimizer = "rmsprop"
    model.compile(
        optimizer,
        LOSSES[program.loss](),
        steps_per_execution=program.executions,
        **{name: some for name, some in settings.items() if some},
    )
    return model


def dense():
    return layers.Dense(6, "tanh", use_bias=False)


def regularized():
    return layers.Dense(6, "tanh", activity_regularizer=keras.regularizers.L2(0.1))


def frozen():
    return layers.BatchNormalization(trainable=False)


def synchronized():
    return layers.BatchNormalization(synchronized=True)


LAYERS = {
    "Dense": lambda: [dense()],
    "Embedding, mean": lambda: [layers.Embedding(9, 5), layers.GlobalAveragePooling1D()],
    "Embedding, LSTM": lambda: [layers.Embedding(9, 5, mask_zero=True), layers.LSTM(4)],
    "LayerNormalization": lambda: [layers.LayerNormalization(epsilon=0.1)],
    "BatchNormalization, frozen": lambda: [frozen()],
    "BatchNormalization, synchronized": lambda: [synchronized()],
    "running mean": lambda: [row_state.RunningMean()],
    "add_loss of a mean": lambda: [custom_losses.MeanPenalty()],
    "add_loss of a sum": lambda: [custom_losses.SumPenalty()],
    "activity regularizer": lambda: [regularized()],
    "centred": lambda: [row_state.Centred()],
}


def entropy_by_rows(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


def entropy_number(y_true, y_pred):
    return ops.mean(entropy_by_rows(ops.reshape(y_true, (-1,)), y_pred))


def entropy_masked(y_true, y_pred):
    y_true = ops.reshape(y_true, (-1,))
    mask = ops.cast(y_true != 0, "float32")
    return tf.math.divide_no_nan(
        ops.sum(mask * entropy_by_rows(y_true, y_pred)), tf.reduce_sum(mask)
    )


def squares_by_rows(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def squares_masked(y_true, y_pred):
    mask = ops.cast(y_true > 0, "float32")
    squares = ops.sum(mask * ops.square(y_true - y_pred))
    return tf.math.divide_no_nan(squares, ops.sum(mask))


class Surest(custom_metrics.CustomMetric):
    """The largest output of an epoch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))


LOSSES = {
    "entropy": common.entropy,
    "entropy, mean_with_sample_weight": lambda: common.entropy(reduction="mean_with_sample_weight"),
    "entropy, ignore_class": lambda: common.entropy(ignore_class=0),
    "entropy by rows": lambda: entropy_by_rows,
    "entropy, one number": lambda: entropy_number,
    "entropy, masked": lambda: entropy_masked,
    "mean squared error": lambda: "mse",
    "Huber": keras.losses.Huber,
    # A sum over rows needs small steps to stay in bounds.
    "Huber, sum": lambda: keras.losses.Huber(0.01, reduction="sum"),
    "squares by rows": lambda: squares_by_rows,
    "squares, one number": lambda: custom_losses.mean_square,
    "squares, compute_average_loss": lambda: custom_losses.averaged_over_all,
    "root of mean squares": lambda: custom_losses.root_mean_square,
    "squares, masked": lambda: squares_masked,
}
METRICS = {
    "accuracy": lambda: "accuracy",
    "weighted accuracy": lambda: keras.metrics.SparseCategoricalAccuracy(name="weighted"),
    "top 2": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2, name="top"),
    "perplexity": custom_metrics.Perplexity,
    "mae": lambda: "mae",
    "weighted mae": lambda: keras.metrics.MeanAbsoluteError(name="weighted"),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(name="rmse"),
    "surest": lambda: Surest("surest"),
    "largest": lambda: custom_metrics.Largest("largest"),
    "batches": lambda: custom_metrics.Batches("batches"),
    "moving average": lambda: custom_metrics.Moving("moving"),
    "total of means": lambda: custom_metrics.TotalOfMeans("total"),
}
# A gradient that is 0 but for rounding stays small beside this epsilon.
ADAM = {"learning_rate": 0.01, "epsilon": 1e-3}
OPTIMIZERS = {
    "SGD": lambda: SGD(0.1, momentum=0.9),
    "SGD, global_clipnorm": lambda: SGD(0.1, momentum=0.5, global_clipnorm=0.2),
    "SGD, accumulation": lambda: SGD(0.1, gradient_accumulation_steps=2),
    "SGD, moving average": lambda: SGD(0.1, use_ema=True, ema_momentum=0.8),
    "Adam": lambda: keras.optimizers.Adam(**ADAM),
    "AdamW, clipnorm": lambda: keras.optimizers.AdamW(**ADAM, weight_decay=0.05, clipnorm=0.1),
}
