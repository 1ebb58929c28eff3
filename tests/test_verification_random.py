"""Random numbers that verification must not take for noise alone."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy
from tensorflow.python.ops import stateful_random_ops

import tfmulti
from tfmulti import keras_compat
from tfmulti.verification import verdict
from tfmulti.verification.differences import CLOSE_ON_GPUS, are_apart
from tfmulti.verification.state import End, State
from tfmulti.verification.verdict import Workers

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
        self.dense.build((None, 6))
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


@pytest.mark.sampled(1)
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
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_that_would_drift_apart_are_reported(changes, num_replicas):
    GENERATOR["seeds"] = keras.random.SeedGenerator(1)
    with pytest.raises(
        ValueError, match="must hold the same weights.*differs.*train_step.*stateless"
    ):
        fit(num_replicas, **changes)


def drift_between(values):
    """What this worker is told where the chief ends the same step with other values."""
    ends = [End("dense/kernel", np.float32([[0.5, 0.25]]), 0.01), End("count", np.array([7]), 0.0)]
    sent = b"".join(np.asarray(value).tobytes() for value in values)
    workers = Workers(lambda strategy, number: (number, number), lambda strategy, own: sent, *"__")
    trial = types.SimpleNamespace(
        distributed=types.SimpleNamespace(draws=True), drifting=lambda: ("", ends, 1e-4)
    )
    case = types.SimpleNamespace(kind="train", strategy=create_strategy(1), num_later=0)
    case.num_replicas = 1
    case.model, case.method = keras.Sequential([keras.layers.Dense(1)]), "train_step"
    return verdict._find_drift(trial, case, workers)


def test_workers_that_would_drift_apart_are_reported(monkeypatch):
    monkeypatch.setattr(verdict, "_try", lambda function, case: (function(), ""))
    assert drift_between([np.float32([[0.5, 0.2500001]]), np.array([7])]) is None
    told = str(drift_between([np.float32([[0.5, 0.2501]]), np.array([7])]))
    assert "must hold the same weights" in told and "dense/kernel, which differs" in told
    assert "count, which differs" in str(drift_between([np.float32([[0.5, 0.25]]), np.array([8])]))


def test_copies_are_apart_by_more_than_rounding():
    one = np.float32([2.0, -1.0, 0.0])
    for other, close, expected in (
        (one, 0.0, False),
        (one * np.float32(1 + 1e-6), 0.0, True),
        (one * np.float32(1 + 1e-6), CLOSE_ON_GPUS, False),
        (one * np.float32(1.01), CLOSE_ON_GPUS, True),
        (np.float32([np.inf, -1.0, 0.0]), CLOSE_ON_GPUS, True),
        (np.float32([np.nan, -1.0, 0.0]), CLOSE_ON_GPUS, True),
    ):
        assert are_apart(other, one, close) == are_apart(one, other, close) == expected
    half = tf.constant([1.5, 2.0], tf.bfloat16).numpy()
    near = tf.constant([1.5078125, 2.0], tf.bfloat16).numpy()
    assert are_apart(half, near, 0.0) and not are_apart(half, near, CLOSE_ON_GPUS)
    assert are_apart(np.array([10**6]), np.array([10**6 + 1]), CLOSE_ON_GPUS)


@pytest.mark.slow
def test_noise_of_the_step_that_is_the_same_everywhere_is_exact():
    def noise(shape, step):
        return tf.random.stateless_normal(shape, in_seed(step))

    one = fit(1, change_gradient=noise, change_weight=noise)
    many = fit(3, change_gradient=noise, change_weight=noise)
    for a, b in zip(one.trainable_variables, many.trainable_variables):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_random_rows_and_losses_raise_nothing():
    model = fit(change_rows=lambda x: x + 0.1 * tf.random.normal(tf.shape(x)))
    for variable in model.trainable_variables:
        first, *others = (part.numpy() for part in variable.value.values)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.slow
def test_the_same_block_of_numbers_on_every_replica_is_reported():
    def noise(x):
        return x + 0.5 * tf.random.stateless_normal(tf.shape(x), [1, 2])

    with pytest.raises(ValueError, match="must give one device's result on 3 replicas"):
        fit(change_rows=noise)


@pytest.mark.slow
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


def signs(shape, step):
    return tf.cast(tf.random.uniform(shape, 0, 2, tf.int32), tf.float32) * 2.0 - 1.0


def same_signs(shape, step):
    return tf.sign(tf.random.stateless_normal(shape, in_seed(step)))


class Curvature(Step):
    """Hutchinson's estimate of the diagonal of the Hessian, from random signs of a weight."""

    def __init__(self, draw=signs, combine=tf.multiply, is_kept=True):
        super().__init__()
        self.draw, self.combine, self.is_kept = draw, combine, is_kept
        self.kept = self.add_weight(shape=(6, 1), initializer="zeros", trainable=False)

    def train_step(self, data):
        (x, y), kernel = data, self.dense.kernel
        z = self.draw((6, 1), self.optimizer.iterations)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            product = tf.reduce_sum(inner.gradient(loss, kernel) * z)
        found = self.combine(z, outer.gradient(product, kernel))
        logs = super().train_step(data)
        if not self.is_kept:
            return {**logs, "trace": tf.reduce_sum(found)}
        self.kept.assign(0.9 * self.kept + 0.1 * found)
        return logs


class CurvatureNowAndThen(Curvature):
    """It keeps the estimate of every tenth step."""

    def train_step(self, data):
        before = tf.identity(self.kept)
        logs = super().train_step(data)
        is_due = self.optimizer.iterations % 10 == 1
        self.kept.assign(tf.cond(is_due, lambda: tf.identity(self.kept), lambda: before))
        return logs


class OfNoise(Step):
    """Random numbers of a weight's shape, or none of rows, that one device would draw too."""

    def __init__(self):
        super().__init__()
        self.kept = self.add_weight(shape=(6,), initializer="zeros", trainable=False)
        self.other = keras.layers.Dense(1)
        self.other.build((None, 6))

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        weights = [self.dense.kernel, self.dense.bias]
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        grads = tape.gradient(loss, weights)
        self.use(x, y, weights, grads)
        return {"loss": loss}

    def loss_of(self, x, y):
        mask = tf.cast(tf.random.uniform((6, 1)) < 0.8, tf.float32)
        return tf.reduce_mean((tf.matmul(x, self.dense.kernel * mask) + self.dense.bias - y) ** 2)

    def use(self, x, y, weights, grads):
        self.optimizer.apply(grads, weights)


class BayesianWeights(OfNoise):
    def loss_of(self, x, y):
        kernel = self.dense.kernel + 0.1 * tf.random.normal((6, 1))
        norm = 0.01 * tf.reduce_sum(kernel**2)
        return tf.reduce_mean((tf.matmul(x, kernel) + self.dense.bias - y) ** 2) + norm


class SharpnessAware(OfNoise):
    def use(self, x, y, weights, grads):
        moves = [0.05 * grad / (tf.linalg.global_norm(grads) + 1e-6) for grad in grads]
        for weight, move in zip(weights, moves):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        grads = tape.gradient(loss, weights)
        for weight, move in zip(weights, moves):
            weight.assign_sub(move)
        self.optimizer.apply(grads, weights)


class ClippedByHand(OfNoise):
    def use(self, x, y, weights, grads):
        size = tf.sqrt(tf.add_n([tf.reduce_sum(grad**2) for grad in grads]))
        self.kept.assign(0.9 * self.kept + 0.1 * size)
        self.optimizer.apply([grad / tf.maximum(size, 1.0) for grad in grads], weights)


class NoisyMean(OfNoise):
    def loss_of(self, x, y):
        noisy = tf.nn.dropout(x, 0.5, noise_shape=(1, 6))
        self.kept.assign(0.9 * self.kept + 0.1 * tf.reduce_mean(noisy, axis=0))
        return tf.reduce_mean((self.dense(noisy) - y) ** 2)


class Adversaries(OfNoise):
    """A critic with a gradient penalty, on rows and on 8 latents that are no rows."""

    def loss_of(self, x, y):
        fake = self.other(tf.random.normal((8, 6))) * tf.ones((1, 6))
        place = tf.random.uniform((tf.shape(x)[0], 1))
        between = place * x + (1.0 - place) * (x + tf.random.normal(tf.shape(x)))
        with tf.GradientTape() as tape:
            tape.watch(between)
            values = tf.reduce_sum(tf.tanh(self.dense(between)))
        sizes = tf.reduce_sum(tape.gradient(values, between) ** 2, axis=1)
        penalty = tf.reduce_mean((sizes - 1.0) ** 2)
        return tf.reduce_mean(self.dense(fake)) - tf.reduce_mean(self.dense(x)) + penalty

    def use(self, x, y, weights, grads):
        self.optimizer.apply(grads, weights)
        with tf.GradientTape() as tape:
            fake = self.other(tf.random.normal((8, 6))) * tf.ones((1, 6))
            loss = -tf.reduce_mean(self.dense(fake))
        for weight, grad in zip(self.other.weights, tape.gradient(loss, self.other.weights)):
            weight.assign_sub(0.1 * grad)


class Autoencoder(OfNoise):
    def loss_of(self, x, y):
        mean = self.dense(x)
        sample = mean + 0.1 * tf.random.normal(tf.shape(mean))
        ratio = keras.random.beta((), 0.4, 0.4)
        return ratio * tf.reduce_mean((sample - y) ** 2) + tf.reduce_mean(mean**2) * (1 - ratio)


class Guessed(OfNoise):
    """A gradient from two losses beside the weights, as evolution strategies take it."""

    def train_step(self, data):
        (x, y), z, step = data, tf.random.normal((6, 1)), 0.1
        losses = [
            tf.reduce_mean((tf.matmul(x, self.dense.kernel + way * z) - y) ** 2)
            for way in (step, -step)
        ]
        guess = z * (losses[0] - losses[1]) / (2 * step)
        self.optimizer.apply([guess], [self.dense.kernel])
        return {"loss": losses[0]}


def train(make, num_replicas, num_rows=32):
    """What `fit` warns of."""
    strategy = create_strategy(num_replicas, verify="always")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X[:num_rows], Y[:num_rows], batch_size=16, shuffle=False, verbose=0)
    return model, [str(each.message) for each in caught if each.category is UserWarning]


MEETING = {
    "multiply": dict(),
    "where": dict(combine=lambda z, found: tf.where(z > 0, found, -found)),
    "einsum": dict(combine=lambda z, found: tf.einsum("ij,ij->ij", z, found)),
    "keras": dict(combine=keras.ops.multiply),
    "log": dict(is_kept=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas, num_rows", [(2, 32), (3, 29)])
@pytest.mark.parametrize("name", MEETING)
def test_own_noise_that_meets_a_reduced_value_is_reported(name, num_replicas, num_rows):
    _, texts = train(lambda: Curvature(**MEETING[name]), num_replicas, num_rows)
    assert len(texts) == 1, texts
    assert "test_verification_random.py:" in texts[0] and "stateless_normal" in texts[0]
    assert f"{num_replicas} replicas get a fraction" in texts[0]


@pytest.mark.slow
def test_own_noise_in_a_branch_is_reported():
    _, texts = train(CurvatureNowAndThen, 2)
    assert "combines random numbers" in texts[0]


@pytest.mark.slow
def test_the_same_noise_everywhere_meets_a_reduced_value_exactly():
    kept = []
    for num_replicas in (1, 3):
        model, texts = train(lambda: Curvature(same_signs), num_replicas)
        assert not texts
        kept.append(model.kept.numpy())
    np.testing.assert_allclose(kept[0], kept[1], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas, num_rows", [(2, 32), (3, 29)])
@pytest.mark.parametrize(
    "make",
    [
        SharpnessAware,
        Adversaries,
        OfNoise,
        BayesianWeights,
        ClippedByHand,
        NoisyMean,
        Autoencoder,
        Guessed,
    ],
)
def test_noise_that_enters_a_loss_raises_nothing(make, num_replicas, num_rows):
    assert not train(make, num_replicas, num_rows)[1]


def test_generators_of_draws_without_a_seed_are_restored_where_nothing_is_traced(monkeypatch):
    generator = tf.random.Generator.from_seed(3)
    monkeypatch.setattr(stateful_random_ops, "global_generator", generator)
    strategy = create_strategy(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    keras_compat.prepare_global_seeds(strategy)

    def draw():
        seed = keras.random.normal((2,))
        return tf.concat([seed, tf.random.get_global_generator().normal((2,))], axis=0).numpy()

    state = State(model)
    begin = state.read()
    first, second = strategy.run(draw), strategy.run(draw)
    state.write(begin)
    assert np.array_equal(strategy.run(draw), first)
    assert not np.any(first == second)
