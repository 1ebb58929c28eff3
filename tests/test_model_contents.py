"""Optimizers are found wherever a model holds them; they are distributed, saved and resumed."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti import marks
from tfmulti.step import local_steps
from tfmulti.step.model_contents import optimizers_in_use, optimizers_of
from tfmulti.step.optimizer import distribute_optimizers

NUM_ROWS, BATCH_SIZE = 21, 8  # Three steps an epoch, the last one short.


class Killed(Exception):
    """Stands for a process that ends at once."""


class Holder:
    def __init__(self, held):
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def adam():
    return keras.optimizers.Adam(0.01)


HOLDERS = {
    "list": lambda model, pair: setattr(model, "players", pair),
    "dict": lambda model, pair: setattr(model, "players", dict(zip("ab", pair))),
    "tuple in a dict": lambda model, pair: setattr(model, "players", {"both": tuple(pair)}),
    "set": lambda model, pair: setattr(model, "players", set(pair)),
    "deque": lambda model, pair: setattr(model, "players", collections.deque(pair)),
    "an object": lambda model, pair: setattr(model, "inner", Holder([Holder(one) for one in pair])),
    "slots": lambda model, pair: setattr(model, "inner", Slotted(pair)),
    "a layer": lambda model, pair: setattr(model.first, "players", pair),
}


class TwoOptimizers(keras.Model):
    """Updates its two layers by an optimizer each, which it holds in one way or another."""

    def __init__(self, hold):
        super().__init__()
        self.first, self.second = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)
        pair = [adam(), keras.optimizers.RMSprop(0.01)]
        hold(self, pair)
        object.__setattr__(self, "pair", lambda: pair)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        parts = [self.first.trainable_variables, self.second.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for optimizer, part, grads in zip(self.pair(), parts, tape.gradient(loss, parts)):
            optimizer.apply(grads, part)
        return {"step_loss": loss}


@pytest.mark.parametrize("name", HOLDERS)
def test_optimizers_are_found_once_each_in_one_order(name):
    model = TwoOptimizers(HOLDERS[name])
    found = optimizers_of(model)
    assert sorted(map(id, found)) == sorted(map(id, model.pair()))
    assert [type(each) for each in found] == [keras.optimizers.Adam, keras.optimizers.RMSprop]


def test_an_optimizer_within_another_is_reached_through_it():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(adam()), "mse")
    model.inner = model.optimizer.inner_optimizer
    assert optimizers_of(model) == [model.optimizer]
    assert len(optimizers_of(model, nested=True)) == 2


def test_a_submodels_own_optimizer_is_found_and_cycles_end():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    inner.compile(adam(), "mse")
    model = keras.Sequential([inner])
    model.own = Holder(model)
    model.compile(keras.optimizers.SGD(), "mse")
    assert optimizers_of(model) == [model.optimizer, inner.optimizer]


class Distilling(keras.Sequential):
    """Has a step of its own, of which nobody knows which optimizers it applies."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("has_updated", [False, True])
@pytest.mark.parametrize("wrap", [lambda each: each, keras.optimizers.LossScaleOptimizer])
def test_the_optimizer_of_a_frozen_teacher_is_not_in_use(wrap, has_updated):
    dense = keras.layers.Dense
    teacher = keras.Sequential([keras.Input((2,)), dense(1)])
    teacher.compile(wrap(adam()), "mse")
    if has_updated:
        teacher.optimizer.build(teacher.trainable_variables)
    unknown = keras.Sequential([dense(1)])
    unknown.compile(keras.optimizers.SGD(), "mse")
    model = Distilling([keras.Input((2,)), dense(1)])
    model.compile(keras.optimizers.RMSprop(), "mse")
    model.teacher, model.unknown = teacher, unknown
    assert teacher.optimizer in optimizers_in_use(model)
    teacher.trainable = False
    # What a model without weights will have is not known.
    assert optimizers_in_use(model, nested=True) == [unknown.optimizer]


@pytest.mark.parametrize("wrap", [lambda each: each, keras.optimizers.LossScaleOptimizer])
def test_the_step_of_keras_uses_the_optimizer_of_compile_only(wrap):
    base = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    base.compile(tfmulti.DistributedOptimizer(adam()), "mse")
    model = keras.Sequential([keras.Input((2,)), base])
    optimizer = keras.optimizers.SGD()
    tfmulti.DistributedOptimizer(optimizer)
    model.compile(wrap(optimizer), "mse")
    assert base.trainable and optimizers_in_use(model) == [model.optimizer]
    assert optimizer in optimizers_in_use(model, nested=True)
    marks.SYNCHRONIZE_EVERY.set(optimizer, 8)
    assert local_steps.steps_of(model) == 8


def train(name, num_replicas, folder, kill_after=None):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    rng = np.random.RandomState(0)
    x, y = rng.randn(NUM_ROWS, 4).astype("float32"), rng.randn(NUM_ROWS, 1).astype("float32")
    with strategy.scope():
        model = TwoOptimizers(HOLDERS[name])
        distribute_optimizers(model)
        model.compile()
    data = tfmulti.distribute_train((x, y), strategy, BATCH_SIZE, seed=3)
    saver = tfmulti.callbacks.Checkpoint(folder, data, every_steps=1)

    def kill(batch, logs):
        if kill_after is not None and model.pair()[0].iterations.numpy() == kill_after:
            raise Killed

    end = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
    model.fit(data, epochs=2, verbose=0, callbacks=[saver, end])
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_replicas"), [("list", 2), ("an object", 1), ("a layer", 2)])
def test_they_are_distributed_saved_and_resumed(name, num_replicas, tmp_path):
    expected = train(name, 1, tmp_path / "one")
    with pytest.raises(Killed):
        train(name, num_replicas, tmp_path / "more", kill_after=4)
    for one, other in zip(expected, train(name, num_replicas, tmp_path / "more"), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
