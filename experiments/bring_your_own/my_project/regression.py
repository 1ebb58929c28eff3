"""A regression with a loss and a metric of its own: not a line of tfmulti is changed for it."""

import keras
import numpy as np


def load():
    """Returns (train, test) of a noisy curve: x (examples, 2), y (examples, 1)."""
    rng = np.random.RandomState(0)
    x = rng.uniform(-2, 2, (1200, 2)).astype("float32")
    y = np.sin(3 * x[:, :1]) + 0.5 * x[:, 1:] ** 2 + 0.1 * rng.randn(1200, 1)
    y = y.astype("float32")
    return (x[:1000], y[:1000]), (x[1000:], y[1000:])


class LogCosh(keras.losses.Loss):
    """Squared error near 0, absolute error far from it."""

    def call(self, y_true, y_pred):
        """Returns one loss for each example, so that uneven batches weigh right."""
        error = keras.ops.abs(y_pred - y_true)
        value = error + keras.ops.log1p(keras.ops.exp(-2.0 * error)) - keras.ops.log(2.0)
        return keras.ops.mean(value, axis=-1)


class WithinTenth(keras.metrics.Metric):
    """The part of the predictions that are off by less than 0.1."""

    def __init__(self, name="within_tenth", **kwargs):
        super().__init__(name=name, **kwargs)
        self.hits = self.add_variable((), "zeros", name="hits")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts the predictions of one batch."""
        hits = keras.ops.cast(keras.ops.abs(y_pred - y_true) < 0.1, "float32")
        self.hits.assign_add(keras.ops.sum(hits))
        self.count.assign_add(keras.ops.cast(keras.ops.size(hits), "float32"))

    def result(self):
        """Returns hits over predictions."""
        return self.hits / keras.ops.maximum(self.count, 1.0)


def create(train):
    """Returns a compiled model; its optimizer is made distributed by the command line."""
    model = keras.Sequential(
        [
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(3e-3, clipnorm=1.0), LogCosh(), metrics=[WithinTenth()])
    return model
