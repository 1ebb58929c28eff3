import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti import keras_compat


def train(num_replicas, make_model, data, remainder="uneven", **compiled):
    """Two epochs of 33 examples in batches of 16; gives weights and history."""
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = make_model()
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)), **compiled)
    history = model.fit(
        tfmulti.distribute_train(data, strategy, 16, seed=3, remainder=remainder),
        validation_data=tfmulti.distribute_eval(data, strategy, 16),
        epochs=2,
        verbose=0,
    ).history
    return np.concatenate([w.ravel() for w in model.get_weights()]), history


def assert_one_devices_result(make_model, data, **compiled):
    weights, history = train(1, make_model, data, **compiled)
    others, logs = train(3, make_model, data, **compiled)
    np.testing.assert_allclose(others, weights, rtol=0, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3], ids=["of arrays", "with weights"])
def test_rows_are_weighed_in_float64_where_models_compute_in_it(parts):
    """Shares such as 5/11 would be rounded in float32: 1e-9 of each update."""
    keras.config.set_floatx("float64")
    try:
        data = tuple(part.astype("float64") for part in rows(43)[:parts])
        one, three = (train(number, dense, data, loss="mse") for number in (1, 3))
        np.testing.assert_allclose(three[0], one[0], rtol=0, atol=1e-15)
        np.testing.assert_allclose(three[1]["loss"], one[1]["loss"], rtol=1e-7)
    finally:
        keras.config.set_floatx("float32")


def rows(count=33):
    rng = np.random.RandomState(0)
    x, y = rng.randn(count, 4).astype("float32"), rng.randn(count, 1).astype("float32")
    return x, y, rng.uniform(0, 2, count).astype("float32")


def dense():
    penalty = keras.regularizers.L2(0.01)
    return keras.Sequential([keras.layers.Dense(1, kernel_regularizer=penalty)])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sum", "mean", "mean_with_sample_weight"])
def test_reductions_give_one_devices_result(reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    if reduction == "sum":
        x, y, weights = rows()
        data = (x, y, weights * 0.1)
    else:
        data = rows()
    assert_one_devices_result(dense, data, loss=loss, weighted_metrics=["mae"])


@pytest.mark.slow
def test_zero_weights_count_in_the_mean():
    x, y, weights = rows()
    weights[::3] = 0
    assert_one_devices_result(dense, (x, y, weights), loss="mse", weighted_metrics=["mae"])


@pytest.mark.slow
def test_a_loss_that_gives_one_number():
    def loss(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred))

    assert_one_devices_result(dense, rows()[:2], loss=loss)


@pytest.mark.slow
def test_a_keras_loss_on_outputs_without_a_last_axis():
    def flat():
        return keras.Sequential([keras.layers.Dense(1), keras.layers.Reshape(())])

    x, y, _ = rows()
    assert_one_devices_result(flat, (x, y[:, 0]), loss="mse")


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduction",
    [
        "mean_with_sample_weight",
        pytest.param("sum", marks=pytest.mark.slow),
        pytest.param("sum_over_batch_size", marks=pytest.mark.slow),
    ],
)
def test_masks_give_one_devices_result(reduction):
    rng = np.random.RandomState(0)
    x = rng.randint(1, 9, (33, 6))
    x[np.arange(6) >= rng.randint(1, 7, 33)[:, None]] = 0
    y = rng.randint(0, 3, (33, 6))

    def tagger():
        return keras.Sequential(
            [
                keras.layers.Embedding(9, 5, mask_zero=True),
                keras.layers.LSTM(4, return_sequences=True),
                keras.layers.Dense(3),
            ]
        )

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    weights = np.full(y.shape, 0.05, "float32")
    assert_one_devices_result(tagger, (x, y, weights), loss=loss, weighted_metrics=["accuracy"])


def test_weights_of_padding_rows_that_do_not_fit_the_losses_are_told_on_one_device_too():
    table = keras.layers.Embedding(9, 3, mask_zero=True)
    data = np.ones((33, 6), int), np.ones((33, 6), int)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.raises(ValueError, match="sample weights must have the shape of the losses"):
        train(1, lambda: keras.Sequential([table]), data, "pad", loss=loss)


# Weights of a loss of the given shape, without the axis of rows: None for one number.
RANKS = {
    "weights (B, 1), mask (B,)": ((), (1,), (), "mean_with_sample_weight"),
    "weights (B,), mask (B, 1)": ((1,), (), (1,), "mean_with_sample_weight"),
    "weights (B, 1), mask (B, T)": ((3,), (1,), (3,), "mean_with_sample_weight"),
    "one weight": ((), None, None, "mean_with_sample_weight"),
    "one weight and a mask": ((3,), None, (3,), "mean_with_sample_weight"),
    "one weight of a sum": ((3,), None, None, "sum"),
}


class OfRanks(keras.Model):
    """Gives losses weights and masks of all ranks that go together."""

    def __init__(self):
        super().__init__()
        self.factor = self.add_weight(shape=(), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor

    def train_step(self, rows):
        logs = {}
        for name, (values, weights, mask, reduction) in RANKS.items():
            with tf.GradientTape() as tape:
                predicted = self(tf.reshape(rows, [-1, 3])[:, : sum(values) or 1])
                predicted = tf.reshape(predicted, [-1, *values, 1])
                if mask is not None:
                    valid = tf.reshape(rows[:, : sum(mask) or 1] > 0.5, [-1, *mask])
                    keras_compat.set_mask(predicted, valid)
                given = 0.5 if weights is None else tf.reshape(rows[:, 0] + 1, [-1, *weights])
                loss = keras.losses.MeanSquaredError(reduction=reduction)
                loss = loss(0.1 * predicted, predicted, sample_weight=given)
            [gradient] = tape.gradient(loss, [self.factor])
            logs |= {name: loss, f"gradient, {name}": tf.identity(gradient)}
        return logs


@pytest.mark.slow
def test_weights_and_masks_of_all_ranks():
    x = np.random.RandomState(1).rand(7, 3).astype("float32")

    def logs(num_replicas):
        with create_strategy(num_replicas, verify="never").scope():
            model = OfRanks()
            model.compile("sgd")
        return model.fit(x, batch_size=7, shuffle=False, verbose=0).history

    one, three = logs(1), logs(3)
    for name in one:
        np.testing.assert_allclose(three[name], one[name], rtol=1e-5, err_msg=name)


def test_padded_data_do_not_change_what_weights_a_later_batch_may_have():
    strategy = create_strategy(1)
    x, y = np.ones((5, 5, 3), "float32"), np.zeros((5, 5, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((5, 3)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    model.predict(tfmulti.distribute_eval((x, y), strategy, 4, remainder="pad"), verbose=0)
    expected = np.mean(np.square(model(x)))
    # Keras multiplies along the last axis.
    np.testing.assert_allclose(model.test_on_batch(x, y, np.ones(5)), expected, rtol=1e-6)


@pytest.mark.slow
def test_several_outputs_with_loss_weights():
    def two():
        inputs = keras.Input((4,))
        outputs = {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(1)(inputs)}
        return keras.Model(inputs, outputs)

    x, y, _ = rows()
    data = (x, {"a": y, "b": -y})
    losses = {"a": "mse", "b": keras.losses.Huber(reduction="sum")}
    settings = {"loss": losses, "loss_weights": {"a": 0.7, "b": 0.01}}
    assert_one_devices_result(two, data, **settings)
    reference = train(1, two, data, **settings)[1]["a_loss"]
    # Padded batches have a known size, which Keras takes for the weight of each call.
    padded = [train(n, two, data, remainder="pad", **settings)[1]["a_loss"] for n in (1, 2)]
    np.testing.assert_allclose(padded[1], padded[0], rtol=1e-6)
    assert len(reference) == len(padded[0])


def test_the_log_of_an_outputs_loss_that_is_not_reduced():
    """Keras counts each row by itself there; the last batch has one row for three replicas."""

    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        with create_strategy(num_replicas).scope():
            inputs = keras.Input((4,))
            outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
            model = keras.Model(inputs, outputs)
            losses = {"a": keras.losses.MeanSquaredError(reduction="none"), "b": "mae"}
            model.compile("sgd", losses)
        x, y, _ = rows()
        logs = model.fit(x, {"a": y, "b": y}, batch_size=16, shuffle=False, verbose=0).history
        return [logs[name][0] for name in ("a_loss", "b_loss")]

    np.testing.assert_allclose(fit(3), fit(1), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remainder", ["pad", None], ids=["padded", "plain data after it"])
def test_weights_of_rows_go_with_losses_of_one_step(remainder):
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        x, y, weights = rows()
        data = x[:, None], y[:, None], weights
        feed = tfmulti.distribute_train(data, strategy, 16, remainder="pad")
        if remainder is None:
            feed = tf.data.Dataset.from_tensor_slices(data).batch(16)
        return model.fit(feed, verbose=0).history["loss"]

    np.testing.assert_allclose(fit(2), fit(1), rtol=1e-6)


class CustomStep(keras.Model):
    """A train_step that averages by itself, or with a Keras loss, and never calls scale_loss."""

    def __init__(self, loss_fn):
        super().__init__()
        self.dense, self.loss_fn = keras.layers.Dense(1), loss_fn
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_fn(y, self(x))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(tf.square(y - self(x)))
        return {"loss": self.tracker.result()}

    test_step = keras.Model.test_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_fn",
    [lambda y, p: tf.reduce_mean(tf.square(y - p)), keras.losses.MeanSquaredError()],
    ids=["by itself", "a Keras loss"],
)
def test_a_train_step_without_scale_loss(loss_fn):
    assert_one_devices_result(lambda: CustomStep(loss_fn), rows()[:2], loss="mse")


class OwnTracker(keras.Sequential):
    """Its own metric, weighted by the number of rows, has the name of Keras's in the logs."""

    def __init__(self, layers):
        super().__init__(layers)
        self.tracker = keras.metrics.Mean(name="own")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self.tracker.result()}


@pytest.mark.slow
def test_a_metric_that_is_weighted_by_rows_and_logged_by_another_name():
    assert_one_devices_result(lambda: OwnTracker([keras.layers.Dense(1)]), rows()[:2], loss="mse")


class CountsHalves(keras.Sequential):
    """Counts a number of another dtype than the metric's in each step."""

    def __init__(self, dtype):
        super().__init__([keras.layers.Dense(1)])
        self.tracker, self.half = keras.metrics.Sum(name="own"), tf.constant(0.5, dtype)

    def train_step(self, data):
        logs = super().train_step(data)
        self.tracker.update_state(self.half)
        return {**logs, "own": self.tracker.result()}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_sum_counts_a_number_of_any_dtype_once_in_a_step(dtype):
    assert_one_devices_result(lambda: CountsHalves(dtype), rows()[:2], loss="mse")


def test_a_bare_optimizer_keeps_keras_scaling():
    # Whole, even batches: a bare optimizer is right too, as in stock Keras.
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            model = dense()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(*rows(32)[:2], batch_size=16, epochs=2, shuffle=False, verbose=0)
        return np.concatenate([w.ravel() for w in model.get_weights()]), history.history["loss"]

    for one, two in zip(fit(1), fit(2), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-6)


class Adds(keras.layers.Layer):
    """Adds a loss of its own, reduced over the rows as told."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(tf.square(x)))
        return x


def adding(reduce):
    return lambda: keras.Sequential([keras.layers.Dense(3), Adds(reduce), keras.layers.Dense(1)])


@pytest.mark.slow
def test_a_mean_that_is_added():
    assert_one_devices_result(adding(tf.reduce_mean), rows()[:2], loss="mse")


@pytest.mark.slow
def test_a_sum_that_is_added_is_refused():
    with pytest.raises(ValueError, match="add_loss that sums over the batch, in Adds"):
        train(2, adding(tf.reduce_sum), rows()[:2], loss="mse")


@pytest.mark.slow
def test_losses_of_rows_that_are_added_are_exact_as_the_error_advises():
    """Keras adds a vector up, as in keras.io's CTCLayer."""

    def of_rows(squares):
        return 0.1 * tf.reduce_mean(squares, axis=-1)

    with pytest.raises(ValueError, match=r"add_loss\(tf.reduce_sum\(tfmulti.gather_batch\(losses"):
        train(2, adding(of_rows), rows()[:2], loss="mse")

    def advised(squares):
        return tf.reduce_sum(tfmulti.gather_batch(of_rows(squares)))

    assert_one_devices_result(adding(advised), rows()[:2], loss="mse")
    one = train(1, adding(of_rows), rows()[:2], loss="mse")
    np.testing.assert_allclose(train(2, adding(advised), rows()[:2], loss="mse")[0], one[0], 1e-5)
