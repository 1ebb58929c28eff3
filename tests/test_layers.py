"""Layers with state: batch statistics and randomness, replica by replica."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from conformance.guarantees.layers import Masks
from replicas import create_strategy

import tfmulti


def distributed():
    return tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))


def fit(strategy, layers, optimizer, count=33, epochs=1):
    rng = np.random.RandomState(0)
    data = rng.randn(count, 4).astype("float32"), rng.randn(count, 2).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
        model.compile(optimizer(), "mse")
    train = tfmulti.distribute_train(data, strategy, 16, seed=0)
    model.fit(train, epochs=epochs, verbose=0)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("synchronized", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_moving_statistics_are_the_same_on_all_replicas(synchronized, num_replicas):
    strategy = create_strategy(num_replicas)
    layer = keras.layers.BatchNormalization(synchronized=synchronized)
    optimizer = distributed
    # 33 examples in batches of 16: the last batch leaves replicas without a row.
    fit(strategy, [layer], optimizer, epochs=2)
    for variable in (layer.moving_mean, layer.moving_variance):
        values = strategy.experimental_local_results(variable.value)
        assert np.isfinite(values[0]).all()
        assert not np.array_equal(values[0], np.zeros_like(values[0]))
        for other in values[1:]:
            np.testing.assert_array_equal(values[0], other)


def fit_arrays(num_replicas, layers, x, y):
    keras.utils.set_random_seed(0)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        layers = [keras.Input(x.shape[1:], dtype=x.dtype), *layers(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_variance_around_a_large_mean_is_that_of_one_device(num_replicas):
    x = np.random.RandomState(0).normal(19000, 1, (43, 3)).astype("float32")
    y = (x[:, :1] > 19000).astype("float32")
    norms = [keras.layers.BatchNormalization(synchronized=value) for value in (False, True)]
    fit_arrays(1, lambda: norms[:1], x, y)
    fit_arrays(num_replicas, lambda: norms[1:], x, y)
    for name in ("moving_mean", "moving_variance"):
        one, all_rows = (np.asarray(getattr(norm, name)) for norm in norms)
        np.testing.assert_allclose(all_rows, one, rtol=1e-5)


def masked_steps():
    yield keras.layers.Masking()
    # A row of zeros has no deviation to divide by.
    yield keras.layers.LayerNormalization(epsilon=0.0)
    yield keras.layers.BatchNormalization(synchronized=True)
    yield keras.layers.Flatten()


def mean_of_masked_steps():
    yield keras.layers.Masking()
    # All steps of a row of zeros are masked.
    yield keras.layers.GlobalAveragePooling1D()
    yield keras.layers.Dense(4)
    yield keras.layers.BatchNormalization(synchronized=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layers", [masked_steps, mean_of_masked_steps])
def test_a_dummy_row_that_is_not_a_number_leaves_other_replicas_alone(layers):
    x = np.random.RandomState(0).randn(33, 3, 4).astype("float32")
    y = (x[:, 0, :1] > 0).astype("float32")
    one, two = (fit_arrays(number, layers, x, y).get_weights() for number in (1, 2))
    for expected, weights in zip(one, two):
        np.testing.assert_allclose(weights, expected, atol=1e-6)


def masks_of(num_replicas):
    optimizer = distributed
    strategy = create_strategy(num_replicas)
    # Of training alone.
    strategy.verify = "never"
    with strategy.scope():
        layer = Masks()
    fit(strategy, [layer], optimizer, count=32)
    state = layer.dropout.seed_generator.state.value
    states = [value.numpy().tolist() for value in strategy.experimental_local_results(state)]
    return layer.seen, states


def test_dropout_differs_between_replicas_and_is_reproducible():
    seen, states = masks_of(3)
    again, _ = masks_of(3)
    flat = [mask for replica in sorted(seen) for mask in seen[replica]]
    assert len(flat) == 6
    for i, one in enumerate(flat):
        # 1,600 fair coins: two independent masks agree on 800 of them, give or take 20.
        assert abs(one.sum() - 800) < 5 * 20
        for other in flat[:i]:
            assert abs((one == other).sum() - 800) < 5 * 20
    for replica, masks in seen.items():
        np.testing.assert_array_equal(masks, again[replica])
    assert states[0] == states[1] == states[2] == [11, 2], states


SGD = keras.optimizers.SGD


class LastMean(keras.layers.Layer):
    """Keeps the mean of its latest inputs, which begins far away."""

    def build(self, shape):
        start = keras.initializers.Constant(1e7)
        self.last = self.add_weight(shape=(), initializer=start, trainable=False)

    def call(self, x):
        self.last.assign(keras.ops.mean(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_state_that_replaces_a_far_larger_number_keeps_its_digits(num_replicas):
    x = np.random.RandomState(0).rand(9, 4).astype("float32")
    with create_strategy(num_replicas).scope():
        model = keras.Sequential([LastMean(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=9, verbose=0)
    assert float(model.layers[0].last) == pytest.approx(x.mean(), rel=1e-6)


class Infinite(keras.layers.Layer):
    """Has a mask of -inf and the least loss so far, and a limit that its first step lifts."""

    def build(self, shape):
        mask = lambda shape, dtype=None: tf.constant([0.0, -np.inf])
        self.mask = self.add_weight(shape=(2,), initializer=mask, trainable=False)
        constant = keras.initializers.Constant
        self.best = self.add_weight(shape=(), initializer=constant(np.inf), trainable=False)
        self.limit = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.limit.assign(np.inf)
        return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
def test_an_infinite_state_stays_infinite(eager):
    x = np.random.RandomState(0).rand(5, 4).astype("float32")
    with create_strategy(2, verify="never").scope():
        model = keras.Sequential([Infinite(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=eager)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    layer = model.layers[0]
    np.testing.assert_array_equal(layer.mask, [0.0, -np.inf])
    assert float(layer.best) == float(layer.limit) == np.inf


class Joined(keras.Model):
    """Makes layers in its `call`, as `keras.layers.concatenate` does."""

    def __init__(self, joined):
        super().__init__()
        self.joined, self.left, self.right = joined, keras.layers.Dense(2), keras.layers.Dense(2)
        self.last = keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.joined([self.left(x), self.right(x)]))


class JoinedInAStep(Joined):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def train_joined(kind, num_replicas, joined):
    keras.utils.set_random_seed(0)
    x = np.random.RandomState(0).rand(20, 3).astype("float32")
    with create_strategy(num_replicas).scope():
        model = kind(joined)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, x[:, :1], batch_size=10, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Joined, JoinedInAStep])
def test_layers_that_a_call_makes_anew(kind):
    for joined in (keras.layers.concatenate, lambda parts: keras.layers.Dot(1)(parts)):
        one, many = (train_joined(kind, number, joined) for number in (1, 3))
        for expected, found in zip(one, many):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@pytest.mark.slow
def test_weights_that_a_call_makes_anew_are_an_error():
    """As on one device: TensorFlow says what is wrong."""
    with pytest.raises(Exception, match="singleton tf.Variables created on the first call"):
        train_joined(JoinedInAStep, 2, lambda parts: keras.layers.Dense(2)(parts[0]))
