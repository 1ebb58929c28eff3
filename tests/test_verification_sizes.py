"""A step that takes some numbers of rows only is verified with the numbers that batches have."""

import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti.verification import verified
from tfmulti.verification.case import Case, Feed
from tfmulti.verification.rows import Rows

# Keras warns too, from an environment that may be in a folder of the same name.
PACKAGE = Path(tfmulti.__file__).parent


class Pairs(keras.Model):
    """Compares each row with the next one; half a pair broadcasts."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Dense(4)

    def call(self, x):
        return self.embed(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            distance = tf.reduce_sum((z[::2] - z[1::2]) ** 2.0, 1)
            same = tf.cast(y[::2] == y[1::2], tf.float32)
            loss = tf.reduce_mean(same * distance + (1 - same) * tf.nn.relu(4.0 - distance))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class Groups(keras.layers.Layer):
    """Takes from each row the mean of its pair; half a pair is an error."""

    def call(self, x):
        pairs = tf.reshape(x, [-1, 2, x.shape[-1]])
        return tf.reshape(pairs - tf.reduce_mean(pairs, 1, keepdims=True), [-1, x.shape[-1]])


def of_groups():
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), Groups()])


def rows(number):
    rng = np.random.RandomState(0)
    return rng.randn(number, 5).astype("float32"), rng.randint(0, 2, number)


def batches(number, batch_size):
    x, y = rows(number)
    places = range(0, number, batch_size)
    return tf.data.Dataset.from_generator(
        lambda: ((x[i : i + batch_size], y[i : i + batch_size]) for i in places),
        output_signature=(tf.TensorSpec([None, 5]), tf.TensorSpec([None], tf.int64)),
    )


def trained(num_replicas, make, data, **settings):
    """The weights of a model, and what was said of its step."""
    keras.utils.set_random_seed(0)
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    with tfmulti.create_strategy("mirrored", devices=devices).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(**data, shuffle=False, verbose=0, **settings)
    told = [str(each.message) for each in told if PACKAGE in Path(each.filename).parents]
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), told


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, number, batch_size, reason",
    [
        # The last batch has 6 rows: three on each replica.
        (Pairs, 30, 8, "in 2 parts it differs from one device"),
        (of_groups, 30, 8, "in 2 parts it cannot run"),
        (Pairs, 32, 8, ""),
        (Pairs, 18, 8, "in 2 parts it differs from one device"),
        (Pairs, 62, 16, "in 2 parts it cannot run"),
        (of_groups, 32, 8, ""),
    ],
)
def test_pairs_of_rows_that_a_last_batch_would_part(make, number, batch_size, reason):
    x, y = rows(number)
    data = {"x": x, "y": y, "batch_size": batch_size}
    expected, _ = trained(1, make, data)
    weights, told = trained(2, make, data)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    assert bool(reason) == bool(told), told
    assert all(reason in each for each in told), told


@pytest.mark.slow
def test_batches_of_unknown_sizes_are_told():
    _, told = trained(2, Pairs, {"x": batches(16, 8)})
    assert len(told) == 1
    assert "works only with some numbers of rows" in told[0]
    assert "Received: a first batch of 8 rows" in told[0]


class TrimmedPairs(Pairs):
    """An odd row at the end has no partner: pairs are in step only on one device."""

    def loss_of(self, x, y):
        z = self(x, training=True)[:, 0]
        even = tf.shape(z)[0] // 2 * 2
        pairs = tf.reshape(z[:even], [-1, 2])
        return tf.reduce_mean(tf.nn.softplus(pairs[:, 0] - pairs[:, 1]))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": self.loss_of(*data)}


class WholePairs(TrimmedPairs):
    """Cannot run with an odd row."""

    def loss_of(self, x, y):
        pairs = tf.reshape(self(x, training=True)[:, 0], [-1, 2])
        return tf.reduce_mean(tf.nn.softplus(pairs[:, 0] - pairs[:, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("make", [TrimmedPairs, WholePairs])
def test_another_size_in_a_later_call_is_verified_before_it_runs(make):
    """Batches of 8 leave pairs whole on two replicas, those of 10 do not."""
    x, y = rows(40)

    def results(num_replicas):
        keras.utils.set_random_seed(0)
        devices = [f"CPU:{index}" for index in range(num_replicas)]
        with tfmulti.create_strategy("mirrored", devices=devices).scope():
            model = make()
            model.compile(keras.optimizers.SGD(0.05))
        settings = {"shuffle": False, "verbose": 0}
        model.fit(x[:16], y[:16], batch_size=8, **settings)
        losses = [model.evaluate(x[:16], y[:16], batch_size=8, verbose=0)]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(x[:20], y[:20], batch_size=10, **settings)
            losses.append(model.evaluate(x[:20], y[:20], batch_size=10, verbose=0))
        told = [str(each.message) for each in told if PACKAGE in Path(each.filename).parents]
        return np.concatenate([losses, *(each.ravel() for each in model.get_weights())]), told

    expected, nothing = results(1)
    found, told = results(2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert not nothing
    assert [("train_step" in each, "test_step" in each) for each in told] == [(1, 0), (0, 1)], told


def test_a_step_of_any_size_is_verified_once(monkeypatch):
    """Batches of other sizes cost nothing where one of 5 rows and one of 2 were the same."""
    runs = []
    find_out = tfmulti.verification.find_out
    monkeypatch.setattr(
        tfmulti.verification, "find_out", lambda *args: runs.append(1) or find_out(*args)
    )
    x, y = rows(40)
    keras.utils.set_random_seed(0)
    with tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"], verify="always").scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)])
        model.compile("sgd", "sparse_categorical_crossentropy")
    for size in (8, 10, 6):
        model.fit(x[:39], y[:39], batch_size=size, verbose=0)
    assert len(runs) == 1
    # A batch by itself may leave a replica without rows.
    for size in (1, 4, 7, 9):
        model.train_on_batch(x[:size], y[:size])
    assert len(runs) == 2


def test_workers_ask_one_another_whether_a_form_is_new():
    """The form has what only this worker's own data tell, as whether a replica gets no row."""

    def case(rows):
        feed = Feed(peek=None, batches=[(rows,)])
        return Case.of(model, "train", Rows((np.zeros((rows, 2), "float32"),)), feed)

    asked = []

    def other_worker_has_news(is_new):
        asked.append(is_new)
        return True

    with create_strategy(2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    form = verified.note(case(8), lambda is_new: is_new)
    assert verified.note(case(8), lambda is_new: is_new) is None
    verified.note_done(case(8), form)
    assert verified.note(case(8), other_worker_has_news) == form
    assert verified.note(case(1), other_worker_has_news) not in (None, form)
    assert asked == [False, True]
