"""Rows come in one device's order, however a script shuffles them."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

from tfmulti.strategies import feeds

ROWS = np.random.RandomState(0).randn(43, 6).astype("float32")
LABELS = np.random.RandomState(1).randn(43, 1).astype("float32")


class CustomModel(keras.Sequential):
    """A model with a step of its own, which is verified."""

    def train_step(self, data):
        return super().train_step(data)


def arrays(model):
    model.fit(ROWS, LABELS, batch_size=16, epochs=3, verbose=0)


def seeded(model):
    data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).shuffle(43, seed=5).batch(16)
    model.fit(data, epochs=3, verbose=0)


def unseeded(model):
    data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).shuffle(43).batch(16)
    model.fit(data, epochs=3, verbose=0)


def predicted_first(model):
    data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).shuffle(43).batch(16)
    model.predict(data, verbose=0)
    model.fit(data, epochs=2, verbose=0)


class Changing(keras.utils.PyDataset):
    """Gives other rows in each epoch."""

    scale = 1.0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(16 * index, 16 * index + 16)
        return self.scale * ROWS[rows], LABELS[rows]

    def on_epoch_end(self):
        self.scale *= 0.5


def changing(model):
    model.fit(Changing(), epochs=2, shuffle=False, verbose=0)


def train(num_replicas, kind, fit):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    scope = create_strategy(num_replicas).scope() if num_replicas else contextlib.nullcontext()
    with scope:
        model = kind([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    fit(model)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fit", [arrays, predicted_first, seeded, unseeded, changing])
@pytest.mark.parametrize("kind", [keras.Sequential, CustomModel])
def test_the_order_is_one_devices(kind, fit):
    np.testing.assert_allclose(train(3, kind, fit), train(0, kind, fit), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "given, expected",
    [("AUTO", "DATA"), ("DATA", "DATA"), ("OFF", "OFF"), ("FILE", "FILE"), ("HINT", "HINT")],
)
def test_workers_share_rows_and_not_files_unless_a_user_says_so(given, expected):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(feeds._POLICIES, given)
    data = feeds.shared_by_rows(tf.data.Dataset.range(3).with_options(options))
    policy = data.options().experimental_distribute.auto_shard_policy
    assert policy == getattr(feeds._POLICIES, expected)


def shuffled(seed=None, within=False):
    numbers = tf.data.Dataset.range(9)
    shuffle = lambda data: data.shuffle(9, seed=seed)
    return numbers.interleave(lambda x: shuffle(numbers)) if within else shuffle(numbers)


def sampled(seed=None, within=False):
    numbers = tf.data.Dataset.range(9)
    sample = lambda _=0: tf.data.Dataset.sample_from_datasets([numbers] * 2, seed=seed)
    return numbers.flat_map(sample) if within else sample()


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("create", [shuffled, sampled])
def test_an_order_that_a_seed_gives_is_the_same_on_every_worker(create, within):
    tf.random.set_seed(None)
    with pytest.raises(ValueError, match="same order on every worker: .* Received: .* Give"):
        feeds.refuse_unlike_order(create(within=within).batch(2))
    feeds.refuse_unlike_order(create(seed=3, within=within).batch(2))
    feeds.refuse_unlike_order(with_own_rows(create(within=within)))
    tf.random.set_seed(0)
    feeds.refuse_unlike_order(create(within=within).batch(2))


def with_own_rows(data):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = feeds._POLICIES.OFF
    return data.with_options(options)


def test_lists_of_files_and_parallel_calls_without_an_order_are_refused(tmp_path):
    (tmp_path / "a").touch()
    tf.random.set_seed(None)
    list_files = tf.data.Dataset.list_files
    options = {"num_parallel_calls": 2, "deterministic": False}
    numbers = tf.data.Dataset.range(9)
    for each in (list_files(f"{tmp_path}/*"), numbers.map(lambda x: x, **options)):
        with pytest.raises(ValueError, match="same order on every worker"):
            feeds.refuse_unlike_order(each)
    for each in (list_files(f"{tmp_path}/*", shuffle=False), numbers.map(lambda x: x, 2), ROWS):
        feeds.refuse_unlike_order(each)
