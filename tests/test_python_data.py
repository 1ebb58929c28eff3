"""Data that Python code makes: verification reads no batch that one device would not read."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from replicas import create_strategy

NUM_BATCHES, SIZE = 5, 8
GENERATOR = np.random.default_rng(0)
ROWS = GENERATOR.normal(size=(NUM_BATCHES * SIZE, 4)).astype("float32")
TARGETS = GENERATOR.normal(size=(NUM_BATCHES * SIZE, 1)).astype("float32")
SIGNATURE = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))


class Noise:
    """Adds random numbers to rows, and counts how often."""

    def __init__(self, is_global):
        np.random.seed(5)
        self.calls, self._draw = 0, np.random if is_global else np.random.RandomState(5)

    def __call__(self, x, y):
        self.calls += 1
        return x + self._draw.normal(0, 0.3, x.shape).astype("float32"), y

    def batch(self, index):
        rows = slice(SIZE * index, SIZE * (index + 1))
        return self(ROWS[rows], TARGETS[rows])


class Batches(keras.utils.PyDataset):
    def __init__(self, noise, strategy):
        super().__init__()
        self.noise = noise

    def __len__(self):
        return NUM_BATCHES

    def __getitem__(self, index):
        return self.noise.batch(index)


def from_generator(noise, strategy):
    def generate():
        yield from (noise.batch(index) for index in range(NUM_BATCHES))

    return known(tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE))


def read_ahead(noise, strategy):
    """More batches, of which another thread draws several while the step is verified."""

    def generate():
        for index in range(8 * NUM_BATCHES):
            # As long as it takes to trace a step, this thread is still drawing.
            time.sleep(0.02)
            yield noise.batch(index % NUM_BATCHES)

    dataset = tf.data.Dataset.from_generator(generate, output_signature=SIGNATURE)
    return known(dataset.prefetch(8 * NUM_BATCHES), 8 * NUM_BATCHES)


class Loader(DataAdapter):
    """Hands on data as those of Keras's for PyTorch's `DataLoader` and for Grain do."""

    num_batches, batch_size, has_partial_batch, partial_batch_size = NUM_BATCHES, SIZE, False, None

    def __init__(self, noise, strategy):
        self.noise = noise

    def get_tf_dataset(self):
        return from_generator(self.noise, None)


def known(dataset, number=NUM_BATCHES):
    return dataset.apply(tf.data.experimental.assert_cardinality(number))


def mapped(noise, strategy):
    def add(x, y):
        x, y = tf.numpy_function(noise, [x, y], [tf.float32, tf.float32])
        return tf.ensure_shape(x, (None, 4)), tf.ensure_shape(y, (None, 1))

    return tf.data.Dataset.from_tensor_slices((ROWS, TARGETS)).batch(SIZE).map(add)


class Step(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.term(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        return {"error": tf.reduce_mean(tf.square(self(x) - y))}

    def term(self, errors):
        return tf.reduce_mean(errors)


class Largest(Step):
    def term(self, errors):
        return tf.reduce_max(errors)


def train(
    num_replicas,
    make,
    is_global=False,
    model_of=Step,
    steps=1,
    validates=False,
    eager=False,
    **settings,
):
    """Returns the weights, the history, and how often noise was drawn."""
    strategy = create_strategy(num_replicas, **settings)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of()
        model.compile(keras.optimizers.Adam(0.05), steps_per_execution=steps, run_eagerly=eager)
    noise, more = Noise(is_global), {}
    if validates:
        more["validation_data"] = make(noise, strategy)
    data = make(noise, strategy)
    history = model.fit(data, epochs=3, verbose=0, **more).history
    again = model.fit(data, epochs=1, verbose=0).history
    return model.get_weights(), [*history.values(), *again.values()], noise.calls


def assert_same(found, expected):
    # Each draw changes those after it, so equal results come of equal draws; when `fit` returns, a
    # thread may still be about to read ahead.
    assert found[2] <= expected[2]
    for value, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]]):
        np.testing.assert_allclose(value, other, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_global", [False, True], ids=["own", "global"])
@pytest.mark.parametrize("make", [Batches, from_generator, mapped, Loader])
def test_no_batch_is_read_for_verification(make, is_global):
    expected = train(1, make, is_global)
    for verify in ("always", "never"):
        assert_same(train(2, make, is_global, verify=verify), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Batches, Loader])
def test_eager_steps_read_no_other_batch(make):
    # To find position tables the model is traced with the first batch that is drawn.
    assert_same(train(2, make, eager=True), train(1, make, eager=True))


@pytest.mark.slow
def test_numbers_that_another_thread_draws_are_not_drawn_again():
    assert_same(train(2, read_ahead, is_global=True), train(1, read_ahead, is_global=True))


@pytest.mark.slow
@pytest.mark.parametrize("make", [Batches, mapped])
@pytest.mark.parametrize("more", [{"validates": True}, {"steps": 3}], ids=str)
def test_nor_with_validation_or_several_steps_at_once(make, more):
    # With both data from one generator of random numbers, their order matters.
    assert_same(train(3, make, **more), train(1, make, **more))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [Batches, mapped])
def test_a_step_that_differs_is_told_before_its_first_update(make):
    with pytest.raises(ValueError, match="nothing has been trained yet"):
        train(2, make, model_of=Largest)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Batches, from_generator])
def test_such_a_step_is_replicated_from_its_first_update_on(make):
    with pytest.warns(UserWarning, match="Every replica computes"):
        found = train(2, make, model_of=Largest, on_difference="replicate")
    assert_same(found, train(1, make, model_of=Largest))


class Phase(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.term = Largest.term.__get__(self.model)
            self.model.make_train_function(force=True)


@pytest.mark.slow
def test_a_step_that_changes_is_verified_with_the_next_batch():
    for num_replicas in (1, 2):
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            model = Step()
            model.compile("sgd")
        noise = Noise(False)
        if num_replicas == 1:
            model.fit(mapped(noise, strategy), epochs=2, verbose=0, callbacks=[Phase()])
            continue
        with pytest.raises(ValueError, match="it was exact before it was changed"):
            model.fit(mapped(noise, strategy), epochs=2, verbose=0, callbacks=[Phase()])


class Predictor(keras.Sequential):
    """A model with a step of its own, which is verified."""

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data)


class Centred(Predictor):
    def predict_step(self, data):
        predictions = super().predict_step(data)
        return predictions - tf.reduce_mean(predictions)


def predictor(kind, num_replicas=2, **settings):
    with create_strategy(num_replicas, **settings).scope():
        model = kind([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def once():
    """A dataset that goes on where it was, as one of a queue does."""
    rows = iter(ROWS)
    spec = tf.TensorSpec((4,))
    return tf.data.Dataset.from_generator(lambda: rows, output_signature=spec).batch(SIZE)


def batches_of_rows():
    return ((ROWS[SIZE * index : SIZE * (index + 1)],) for index in range(NUM_BATCHES))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [keras.Sequential, Predictor])
def test_predict_loses_no_batch_of_data_that_are_read_once(kind):
    found = predictor(kind).predict(once(), verbose=0)
    np.testing.assert_allclose(found[:, 0], ROWS.sum(axis=1), atol=1e-5)


def test_predict_draws_random_numbers_as_on_one_device():
    first, second = (
        predictor(keras.Sequential, number).predict(Batches(Noise(False), None), verbose=0)
        for number in (1, 2)
    )
    np.testing.assert_allclose(first, second, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("make", [once, batches_of_rows])
def test_predict_is_verified_with_the_first_batch_that_it_draws(make):
    with pytest.raises(ValueError, match="`predict_step` must give"):
        predictor(Centred).predict(make(), verbose=0)
    model = predictor(Centred, on_difference="replicate")
    with pytest.warns(UserWarning, match="Every replica computes"):
        found = model.predict(make(), verbose=0)
    sums = ROWS.sum(axis=1).reshape(NUM_BATCHES, SIZE)
    expected = sums - sums.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, 0], expected.reshape(-1), atol=1e-5)


class Masked(keras.Model):
    """Takes a mask, or None, with its inputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x["rows"]) if x["mask"] is None else 1 / 0

    def train_step(self, data):
        return super().train_step(data)


def train_without(strategy, custom):
    def generate():
        while True:
            for index in range(NUM_BATCHES):
                # Two replicas of three get no row of the last one.
                rows = slice(SIZE * index, SIZE * index + (SIZE if index < 4 else 1))
                if custom:
                    yield {"rows": ROWS[rows], "mask": None}, TARGETS[rows]
                else:
                    yield ROWS[rows], TARGETS[rows], None

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Masked() if custom else keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(generate(), steps_per_epoch=NUM_BATCHES, epochs=2, verbose=0)
    loss = model.evaluate(generate(), steps=NUM_BATCHES, verbose=0)
    return [*model.get_weights(), loss, model.predict(generate(), steps=NUM_BATCHES, verbose=0)]


@pytest.mark.slow
@pytest.mark.parametrize("custom", [True, False])
def test_parts_of_a_generator_that_are_none_stay_so(custom):
    expected, actual = (train_without(create_strategy(n), custom) for n in (1, 3))
    for one, several in zip(expected, actual):
        np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-6)
