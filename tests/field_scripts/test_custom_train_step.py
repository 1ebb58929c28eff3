"""A custom `train_step` gets one device's gradients and logs, whatever its loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from replicas import create_strategy

import tfmulti

NUM_ROWS, BATCH_SIZE = 41, 8  # The last batch has one row, for three replicas.


def mean_of_a_function(model, x, y, prediction):
    return ops.mean(ops.sum(keras.losses.mean_absolute_error(y, prediction)[:, None], axis=1))


def both(model, x, y, prediction):
    return model.loss_object(y, prediction) + tf.reduce_mean(tf.abs(prediction))


def compiled_loss(model, x, y, prediction):
    return model.compute_loss(x, y, prediction)


class CustomStep(keras.Model):
    """Has no `call()`, logs its loss by a metric of another name, as many do."""

    def __init__(self, loss_of):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((5,)), layers.Dense(4, "tanh", kernel_regularizer="l2"), layers.Dense(3)]
        )
        self.loss_of = loss_of
        self.loss_object = keras.losses.MeanSquaredError()
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y, self.net(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.count(loss, ops.shape(x)[0])
        return {"mean_loss": self.mean_loss.result()}

    def count(self, loss, num_rows):
        self.mean_loss.update_state(loss, sample_weight=num_rows)


class CountsCalls(CustomStep):
    """Gives its running mean one number a step, with no weight, as most scripts do."""

    def count(self, loss, num_rows):
        self.mean_loss.update_state(loss)

    def test_step(self, data):
        x, y = data
        self.mean_loss.update_state(self.loss_of(self, x, y, self.net(x)))
        return {"mean_loss": self.mean_loss.result()}


def rows():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_ROWS, 5)).astype("float32")
    return x, generator.normal(size=(NUM_ROWS, 3)).astype("float32")


def fit(num_replicas, loss_of, kind=CustomStep):
    keras.utils.set_random_seed(0)
    with create_strategy(num_replicas).scope():
        model = kind(loss_of)
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.05))
        model.compile(optimizer=optimizer, loss="mse")
    history = model.fit(*rows(), batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    losses = history.history["mean_loss"]
    if kind is CountsCalls:
        losses += [model.evaluate(*rows(), batch_size=BATCH_SIZE, verbose=0)]
    return weights, losses


def assert_same(run, reference):
    np.testing.assert_allclose(run[0], reference[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(run[1], reference[1], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", [mean_of_a_function, both, compiled_loss])
def test_own_step_does_as_on_one_device(loss_of):
    assert_same(fit(3, loss_of), fit(1, loss_of))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_of", [both, pytest.param(mean_of_a_function, marks=pytest.mark.slow)]
)
def test_a_running_mean_counts_each_step_once(loss_of):
    reference = fit(1, loss_of, CountsCalls)
    for num_replicas in (2, 3):
        assert_same(fit(num_replicas, loss_of, CountsCalls), reference)


@pytest.mark.slow
def test_a_metric_function_that_gives_one_number():
    def largest(y, prediction):
        return tf.reduce_mean(tf.abs(y - prediction))

    def train(num_replicas):
        keras.utils.set_random_seed(0)
        with create_strategy(num_replicas).scope():
            model = keras.Sequential([layers.Dense(3)])
            optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.05))
            model.compile(optimizer, "mse", metrics=[largest])
        history = model.fit(*rows(), batch_size=BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()[0], history.history["largest"]

    assert_same(train(3), train(1))
