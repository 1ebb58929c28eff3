"""Loops of the user's own around `strategy.run`: losses as on one device, also with uneven rows."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf

import tfmulti

random = np.random.RandomState(0)
X, WEIGHTS = random.randn(17, 4).astype("float32"), random.rand(17).astype("float32")
Y = 2 * X[:, :1]


def of_object(weighted=False, **settings):
    def create():
        loss = keras.losses.MeanSquaredError(**settings)
        return lambda y, outputs, weights: loss(y, outputs, weights if weighted else None)

    return create


def average(weighted=False, **settings):
    def of(y, outputs, weights):
        losses = keras.losses.mean_squared_error(y, outputs)
        weights = weights if weighted else None
        return tf.nn.compute_average_loss(losses, sample_weight=weights, **settings)

    return lambda: of


LOSSES = {
    "mean": of_object(),
    "weighted": of_object(weighted=True),
    "mean_with_sample_weight": of_object(weighted=True, reduction="mean_with_sample_weight"),
    "sum": of_object(reduction="sum"),
    "average": average(),
    "weighted average": average(weighted=True),
    "average over the global batch": average(global_batch_size=17),
}


def train(strategy, create_loss, eager=False, operation="MEAN", rows=17):
    """Trains a step, and returns the weights and the loss."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        loss_of = create_loss()

    def on_replica(x, y, weights):
        with tfmulti.DistributedGradientTape() as tape:
            loss = loss_of(y, model(x, training=True), weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(batch):
        return strategy.reduce(operation, strategy.run(on_replica, args=batch), axis=None)

    [batch] = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).take(rows).batch(rows)
    )
    loss = float((step if eager else tf.function(step))(batch))
    return [*model.get_weights(), loss]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LOSSES)
def test_keras_losses_under_the_distributed_tape_are_those_of_one_device(name):
    expected = train(replicas.create_strategy(1), LOSSES[name])
    for eager in (False, True):
        found = train(replicas.create_strategy(3), LOSSES[name], eager)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


def dice():
    loss = keras.losses.Dice()
    return lambda y, outputs, weights: loss(tf.sigmoid(y), tf.sigmoid(outputs))


def test_losses_of_the_whole_batch_get_the_rows_of_all_replicas():
    expected, found = (train(replicas.create_strategy(n), dice) for n in (1, 3))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


def hinge():
    loss = keras.losses.Hinge(reduction=None)

    def of(y, outputs, weights):
        # Labels of -1 are on one replica only; on the others all are 0 or 1.
        labels = tf.where(y <= Y.min(), -1.0, tf.cast(y > 0, tf.float32))
        return tf.nn.compute_average_loss(loss(labels, outputs) * weights, global_batch_size=17)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_hinges_of_single_rows_decide_by_the_labels_of_all_replicas(eager):
    expected, found = (train(replicas.create_strategy(n), hinge, eager) for n in (1, 3))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mean", "weighted", "sum", "average"])
def test_replicas_may_have_no_rows(name):
    expected = train(replicas.create_strategy(1), LOSSES[name], rows=1)
    for eager in (False, True):
        found = train(replicas.create_strategy(3), LOSSES[name], eager, rows=1)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


def test_penalties_count_once():
    def of(y, outputs, weights):
        penalty = tf.nn.scale_regularization_loss(tf.constant(3.0))
        return tf.reduce_mean(outputs) * 0 + penalty

    assert train(replicas.create_strategy(2), lambda: of)[-1] == 3.0


def test_adding_means_over_replicas_is_told():
    for name in ("mean", "sum", "average"):
        with pytest.raises(ValueError, match="must be averaged over replicas"):
            train(replicas.create_strategy(2), LOSSES[name], operation="SUM")


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, tfmulti.DistributedOptimizer])
def test_in_stock_loops_each_optimizer_adds_its_gradients_before_it_clips(wrap):
    """TensorFlow divides its losses for an optimizer that adds gradients."""
    runs = []
    for strategy in (replicas.create_strategy(1), replicas.create_strategy(2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in "ab"]
            optimizers = [keras.optimizers.SGD(0.1, clipnorm=0.01), keras.optimizers.Adam(0.1)]
            optimizers = [wrap(each) for each in optimizers]
            for model, optimizer in zip(models, optimizers):
                optimizer.build(model.trainable_variables)

        def on_replica(x, y, models=models, optimizers=optimizers):
            total = 0.0
            for model, optimizer in zip(models, optimizers):
                with tf.GradientTape() as tape:
                    losses = keras.losses.mean_squared_error(y, model(x, training=True))
                    loss = tf.nn.compute_average_loss(losses, global_batch_size=17)
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply(gradients, model.trainable_variables)
                total += loss
            return total

        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(17)
        [batch] = strategy.experimental_distribute_dataset(dataset)
        losses = tf.function(strategy.run)(on_replica, args=batch)
        weights = [weight for model in models for weight in model.get_weights()]
        runs.append([*weights, float(strategy.reduce("SUM", losses, axis=None))])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


def of_distributed_tape(model, x, y):
    with tfmulti.DistributedGradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return tape.gradient(loss, model.trainable_variables)


def of_plain_tape(model, x, y):
    with tf.GradientTape() as tape:
        losses = keras.losses.mean_squared_error(y, model(x))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=16)
    return tape.gradient(loss, model.trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize("takes", itertools.product([of_distributed_tape, of_plain_tape], repeat=2))
def test_both_tapes_in_one_function(takes):
    runs = []
    for strategy in (replicas.create_strategy(1), replicas.create_strategy(2)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in takes]
            optimizers = [keras.optimizers.SGD(0.1) for _ in takes]
            for model, optimizer in zip(models, optimizers):
                optimizer.build(model.trainable_variables)

        def on_replica(x, y, models=models, optimizers=optimizers):
            for take, model, optimizer in zip(takes, models, optimizers):
                optimizer.apply(take(model, x, y), model.trainable_variables)

        dataset = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(16)
        [batch] = strategy.experimental_distribute_dataset(dataset)
        tf.function(strategy.run)(on_replica, args=batch)
        runs.append([weight for model in models for weight in model.get_weights()])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


def test_gradients_of_both_tapes_at_once_are_told():
    strategy = replicas.create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    def on_replica(x, y):
        of_distributed_tape(model, x, y)
        of_plain_tape(model, x, y)

    with pytest.raises(ValueError, match="Received: gradients from both"):
        strategy.run(on_replica, args=(X[:8], Y[:8]))


class RunningMean(keras.layers.Layer):
    def __init__(self, aggregation):
        super().__init__(name="running")
        self.aggregation = aggregation

    def build(self, shape):
        settings = {"trainable": False, "aggregation": self.aggregation}
        self.mean = self.add_weight((shape[-1],), "zeros", name="mean", **settings)

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x - self.mean


def loop_with_states(aggregation, is_synchronized):
    """Returns what was told in two traces of a loop, and the states of each replica."""
    strategy = replicas.create_strategy(2)
    with strategy.scope():
        normalize = keras.layers.BatchNormalization(synchronized=is_synchronized, name="local")
        inner = [RunningMean(aggregation), normalize, keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *inner])
        optimizer = keras.optimizers.Adam(0.1, use_ema=True)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanSquaredError()

    def on_replica(x, y):
        with tfmulti.DistributedGradientTape() as tape:
            outputs = model(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(y, outputs)

    dataset = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(16)
    [batch] = strategy.experimental_distribute_dataset(dataset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tf.function(strategy.run)(on_replica, args=batch)
    told = [str(w.message) for w in caught if "States of layers" in str(w.message)]
    states = [normalize.moving_mean, model.layers[0].mean]
    local = strategy.experimental_local_results
    return told, [[copy.numpy() for copy in local(state.value)] for state in states]


def test_states_of_layers_that_come_apart_are_told_once():
    [told], states = loop_with_states("none", False)
    assert all(np.abs(one - other).max() > 1e-4 for one, other in states)
    assert "local/moving_mean" in told and "running/mean" in told and "on 2 replicas" in told
    assert "kernel" not in told and "adam" not in told
    # What it advises.
    told, states = loop_with_states("mean", True)
    assert not told
    for one, other in states:
        np.testing.assert_array_equal(one, other)
