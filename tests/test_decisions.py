"""A step that decides by a number of one replica's rows is told, in whatever words it decides."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from replicas import create_strategy

import tfmulti
from tfmulti.verification import graph_search

GENERATOR = np.random.default_rng(0)
ROWS = GENERATOR.normal(size=(48, 6)).astype("float32")
TARGETS = GENERATOR.normal(size=(48, 2)).astype("float32")
# No mean of losses comes near, whatever rows are made up.
FAR = 1e12


def stop(value):
    return tf.stop_gradient(value)


def both(a, b):
    return tf.stack([a, b + FAR])


DECIDING = {
    "the larger of two": lambda a, b: tf.reduce_max(both(a, b)) + a,
    "where the larger one is": lambda a, b: tf.gather([1.0, 2.0], tf.argmax(both(a, b))) * a,
    "two of three": lambda a, b: tf.reduce_sum(tf.math.top_k([a, b + FAR, b + 2 * FAR], 2)[0]) + a,
    "the first in order": lambda a, b: tf.sort(both(a, b))[0],
    "a level": lambda a, b: a * (1 + tf.floor(stop(a) / FAR)),
    "a rounded number": lambda a, b: a * (1 + tf.round(stop(a) / FAR)),
    "a whole number": lambda a, b: a * tf.cast(1 + tf.cast(stop(a) / FAR, tf.int32), tf.float32),
    "a branch": lambda a, b: tf.switch_case(
        tf.cast(stop(a) / FAR, tf.int32), [lambda: a, lambda: b]
    ),
    "a place among limits": lambda a, b: (
        a * (1 + tf.cast(tf.searchsorted([FAR], stop(a)[None])[0], tf.float32))
    ),
    "a leaky unit": lambda a, b: b + tf.nn.leaky_relu(a + FAR, 0.1) - FAR,
    "an exponential unit": lambda a, b: b + tf.nn.elu(a + 1.0),
    "a range": lambda a, b: b + ops.clip(a, -1.0, FAR),
    "no such row": lambda a, b: tf.where(stop(a) == -FAR, b, a),
    "a remainder": lambda a, b: a * (1 + tf.math.floordiv(stop(b), FAR)),
}


class Step(keras.Model):
    def __init__(self, combine):
        super().__init__()
        self.combine, self.dense = combine, keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.square(self(x) - y)
            loss = self.combine(tf.reduce_mean(errors[:, 0]), tf.reduce_mean(errors[:, 1]))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.reduce_mean(errors)}


def fit(combine, create=Step):
    strategy = create_strategy(2)
    with strategy.scope():
        model = create(combine)
        model.compile("sgd")
    model.fit(ROWS, TARGETS, batch_size=24, verbose=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DECIDING)
def test_a_decision_is_told_with_its_line(name):
    with pytest.warns(UserWarning, match="`train_step` decides by .*test_decisions.py:"):
        fit(DECIDING[name])


VECTORS = {
    "numbers for each class": lambda a, b: tf.reduce_sum(tf.nn.relu(both(a, b) + 1.0)) - FAR,
    "an unused code": lambda a, b: a + b * tf.reduce_sum(tf.cast(stop(both(a, b)) == FAR, a.dtype)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", VECTORS)
def test_a_decision_by_a_vector_without_rows_is_told(name):
    with pytest.warns(UserWarning, match="`train_step` decides by .*test_decisions.py:"):
        fit(VECTORS[name])


@pytest.mark.slow
def test_no_decision_is_told_where_none_is_made():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decides by a number")
        fit(lambda a, b: a + 2 * b)


class OfEarlierSteps(Step):
    """Weighs its loss by the mean of earlier losses, from a metric that is updated at the end."""

    def __init__(self, weigh):
        super().__init__(lambda a, b: (a + b) * self.weigh(self.mean.result()))
        self.mean, self.weigh = keras.metrics.Mean(name="mean"), weigh

    def train_step(self, data):
        logs = super().train_step(data)
        self.mean.update_state(logs["loss"])
        return logs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_decided", [True, False])
def test_a_decision_by_a_replicas_part_of_a_metric_is_told(is_decided, recwarn):
    weigh = lambda mean: 1.0 + (tf.cast(mean > FAR, tf.float32) if is_decided else 0.0)
    fit(lambda a, b: a, lambda _: OfEarlierSteps(weigh))
    told = [str(each.message) for each in recwarn if "decides by" in str(each.message)]
    assert len(told) == is_decided
    assert all("Greater at " in text and "test_decisions.py:" in text for text in told)


class Best(keras.metrics.Metric):
    """The largest error so far: a metric of the user's own, which gets the rows of all replicas."""

    def __init__(self):
        super().__init__(name="best")
        self.best = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.best.assign(tf.maximum(self.best, tf.reduce_max(tf.abs(y_true - y_pred))))

    def result(self):
        return tf.sqrt(self.best)


def test_metrics_of_ones_own_decide_by_all_rows(recwarn):
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", metrics=[Best(), "accuracy"])
    model.fit(ROWS, TARGETS, batch_size=24, verbose=0)
    assert not [each for each in recwarn if "from its own rows" in str(each.message)]


def in_python(a, b):
    """Decides in Python, which no graph shows, and in TensorFlow after that."""
    factor = tf.numpy_function(lambda v: np.float32(1 + (v > FAR)), [a], tf.float32)
    factor.set_shape(())
    return a * stop(tf.where(factor > 1.5, factor, 1.0))


def printed(a, b):
    tf.py_function(lambda *values: None, [a, b], [])
    return a + b


@pytest.mark.sampled(1)
@pytest.mark.parametrize("combine", [in_python, printed])
def test_a_decision_in_python_is_told_and_printing_is_not(combine, recwarn):
    fit(combine)
    told = " ".join(str(each.message) for each in recwarn if "decides by" in str(each.message))
    kinds = ["PyFunc at ", "Greater at "]
    assert [kind in told for kind in kinds] == [combine is in_python] * 2, told


class Scaled(keras.layers.Layer):
    def call(self, x, scale):
        return x * tf.maximum(scale, 0.1)


class RunsAgain(keras.Model):
    """A block that is given a number, and runs again for gradients."""

    def __init__(self):
        super().__init__()
        self.dense, self.block = keras.layers.Dense(2), Scaled()
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x):
        return self.block(self.dense(x), self.scale * 2)


def test_a_second_run_that_waits_for_gradients_does_not_decide_by_them():
    with create_strategy(2).scope():
        model = RunsAgain()
        model(ROWS[:2])
        tfmulti.checkpoint_activations(model, [model.block])
        model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decides by a number")
        model.fit(ROWS, TARGETS, batch_size=24, verbose=0)


@tf.function(autograph=False)
def branch(x, add):
    """Adds numbers of all workers within a branch, as TensorFlow does with sparse gradients."""
    return tf.cond(x[0] > 0, lambda: add(x), lambda: x)


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_branch_that_reduces_is_a_reduction(is_reduced):
    add = lambda x: tf.raw_ops.CollectiveReduceV2(
        **{"input": x, "group_size": 2, "group_key": 1, "instance_key": 1},
        **{"ordering_token": [], "merge_op": "Add", "final_op": "Id"},
    )
    graph = branch.get_concrete_function(tf.TensorSpec([2]), add if is_reduced else tf.abs).graph
    [chosen] = [each for each in graph.get_operations() if each.type in ("If", "StatelessIf")]
    assert graph_search.is_reduction(chosen) == is_reduced
