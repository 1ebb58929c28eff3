"""Limits, ranks and rare rows, which a few rows do not show, are told or reported."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from tfmulti import verification
from tfmulti.verification import trial

NUM_ROWS, BATCH = 96, 32


def rows():
    """One row of each batch has a label that no model predicts."""
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(NUM_ROWS, 4)), numbers.normal(size=(NUM_ROWS, 1))
    y[5::BATCH] = 30.0
    return x.astype("float32"), y.astype("float32")


def squares(y, outputs):
    return tf.reduce_mean(tf.square(y - outputs), axis=-1)


def limited(losses):
    """At three deviations from the mean, where no number of seven can be."""
    limit = tf.reduce_mean(losses) + 3.0 * tf.math.reduce_std(losses)
    return tf.minimum(losses, tf.stop_gradient(limit))


def hardest(losses):
    return tf.math.top_k(losses, tf.minimum(10, tf.size(losses))).values


def first_places(losses):
    """As an expert's capacity: rows in later places are dropped."""
    places = tf.cumsum(tf.ones_like(losses) + 0.0 * losses, axis=0)
    return losses * tf.cast(places <= 20.0, losses.dtype)


def more_if_any(losses):
    has_large = tf.reduce_any(losses > 500.0)
    return losses * tf.cond(has_large, lambda: 2.0, lambda: 1.0)


def if_large_batch(losses):
    return losses * tf.where(tf.size(losses) >= 20, 2.0, 1.0)


class Step(keras.Model):
    def __init__(self, of_rows):
        super().__init__()
        self.dense, self.of_rows = keras.layers.Dense(1), of_rows
        self.limit = self.add_weight(shape=(), initializer="ones", trainable=False, name="limit")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.of_rows(self, squares(y, self(x))))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


def fit(of_rows=None, loss=None, metrics=(), num_replicas=2, num_rows=NUM_ROWS, data=None):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    strategy = tfmulti.create_strategy("mirrored", devices=devices, on_difference="error")
    with strategy.scope():
        model = Step(of_rows) if of_rows else keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), loss=loss, metrics=list(metrics))
    x, y = rows()
    data = data or dict(x=x[:num_rows], y=y[:num_rows], batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*decides by a number")
        model.fit(**data, verbose=0, shuffle=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "of_rows",
    [limited, if_large_batch, hardest, first_places, more_if_any],
    ids=lambda f: f.__name__,
)
def test_a_step_is_compared_on_its_first_batch(of_rows):
    with pytest.raises(ValueError, match=f"`train_step` must give.* of {BATCH} rows"):
        fit(lambda model, losses: of_rows(losses))


@pytest.mark.slow
def test_many_rows_are_compared_whatever_they_take_if_a_few_change_nothing(monkeypatch):
    """A step with twenty rows of support, in a process that is too slow for many rows."""
    monkeypatch.setattr(trial, "_MOST_SECONDS", 0.0)
    with pytest.raises(ValueError, match=f"`train_step` must give.* of {BATCH} rows"):
        fit(lambda model, losses: losses[20:])


@pytest.mark.slow
def test_a_metric_with_a_limit_of_the_whole_batch_is_exact():
    def limited_error(y, outputs):
        return limited(squares(y, outputs))

    fit(loss="mse", metrics=[limited_error])


@pytest.mark.slow
def test_a_dataset_whose_batches_have_one_size_is_compared_with_that_size():
    dataset = tf.data.Dataset.from_tensor_slices(rows()).batch(BATCH, drop_remainder=True)
    with pytest.raises(ValueError, match=f" of {BATCH} rows"):
        fit(lambda model, losses: limited(losses), data=dict(x=dataset))


@pytest.mark.slow
def test_what_no_batch_of_the_data_reaches_is_no_difference():
    """The rows are taken from all over the arrays, but no more of them than a batch has."""
    fit(lambda model, losses: hardest(losses), num_rows=8)


@pytest.mark.parametrize(("kind", "most"), [("CPU", 40), ("GPU", 20)])
def test_an_accelerator_runs_no_more_rows_than_it_trains_with(kind, most):
    devices = types.SimpleNamespace(worker_devices=[f"/job:localhost/device:{kind}:0"] * 2)
    strategy = types.SimpleNamespace(extended=devices, num_replicas_in_sync=2)
    case = types.SimpleNamespace(batches=[(40,), (13,)], strategy=strategy)
    assert verification._most_at_once(case) == most


def compared_with_its_mean(model, losses):
    return losses * tf.cast(losses > 1e9 * tf.reduce_mean(losses), losses.dtype)


def compared_with_an_average(model, losses):
    """An average that the same step has updated from the replica's own rows."""
    model.limit.assign(0.9 * model.limit + 0.1 * tf.reduce_mean(losses))
    return losses * tf.cast(losses > 1e9 * model.limit, losses.dtype)


def features_within_deviations(model, losses):
    pairs = tf.stack([losses, 2.0 * losses], axis=1)
    mean, deviation = tf.reduce_mean(pairs, axis=0), tf.math.reduce_std(pairs, axis=0)
    return tf.clip_by_value(pairs, mean - 1e3 * deviation, mean + 1e3 * deviation)


REPORTED = {
    "Greater": compared_with_its_mean,
    "Greater of a variable": compared_with_an_average,
    "Minimum": features_within_deviations,
    "TopKV2": lambda model, losses: hardest(losses),
    "Cumsum": lambda model, losses: first_places(losses),
    "Any": lambda model, losses: more_if_any(losses),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTED)
def test_rows_that_are_compared_with_the_batch_are_reported(name):
    """Also where no difference is found: two rows in a batch are below all limits."""
    kind = name.split()[0]
    strategy = tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    )
    with strategy.scope():
        model = Step(REPORTED[name])
        model.compile(keras.optimizers.SGD(0.01))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model.fit(*rows(), batch_size=2, verbose=0)
        except ValueError as error:
            assert "must give one device's result" in str(error)
    texts = [str(each.message) for each in caught]
    [told] = [text for text in texts if "decides by a number" in text]
    assert f"{kind} at " in told and "test_verification_many.py:" in told


def by_rows(model, losses):
    lengths = tf.range(1.0, 4.0)[tf.newaxis]
    return tf.reduce_max(tf.maximum(losses[:, tf.newaxis], lengths), axis=1)


def by_one_mean_of_all(model, losses):
    gathered = tfmulti.gather_batch(losses)
    return tf.minimum(losses, tf.stop_gradient(tf.reduce_mean(gathered)))


def by_a_variable(model, losses):
    return tf.minimum(losses, model.limit)


@pytest.mark.slow
@pytest.mark.parametrize("of_rows", [by_one_mean_of_all, by_rows, by_a_variable])
def test_rows_that_are_compared_with_anything_else_are_not_reported(of_rows):
    strategy = tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    )
    with strategy.scope():
        model = Step(of_rows)
        model.compile(keras.optimizers.SGD(0.01))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decides by a number")
        model.fit(*rows(), batch_size=BATCH, verbose=0)
