"""Steps that differ in parts: every replica computes them from the whole batch, as one device."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import ON, create_strategy

import tfmulti

SOFTMAX = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
REPLICATED = "Every replica computes `{}` from the whole global batch"


class Deciding(keras.Model):
    """Its step decides by the mean loss of the batch."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.dropout = keras.layers.Dropout(0.3)
        self.normalization = keras.layers.BatchNormalization()
        self.classes = keras.layers.Dense(3)

    def call(self, x, training=False):
        x = self.normalization(self.hidden(x), training=training)
        return self.classes(self.dropout(x, training=training))

    def loss_of(self, x, y):
        logits = tf.cast(self(x, training=True), "float32")
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = tf.reduce_sum(losses)
        return tf.where(tf.reduce_mean(losses) > 1.0, loss, 0.1 * loss)

    def loss_and_gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
            scaled = self.optimizer.scale_loss(loss)
        return loss, tape.gradient(scaled, self.trainable_variables)

    def train_step(self, data):
        x, y = data[:2]
        loss, gradients = self.loss_and_gradients(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        logs = {"own": loss}
        for metric in self.metrics:
            if metric.name == "accuracy":
                metric.update_state(y, self(x))
                logs["accuracy"] = metric.result()
        return logs

    def test_step(self, data):
        x, y = data[:2]
        return {"spread": tf.math.reduce_std(tf.cast(self(x), "float32"))}


class Noisy(Deciding):
    """TensorFlow's random numbers differ on every replica."""

    def loss_of(self, x, y):
        return super().loss_of(x + tf.random.normal(tf.shape(x), stddev=0.1), y)


class NoisyGradients(Deciding):
    def train_step(self, data):
        x, y = data[:2]
        loss, gradients = self.loss_and_gradients(x, y)
        gradients = [g + tf.random.normal(tf.shape(g), stddev=0.01) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


class ByHand(Deciding):
    def train_step(self, data):
        x, y = data[:2]
        loss, gradients = self.loss_and_gradients(x, y)
        for weight, gradient in zip(self.trainable_variables, gradients):
            weight.assign_sub(0.01 * gradient)
        return {"own": loss}


class InBranch(Deciding):
    """Takes gradients and updates in a branch."""

    def train_step(self, data):
        x, y = data[:2]

        def update():
            loss, gradients = self.loss_and_gradients(x, y)
            self.optimizer.apply(gradients, self.trainable_variables)
            return loss

        even = tf.equal(tf.cast(self.optimizer.iterations, "int32") % 2, 0)
        return {"own": tf.cond(even, update, lambda: self.loss_of(x, y))}


class InLoop(Deciding):
    """A tf.function with a loop in Python's words."""

    @tf.function
    def train_step(self, data):
        x, y = data[:2]
        total = tf.constant(0.0)
        for _ in tf.range(3):
            loss, gradients = self.loss_and_gradients(x, y)
            for weight, gradient in zip(self.trainable_variables, gradients):
                weight.assign_sub(0.01 * gradient)
            total += loss
        return {"own": total}


class Pair(Deciding):
    """Two optimizers."""

    def __init__(self):
        super().__init__()
        self.second = keras.optimizers.SGD(1e-3)
        self.critic = keras.layers.Dense(1)

    def train_step(self, data):
        x, y = data[:2]
        own = [*self.hidden.trainable_variables, *self.classes.trainable_variables]
        with tf.GradientTape(persistent=True) as tape:
            loss, other = self.loss_of(x, y), tf.reduce_sum(self.critic(x)) ** 2
        self.optimizer.apply(tape.gradient(loss, own), own)
        weights = self.critic.trainable_variables
        self.second.apply(tape.gradient(other, weights), weights)
        return {"own": loss, "other": other}


class Centred(keras.layers.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


def centred():
    inputs = keras.Input((8,))
    # The gradient of a bias would be rounding errors, which Adam amplifies.
    hidden = keras.layers.Dense(8, use_bias=False)(inputs)
    outputs = keras.layers.Dense(3)(Centred()(hidden))
    return keras.Model(inputs, outputs)


def adam(**settings):
    return lambda: keras.optimizers.Adam(0.01, **settings)


def wrapped(**settings):
    return lambda: tfmulti.DistributedOptimizer(adam(**settings)())


ALL = dict(use_ema=True, ema_overwrite_frequency=2, global_clipnorm=1.0, weight_decay=0.01)
COMPILED = dict(loss=SOFTMAX, metrics=["accuracy", "sparse_top_k_categorical_accuracy"])
CASES = {
    "a step": dict(make=Deciding),
    **({} if ON == "GPU" else {"an eager step": dict(make=Deciding, run_eagerly=True)}),
    "several steps a call": dict(make=Deciding, steps_per_execution=2),
    "random rows": dict(make=Noisy),
    "random gradients": dict(make=NoisyGradients),
    "updates by hand": dict(make=ByHand),
    "updates in a branch": dict(make=InBranch),
    "updates in a loop": dict(make=InLoop),
    "two optimizers": dict(make=Pair),
    "clipping, decay and averages": dict(make=Deciding, optimizer=adam(**ALL)),
    "a wrapped optimizer": dict(make=Deciding, optimizer=wrapped(clipnorm=0.5)),
    "half precision": dict(make=Deciding, policy="mixed_float16"),
    "bfloat16": dict(make=Deciding, policy="mixed_bfloat16"),
    "a layer": dict(make=centred, **COMPILED),
    "accumulation": dict(make=centred, optimizer=adam(gradient_accumulation_steps=2), **COMPILED),
}


@pytest.fixture(autouse=True)
def _policy():
    yield
    keras.mixed_precision.set_dtype_policy("float32")


def rows():
    rng = np.random.RandomState(0)
    return rng.rand(43, 8).astype("float32"), rng.randint(0, 3, 43)


def compiled(strategy, make, optimizer=None, policy="float32", **settings):
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_dtype_policy(policy)
    with strategy.scope():
        model = make()
        model.compile((optimizer or adam())(), **{"metrics": ["accuracy"], **settings})
    return model


def train(num_replicas, feed=None, **case):
    """Trains, validates and predicts; returns all that came of it."""
    strategy = create_strategy(num_replicas, on_difference="replicate")
    model = compiled(strategy, **case)
    x, y = rows()
    history = (feed or fit_arrays)(model, strategy, x, y)
    optimizers = [model.optimizer, getattr(model, "second", None)]
    slots = [v for each in optimizers if each is not None for v in each.variables]
    variables = [*model.variables, *slots]
    copies = [
        [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        for variable in variables
        if "seed" not in variable.path
    ]
    assert all((copy == each[0]).all() for each in copies for copy in each)
    seen = {f"weight {i}": each[0] for i, each in enumerate(copies)}
    seen |= {f"log {name}": np.array(values) for name, values in history.items()}
    return seen | {"predictions": model.predict(x, verbose=0, batch_size=16)}


def fit_arrays(model, strategy, x, y):
    settings = {"batch_size": 16, "epochs": 2, "verbose": 0}
    return model.fit(x, y, validation_data=(x[:9], y[:9]), **settings).history


def assert_same(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        pair = [tf.cast(each, "float64").numpy() for each in (found[name], value)]
        np.testing.assert_allclose(*pair, tolerance, tolerance, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_devices_result(name):
    expected = train(1, **CASES[name])
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        found = train(3, **CASES[name])
    tolerance = 2e-3 if "policy" in CASES[name] else 1e-5
    assert_same(found, expected, tolerance)


def fit_dataset(model, strategy, x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)
    return model.fit(data, epochs=2, verbose=0).history


def fit_pipeline(remainder):
    def fit(model, strategy, x, y):
        data = tfmulti.distribute_train((x, y), strategy, 16, remainder=remainder)
        return model.fit(data, epochs=2, verbose=0).history

    return fit


def fit_batches(model, strategy, x, y):
    return {"own": [np.ravel(model.train_on_batch(x[:n], y[:n]))[0] for n in (13, 13, 2)]}


FEEDS = {
    "a dataset": fit_dataset,
    "a pipeline": fit_pipeline("uneven"),
    "a padded pipeline": fit_pipeline("pad"),
    "train_on_batch": fit_batches,
}


@pytest.mark.slow
@pytest.mark.parametrize("feed", FEEDS)
def test_any_feed_gives_one_devices_result(feed):
    expected = train(1, make=Deciding, feed=FEEDS[feed])
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        found = train(3, make=Deciding, feed=FEEDS[feed])
    assert_same(found, expected, 1e-5)


class CentredPredictions(keras.Sequential):
    def call(self, inputs, training=None):
        outputs = super().call(inputs, training=training)
        return outputs - tf.reduce_mean(outputs, axis=0)


@pytest.mark.slow
def test_predict_and_evaluate_give_one_devices_result():
    seen = []
    for num_replicas in (1, 3):
        strategy = create_strategy(num_replicas, on_difference="replicate")
        make = lambda: CentredPredictions([keras.layers.Dense(3)])  # noqa: E731
        model = compiled(strategy, make, loss=SOFTMAX)
        x, y = rows()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            predictions = model.predict(x[:20], batch_size=8, verbose=0)
            numbers = model.evaluate(x, y, batch_size=16, verbose=0)
        told = " ".join(str(each.message) for each in caught)
        assert [REPLICATED.format(f"{kind}_step") in told for kind in ("predict", "test")] == [
            num_replicas > 1
        ] * 2
        seen.append({"predictions": predictions, "numbers": np.array(numbers)})
    assert_same(seen[1], seen[0])


@pytest.mark.slow
def test_the_warning_says_what_differs_and_how_to_be_faster():
    model = compiled(create_strategy(2, on_difference="replicate"), Deciding)
    with pytest.warns(UserWarning) as caught:
        model.fit(*rows(), batch_size=16, verbose=0)
    told = " ".join(
        next(str(w.message) for w in caught if "computes `train" in str(w.message)).split()
    )
    assert "because in 2 parts it differs from one device" in told
    assert "so are the time and the memory that a step takes. Received, in parts: own: " in told
    assert "Likely cause: " in told and "To be faster: " in told
    assert told.endswith('Set `on_difference="error"` in create_strategy to stop instead.')
    # Every replica decides by all rows now: a warning of local decisions would be wrong.
    assert not any("decides by a number" in str(w.message) for w in caught)


@pytest.mark.slow
def test_it_lasts_until_the_next_compile():
    strategy = create_strategy(2, on_difference="replicate")
    model = compiled(strategy, centred, loss=SOFTMAX)
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        model.fit(*rows(), batch_size=16, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Every replica")
        model.fit(*rows(), batch_size=16, verbose=0)
    with strategy.scope():
        model.compile(loss=SOFTMAX, optimizer="sgd")
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        model.fit(*rows(), batch_size=16, verbose=0)


class Counting(Deciding):
    """A Python number that each replica of a process changes: no replica can be one device."""

    steps = 0

    def train_step(self, data):
        self.steps += 1
        return super().train_step(data)


@pytest.mark.slow
def test_what_replicas_cannot_compute_alike_is_an_error():
    make = lambda: Counting()  # noqa: E731
    model = compiled(create_strategy(2, on_difference="replicate"), make, run_eagerly=True)
    model.steps = 0
    with pytest.raises(ValueError, match="A Python attribute that `train_step` changes"):
        model.fit(*rows(), batch_size=16, verbose=0)


class Drifting(Deciding):
    """Random numbers reach the weights beside the gradients."""

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.classes.trainable_variables:
            weight.assign_add(tf.random.normal(tf.shape(weight), stddev=0.01))
        return logs


@pytest.mark.slow
def test_replicas_never_hold_different_weights():
    model = compiled(create_strategy(2, on_difference="replicate"), Drifting)
    with pytest.raises(
        ValueError,
        match="Computing the whole batch on every replica does not help: it differs there too",
    ):
        model.fit(*rows(), batch_size=16, verbose=0)


@pytest.mark.slow
def test_nothing_is_said_of_local_batch_statistics_that_are_one_devices():
    model = compiled(create_strategy(2, on_difference="replicate"), Deciding)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*rows(), batch_size=16, verbose=0)
    told = " ".join(str(each.message) for each in caught)
    assert REPLICATED.format("train_step") in told
    assert "not synchronized" not in told


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="`on_difference` must be one of replicate, error"):
        create_strategy(2, on_difference="warn")


class Reading(keras.Model):
    """Sums over the rows of whatever tensor it gets."""

    def __init__(self, to_numbers):
        super().__init__()
        self.to_numbers = to_numbers
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scale * self.to_numbers(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


def of_words(words):
    words = tf.strings.lower(words)
    hashed = tf.strings.to_hash_bucket_fast(tf.reshape(words, [-1]), 97)
    return tf.cast(hashed, "float32") / 97


def of_ragged_words(words):
    hashed = tf.strings.to_hash_bucket_fast(words, 97)
    return tf.reduce_sum(tf.cast(hashed, "float32") / 97, axis=-1)


WORDS = ["Ä", "", "two words", "Ω" * 40, "b\0c"]
WORDS = [WORDS[i % 5] + str(i) for i in range(19)]
LISTS = [list(range(i % 4)) for i in range(19)]
PARTS = {
    "strings": (lambda: tf.constant(WORDS), of_words),
    "ragged": (
        lambda: tf.ragged.constant(LISTS, dtype=tf.float32),
        lambda x: tf.reduce_sum(x, axis=-1),
    ),
    "ragged twice": (
        lambda: tf.ragged.constant([[each, [1]] for each in LISTS], dtype=tf.float32),
        lambda x: tf.reduce_sum(x, axis=[1, 2]),
    ),
    "ragged strings": (
        lambda: tf.ragged.constant([[WORDS[i]] * (i % 3) for i in range(19)]),
        of_ragged_words,
    ),
    "sparse": (
        lambda: tf.sparse.from_dense([[float(i % 3), 0.0, i * 1.0] for i in range(19)]),
        lambda x: tf.sparse.reduce_sum(x, axis=1),
    ),
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", PARTS)
def test_strings_ragged_and_sparse_tensors_are_gathered(kind):
    def fit(num_replicas):
        make, to_numbers = PARTS[kind]
        strategy = create_strategy(num_replicas, on_difference="replicate")
        with strategy.scope():
            model = Reading(to_numbers)
            model.compile(keras.optimizers.SGD(1e-3))
        data = tf.data.Dataset.from_tensor_slices((make(), tf.linspace(0.0, 1.0, 19))).batch(8)
        history = model.fit(data, epochs=2, verbose=0, shuffle=False).history
        return {"scale": model.scale.numpy(), "own": np.array(history["own"])}

    expected = fit(1)
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        found = fit(3)
    assert_same(found, expected)


class OfTwoParts(Reading):
    """The mean over labelled rows, and the sum over rows without a label."""

    def train_step(self, data):
        labelled, others = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(labelled)) + tf.reduce_sum(tf.square(self(others)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss, "large": loss > 0.5, "rows": tf.shape(others)[0]}


class OfKnownRows(Reading):
    """Can be traced for a known number of rows only."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            pairs = tf.matmul(self(x), self(x), transpose_b=True)
            loss = tf.reduce_sum(tf.square(pairs - tf.eye(x.shape[0])))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


def two_parts():
    """The last batch has 1 and 8 rows: all replicas but one have none of the first part."""
    parts = [
        tf.data.Dataset.from_tensor_slices(tf.random.stateless_uniform([n, 1], [0, n]))
        for n in (22, 47)
    ]
    return tf.data.Dataset.zip((parts[0].batch(7), parts[1].batch(13)))


def known_rows():
    x = tf.random.stateless_uniform([24, 2], [0, 1])
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(6, drop_remainder=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "data"), [(OfTwoParts, two_parts), (OfKnownRows, known_rows)], ids=["parts", "known"]
)
def test_rows_of_every_part_and_known_numbers_of_rows(make, data):
    def fit(num_replicas):
        strategy = create_strategy(num_replicas, on_difference="replicate")
        with strategy.scope():
            model = make(lambda x: x)
            model.compile(keras.optimizers.SGD(1e-2))
        seen_logs = []
        each = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen_logs.append(logs)
        )
        model.fit(data(), verbose=0, shuffle=False, callbacks=[each])
        seen = {
            f"{i} {key}": np.float64(v) for i, log in enumerate(seen_logs) for key, v in log.items()
        }
        return seen | {"scale": model.scale.numpy()}

    expected = fit(1)
    with pytest.warns(UserWarning, match=REPLICATED.format("train_step")):
        found = fit(3)
    assert_same(found, expected)


class OfGroups(keras.layers.Layer):
    """Normalizes groups of rows, as ghost batch normalization does; rows must divide into them."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def call(self, x):
        groups = tf.reshape(x, [-1, self.rows, x.shape[-1]])
        groups -= tf.reduce_mean(groups, axis=1, keepdims=True)
        return tf.reshape(groups, tf.shape(x))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["sequential", "own call"])
@pytest.mark.parametrize(("num_replicas", "is_split"), [(3, False), (2, True)])
def test_a_layer_with_groups_of_rows(num_replicas, is_split, kind):
    x, y = (part[:32] for part in rows())

    def train(number):
        keras.utils.set_random_seed(3)
        strategy = create_strategy(number, on_difference="replicate")
        with strategy.scope():
            parts = [keras.layers.Dense(5), OfGroups(8), keras.layers.Dense(1)]
            model = keras.Sequential(parts) if kind == "sequential" else Chain(parts)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights = dict(enumerate(model.get_weights()))
        return weights, [str(each.message) for each in caught]

    (expected, _), (found, told) = train(1), train(num_replicas)
    assert_same(found, expected)
    assert not any("not verified" in text for text in told)
    assert any("Every replica computes" in text for text in told) != is_split


@pytest.mark.slow
@pytest.mark.parametrize("on_difference", ["error", "replicate"])
def test_a_step_that_no_part_of_a_batch_can_run_is_told_of_in_its_own_words(on_difference):
    with create_strategy(3, on_difference=on_difference).scope():
        model = keras.Sequential([keras.layers.Dense(5), OfGroups(8), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = (part[:32] for part in rows())
    fit = functools.partial(model.fit, x, y, batch_size=16, verbose=0)
    own = r"Received.*: ValueError in OfGroups.call\(\): Dimension size must be evenly divisible"
    if on_difference == "error":
        with pytest.raises(ValueError, match=f"must run on a part of a batch.*{own}.* Let it run"):
            fit()
        assert model.optimizer.iterations == 0
    else:
        with pytest.warns(UserWarning, match=f"it cannot run.*{own}.*To be faster: let the step"):
            fit()


class Chain(keras.Model):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x
