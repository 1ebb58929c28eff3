"""Random numbers that verification must not take for noise alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = X[:, :1] - X[:, 1:2]


def in_seed(iterations):
    return tf.stack([tf.constant(7, tf.int64), tf.cast(iterations, tf.int64)])


class Step(keras.Model):
    """A step whose gradients, weights or rows are changed at random."""

    def __init__(self, change_gradient=None, change_rows=None, change_weight=None):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.changes = change_gradient, change_rows, change_weight

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        change_gradient, change_rows, change_weight = self.changes
        x = change_rows(x) if change_rows else x
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        step = self.optimizer.iterations
        if change_gradient:
            grads = [grad + 0.01 * change_gradient(tf.shape(grad), step) for grad in grads]
        self.optimizer.apply(grads, self.trainable_variables)
        for variable in self.trainable_variables if change_weight else ():
            variable.assign_add(0.01 * change_weight(tf.shape(variable), step))
        return {"loss": loss}


def fit(num_replicas=3, **changes):
    strategy = create_strategy(num_replicas, verify="always")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Step(**changes)
        model.compile(keras.optimizers.SGD(0.1))
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model


GENERATOR = {}


def with_generator(shape, step):
    return keras.random.normal(shape, seed=GENERATOR["seeds"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"change_gradient": with_generator},
        {"change_weight": lambda shape, step: tf.random.normal(shape)},
        {"change_gradient": lambda shape, step: tf.random.normal(shape)},
        {"change_gradient": lambda shape, step: tf.cast(tf.random.uniform(()) < 0.5, tf.float32)},
    ],
    ids=["generator", "weight", "gradient", "gate"],
)
def test_replicas_that_would_drift_apart_are_reported(changes):
    GENERATOR["seeds"] = keras.random.SeedGenerator(1)
    with pytest.raises(
        ValueError, match="must hold the same weights.*differs.*train_step.*stateless"
    ):
        fit(**changes)


def test_noise_of_the_step_that_is_the_same_everywhere_is_exact():
    def noise(shape, step):
        return tf.random.stateless_normal(shape, in_seed(step))

    one = fit(1, change_gradient=noise, change_weight=noise)
    many = fit(3, change_gradient=noise, change_weight=noise)
    for a, b in zip(one.trainable_variables, many.trainable_variables):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-6)


def test_random_rows_and_losses_raise_nothing():
    model = fit(change_rows=lambda x: x + 0.1 * tf.random.normal(tf.shape(x)))
    for variable in model.trainable_variables:
        first, *others = (part.numpy() for part in variable.value.values)
        assert all(np.array_equal(first, other) for other in others)


def test_the_same_block_of_numbers_on_every_replica_is_reported():
    def noise(x):
        return x + 0.5 * tf.random.stateless_normal(tf.shape(x), [1, 2])

    with pytest.raises(ValueError, match="must give one device's result on 3 replicas"):
        fit(change_rows=noise)


def test_a_shuffle_of_rows_is_reported_once():
    def mixed(x):
        order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
        return 0.7 * x + 0.3 * tf.gather(x, order)

    with pytest.warns(UserWarning, match="shuffles rows at random.*gather_batch"):
        fit(change_rows=mixed)


def test_local_batch_normalization_is_named():
    strategy = create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.BatchNormalization(name="norm")])
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="norm.*synchronize_batch_normalization"):
        model.fit(X, Y, batch_size=16, verbose=0)
    tfmulti.synchronize_batch_normalization(model)
