"""Python lists that a step fills are noticed, and as they were after a step was verified."""

import collections
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

from tfmulti.verification.own_names import is_own
from tfmulti.verification.python_values import Containers, Numbers, restored, walk


class Labels(keras.metrics.Metric):
    """Keeps the labels in a list, as a metric of scikit-learn needs them."""

    def __init__(self):
        super().__init__(name="labels")
        self.kept = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept += list(np.array(y_true))

    def result(self):
        return np.float32(len(self.kept))

    def reset_state(self):
        self.kept = []


def compiled(strategy, metric):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=[metric], run_eagerly=True)
    return model


def test_a_list_that_was_assigned_anew_is_as_it_was():
    metric = Labels()
    model = compiled(create_strategy(1), metric)
    metric.kept += [1, 2]
    with restored(Containers(model)) as containers:
        metric.update_state([3], None)
        metric.update_state([4], None)
        assert containers.changed() == ["_compile_metrics/_user_metrics/0/kept"]
    assert list(metric.kept) == [1, 2]
    with restored(Containers(model)):
        metric.reset_state()
    assert list(metric.kept) == [1, 2]


@pytest.mark.slow
def test_a_metric_that_keeps_a_list_is_told():
    metric = Labels()
    model = compiled(create_strategy(2), metric)
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    with pytest.raises(ValueError, match="a metric that keeps a Python list, in Labels") as told:
        model.fit(x, y, batch_size=4, verbose=0)
    assert "self.add_variable(...)" in str(told.value)
    assert not metric.kept


def test_on_one_replica_it_is_as_ever():
    model = compiled(create_strategy(1), Labels())
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    history = model.fit(x, y, batch_size=4, verbose=0, epochs=2)
    assert history.history["labels"] == [8.0, 8.0]


class SetsInBuild(keras.layers.Layer):
    """Knows the size of its inputs from `build` on."""

    def __init__(self):
        super().__init__()
        self.size, self._half, self.sizes, self.inner = 0, 0.0, [], Tracker()
        self.form = None

    def build(self, shape):
        self.size, self._half = shape[-1], shape[-1] / 2
        self.sizes.append(shape[-1])
        self.form = "flat"
        self.inner.seen = [shape[-1]]
        self.kernel = self.add_weight(shape=(shape[-1], 1))

    def call(self, x):
        return keras.ops.matmul(x, self.kernel) / self.size + self._half


class BuiltByItsStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = SetsInBuild()
        self.norm = keras.layers.GroupNormalization(groups=-1)
        self.step, self._steps = 0, 0

    def call(self, x):
        return self.layer(self.norm(x))

    def train_step(self, data):
        self.step, self._steps = self.step + 1, self._steps + 1
        return super().train_step(data)


def fit_built_by_its_step(num_replicas, run_eagerly):
    with create_strategy(num_replicas).scope():
        model = BuiltByItsStep()
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_set_in_build_stays(num_replicas):
    model = fit_built_by_its_step(num_replicas, run_eagerly=False)
    assert (model.layer.size, model.layer._half, list(model.layer.sizes)) == (4, 2.0, [4])
    assert list(model.layer.inner.seen) == [4]
    assert model.norm.groups == 4


def test_what_the_step_counts_while_it_builds_does_not_stay():
    model = fit_built_by_its_step(1, run_eagerly=True)
    assert (model.step, model._steps, model.layer.size) == (2, 2, 4)
    assert model.layer.form == "flat"


@pytest.mark.slow
def test_a_private_counter_is_noticed_as_a_public_one():
    class Counts(BuiltByItsStep):
        def train_step(self, data):
            self._steps += 1
            return keras.Model.train_step(self, data)

    with create_strategy(2).scope():
        model = Counts()
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="Received: the attribute _steps of Counts"):
        model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    assert model._steps == 0


def own_private_names(thing):
    return [name for name in vars(thing) if name.startswith("_") and is_own(thing, name)]


@pytest.mark.slow
def test_private_attributes_of_keras_are_known():
    class Scale(keras.layers.Dense):
        def __init__(self, units):
            super().__init__(units)
            self._count, self.__mangled = 0, 0

    class Model(keras.Model):
        pass

    class Adam(keras.optimizers.Adam):
        pass

    class AUC(keras.metrics.AUC):
        pass

    inputs, layer = keras.Input((4,)), Scale(1)
    with create_strategy(2).scope():
        model = Model(inputs, layer(inputs))
        model.compile(Adam(gradient_accumulation_steps=2), "mse", metrics=[AUC()])
    data = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    model.fit(*data, verbose=0, validation_data=data)
    model.predict(data[0], verbose=0)
    found = walk(model)
    kinds = {
        type(thing): own_private_names(thing) for _, thing in found if hasattr(thing, "__dict__")
    }
    assert kinds[Scale] == ["_count", "_Scale__mangled"]
    assert {Model, Adam, AUC} < set(kinds)
    assert not any(names for kind, names in kinds.items() if kind is not Scale)


class Tracker:
    def __init__(self):
        self.seen = [1]


def in_module(variable):
    module = tf.Module()
    module.held = variable
    return module


def in_average(variable):
    average = tf.train.ExponentialMovingAverage(0.9)
    average.apply([variable])
    return average


class OfOddPackage(types.SimpleNamespace):
    """As of a package whose name begins as that of another one does."""

    __module__ = "numpyro.state"


@pytest.mark.parametrize(
    "hold",
    [
        lambda variable: types.SimpleNamespace(held=variable),
        lambda variable: collections.deque([variable]),
        lambda variable: OfOddPackage(held=variable),
        in_module,
        in_average,
    ],
)
def test_variables_are_found_in_what_is_no_layer(hold):
    model = keras.Sequential([keras.layers.Dense(1)])
    variable = tf.Variable(0.0)
    model.held = hold(variable)
    assert any(isinstance(thing, tf.Variable) for _, thing in walk(model))


def test_keras_own_lists_of_variables_are_left_alone():
    model = compiled(create_strategy(1), Labels())
    model.own = Tracker()
    with restored(Containers(model)) as containers:
        model.own.seen.append(2)
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        model.more = layer
        assert containers.changed() == ["own/seen"]
    assert model.own.seen == [1]
    assert layer.kernel is layer.trainable_variables[0]
    assert model.more is layer


class Remembers(keras.Model):
    """Keeps what a step has seen in attributes of every kind."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.last, self.mean, self.phase, self._own = None, tf.constant(0.0), "first", Tracker()

    def call(self, x):
        return self.dense(x)

    def remember(self, loss):
        self.last, self.mean, self.phase = loss, 0.9 * self.mean + loss, "later"
        self._own.last, self.history_of_losses, self.weight_of_rows = loss, [loss], {"a": 1.0}

    def kept(self):
        own = vars(self._own).keys() | vars(self).keys()
        came = own & {"last", "history_of_losses", "weight_of_rows"}
        return self.last, float(self.mean), self.phase, came


def test_none_tensors_and_texts_are_as_they_were_and_what_has_come_is_gone():
    model = Remembers()
    before = model.kept()
    with restored(Numbers(model)) as numbers:
        model.remember(2.0)
        assert not numbers.changed()
    assert model.kept() == before == (None, 0.0, "first", {"last"})
    assert list(vars(model._own)) == ["seen"]


def test_what_is_set_with_a_new_variable_stays():
    model = Remembers()
    with restored(Numbers(model)):
        model._own.state, model._own.ready = tf.Variable(1.0), "yes"
        model.last = 1.0
    assert model._own.ready == "yes"
    assert model.last is None


class MakesOnce(Remembers):
    """Makes a constant in its first step."""

    def train_step(self, data):
        if self.last is None:
            self.last = tf.constant([1.0, 2.0, 3.0])
        return super().train_step((data[0] * self.last, data[1]))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_does_not_meet_a_tensor_of_an_earlier_trace(num_replicas, run_eagerly):
    with create_strategy(num_replicas).scope():
        model = MakesOnce()
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    assert model.optimizer.iterations == 2


class KeepsScores(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense, self.scores = keras.layers.Dense(3), None

    def call(self, x):
        self.scores = keras.ops.softmax(self.dense(x))
        return x * self.scores


class Baseline(keras.Sequential):
    """Weighs rows by a moving loss, which it keeps in a tensor."""

    moving = tf.constant(0.0)

    def train_step(self, data):
        x, y = data
        self.moving = 0.5 * self.moving + tf.reduce_mean(tf.abs(self(x) - y))
        return super().train_step((x, y, tf.fill([len(x)], self.moving)))


def eager_model(kind):
    with create_strategy(2).scope():
        model = kind([keras.Input((3,)), KeepsScores(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.slow
def test_layers_may_keep_tensors_of_their_last_call():
    model = eager_model(keras.Sequential)
    for _ in range(2):
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)
        with model.distribute_strategy.scope():
            model.compile("sgd", "mse", run_eagerly=True)


@pytest.mark.slow
def test_a_step_that_goes_on_from_a_tensor_of_the_last_one_is_told():
    with pytest.raises(ValueError, match="must give one device's result"):
        x = np.random.default_rng(0).normal(size=(8, 3))
        eager_model(Baseline).fit(x, x[:, :1], batch_size=4, verbose=0)
