"""What is named as the likely cause of a difference, and what is none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti

RNG = np.random.RandomState(0)
ROWS = RNG.randn(43, 6).astype("float32")


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def learn(self, x, y, penalty=lambda outputs: 0.0, factor=1.0):
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = factor * tf.reduce_mean(tf.square(outputs - y)) + penalty(outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class RowsSeen(Net):
    """Its loss grows with the number of rows that were seen."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(0, dtype=tf.int64, trainable=False)

    def train_step(self, data):
        self.seen.assign_add(tf.shape(data[0], tf.int64)[0])
        return self.learn(*data, factor=tf.minimum(1.0, tf.cast(self.seen, tf.float32) / 60))


class DualAscent(Net):
    """Logs the multiplier that it updates."""

    def __init__(self):
        super().__init__()
        self.multiplier = self.add_weight(shape=(), initializer="ones", trainable=False)

    def train_step(self, data):
        def violation(outputs):
            return tf.reduce_mean(tf.abs(outputs)) - 0.4

        self.learn(*data, lambda outputs: self.multiplier * violation(outputs))
        grown = self.multiplier + 2.0 * violation(self(data[0]))
        self.multiplier.assign(tf.nn.relu(grown))
        return {"multiplier": tf.convert_to_tensor(self.multiplier)}


class Noise(Net):
    """Adds numbers of a seed that is the same on each replica."""

    def train_step(self, data):
        x, y = data
        seed = [7, tf.cast(self.optimizer.iterations, tf.int32)]
        return self.learn(x + 0.1 * tf.random.stateless_normal(tf.shape(x), seed), y)


class Generator(Net):
    """Draws numbers for its rows, from a generator that each replica has for itself."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(4)

    def train_step(self, data):
        x, y = data
        return self.learn(x + 0.1 * self.generator.normal(tf.shape(x)), y)


class DrawsForAll(Net):
    """Draws numbers for the whole batch from a generator of Keras, and its order."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def train_step(self, data):
        x, y = map(tfmulti.gather_batch, data)
        order = keras.random.shuffle(tf.range(tf.shape(x)[0]), seed=self.seeds)
        mixed = 0.7 * x + 0.3 * tf.gather(x, order)
        mixed += keras.random.normal(tf.shape(mixed), 0.0, 0.1, seed=self.seeds)
        return self.learn(*tfmulti.local_rows((mixed, y)))


class Counts(keras.layers.Layer):
    """Counts its calls in a Python number."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x * (1.0 + 0.1 * self.calls)


class WithCounts(Net):
    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.layers.Dense(2), Counts(), keras.layers.Dense(1)])


class RootOfResult(Net):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"root": tf.sqrt(logs["mse"])}


def fit(make, y=ROWS[:, :1], optimizer="sgd", num_replicas=3, **settings):
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = make()
        model.compile(optimizer, **settings)
    return model, model.fit(ROWS, y, batch_size=16, epochs=2, shuffle=False, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, cause",
    [
        (RowsSeen, "state made from local rows, in train_step .*test_likely_causes.py"),
        (DualAscent, "state made from local rows, in train_step"),
        (Noise, "random numbers for rows, .* in StatelessRandomNormalV2 at .*test_likely_causes"),
        (WithCounts, "a Python number that changes with each call, in Counts"),
        (RootOfResult, "a log that is not a mean over rows, in compute_metrics .*likely_causes"),
    ],
)
def test_the_likely_cause_is(make, cause):
    loss = {"loss": "mae", "metrics": ["mse"]} if make in (RootOfResult, WithCounts) else {}
    with pytest.raises(ValueError, match=f"Likely cause: {cause}"):
        fit(make, **loss)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Generator, DrawsForAll])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_random_numbers_are_no_difference(make, num_replicas, recwarn):
    fit(make, num_replicas=num_replicas)
    assert not [each for each in recwarn if "train_step" in str(each.message)]


def cox(y, risk):
    """Cox's partial likelihood, which is the same if all risks are shifted."""
    time, event = tf.unstack(y, axis=1)
    order = tf.argsort(time, direction="DESCENDING")
    risk, event = tf.gather(risk[:, 0], order), tf.gather(event, order)
    terms = risk - tf.math.cumulative_logsumexp(risk)
    return -tf.reduce_sum(terms * event) / (tf.reduce_sum(event) + 1e-8)


def ranknet(y, score):
    pairs = tf.nn.softplus(tf.transpose(score) - score)
    return tf.reduce_mean(pairs * tf.cast(y > tf.transpose(y), tf.float32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2))])
@pytest.mark.parametrize("loss", [cox, pytest.param(ranknet, marks=pytest.mark.slow)])
def test_a_bias_without_a_gradient_is_no_difference(loss, seed, recwarn):
    keras.utils.set_random_seed(seed)
    rng = np.random.RandomState(3)
    y = np.stack([rng.rand(43), rng.rand(43) < 0.7], axis=1).astype("float32")
    layers = keras.layers

    def make():
        return keras.Sequential([layers.Dense(6, "selu"), layers.Dense(1)])

    fit(make, y if loss is cox else y[:, :1], "adam", loss=loss)
    assert not [each for each in recwarn if "train_step" in str(each.message)]


class Ensemble(keras.Model):
    """Trains two compiled models by their own steps, and logs what they return."""

    def __init__(self):
        super().__init__()
        self.members = [Net(), Net()]

    def call(self, x):
        return sum(member(x) for member in self.members)

    def compile(self, optimizer):
        super().compile()
        for member, loss in zip(self.members, ("mse", "mae")):
            member.compile(optimizer, loss)

    def train_step(self, data):
        logs = [member.train_step(data) for member in self.members]
        return {f"loss {index}": each["loss"] for index, each in enumerate(logs)}


@pytest.mark.slow
def test_logs_of_inner_models_are_those_of_one_device():
    found = []
    for num_replicas in (1, 3):
        keras.utils.set_random_seed(0)
        model, history = fit(Ensemble, num_replicas=num_replicas)
        found.append([*model.get_weights(), *history.history.values()])
    for one, many in zip(*found):
        np.testing.assert_allclose(many, one, atol=1e-6)
