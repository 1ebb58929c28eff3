"""Losses and metrics that need the whole batch: one device's values, gradients and state."""

import functools
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from replicas import create_strategy

import tfmulti
from tfmulti.step import whole_batch

STEP_SIZE = 0.1


@keras.saving.register_keras_serializable("tests")
def root_of_mean(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def sum_of_some(y_true, y_pred):
    """As TensorFlow's tutorial on transformers has it."""
    some = ops.cast(y_true > 0, "float32")
    return ops.sum(ops.square(y_true - y_pred) * some) / ops.sum(some)


class Contrastive(keras.losses.Loss):
    """Calls `gather_batch` by itself, which must not gather what is whole."""

    def call(self, y_true, y_pred):
        y_true, y_pred = tfmulti.gather_batch((y_true, y_pred))
        logits = ops.matmul(y_true, ops.transpose(y_pred))
        losses = keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(logits)[0]), logits, from_logits=True
        )
        return ops.mean(losses)


@keras.saving.register_keras_serializable("tests")
class Largest(keras.metrics.Metric):
    """Begins with minus infinity, which no sum over replicas keeps right."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable((), keras.initializers.Constant(-np.inf), name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = ops.max(y_true - y_pred)
        self.largest.assign(ops.maximum(self.largest, found))

    def result(self):
        return self.largest

    def reset_state(self):
        self.largest.assign(-np.inf)


class Average(keras.metrics.Metric):
    """A moving average over batches, and their number; makes its state when it sees rows."""

    def __init__(self, name="average", **kwargs):
        super().__init__(name=name, **kwargs)
        self.average = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.average is None:
            self.average = self.add_variable((), "ones", name="average")
            self.number = self.add_variable((), "zeros", name="number")
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(ops.abs(y_true - y_pred)))
        self.number.assign_add(1)

    def result(self):
        return self.average * self.number


def rows(num_rows):
    random = np.random.RandomState(0)
    x = random.randn(num_rows, 4).astype("float32")
    y = random.uniform(-0.3, 1, (num_rows, 3)).astype("float32")
    return x, y, random.uniform(0, 2, num_rows).astype("float32")


def train(num_replicas, num_rows=43, loss="mse", metric=None, *, weighted=False, **options):
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    bare, remainder = options.pop("bare", False), options.pop("remainder", "uneven")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(STEP_SIZE)
        optimizer = optimizer if bare else tfmulti.DistributedOptimizer(optimizer)
        penalty = keras.regularizers.L2(0.01)
        model = keras.Sequential([layers.Dense(3, "sigmoid", kernel_regularizer=penalty)])
        metrics = [] if metric is None else [tfmulti.WholeBatchMetric(metric())]
        loss = loss if isinstance(loss, str) else tfmulti.WholeBatchLoss(loss())
        model.compile(optimizer, loss, metrics=metrics, **options)
    x, y, weights = rows(num_rows)
    data = (x, y, weights) if weighted else (x, y)
    feeds = [
        make(data, strategy, 16, remainder=remainder)
        for make in (tfmulti.distribute_train, tfmulti.distribute_eval)
    ]
    history = model.fit(feeds[0], validation_data=feeds[1], epochs=2, verbose=0).history
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), history


def assert_alike(found, reference):
    np.testing.assert_allclose(found[0], reference[0], rtol=0, atol=1e-6)
    for name, values in reference[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=2e-6, atol=1e-6, err_msg=name)


LOSSES = {
    "Dice": keras.losses.Dice,
    "Tversky": keras.losses.Tversky,
    "a root of a mean": lambda: root_of_mean,
    "a sum over some": lambda: sum_of_some,
    "contrastive": Contrastive,
    "a sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "a mean": lambda: "mse",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_the_whole_batch_are_one_devices(loss):
    assert_alike(train(3, 33, loss), train(1, 33, loss))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    "loss",
    [
        lambda: root_of_mean,
        lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    ],
    ids=["one number", "rows"],
)
def test_sample_weights_go_with_the_rows_that_are_gathered(loss, num_replicas):
    one, others = (train(n, 33, loss, weighted=True) for n in (1, num_replicas))
    assert_alike(others, one)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("loss", [keras.losses.Dice, lambda: root_of_mean])
def test_padding_leaves_losses_of_the_whole_batch(loss, num_replicas):
    assert_alike(train(num_replicas, 43, loss, remainder="pad"), train(1, 43, loss))


@pytest.mark.slow
def test_eager_steps_have_the_whole_batch_too():
    loss = keras.losses.Dice
    assert_alike(train(3, 33, loss, Largest, run_eagerly=True), train(1, 33, loss, Largest))


@pytest.mark.slow
def test_a_bare_optimizer_where_batches_are_even():
    loss = keras.losses.Dice
    assert_alike(train(2, 32, loss, bare=True), train(1, 32, loss, bare=True))


def hardest(y_true, y_pred):
    """The mean error of the hardest rows, more of them than a replica has."""
    errors = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
    return tf.reduce_mean(tf.math.top_k(errors, k=5).values)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [3, 2])
def test_a_loss_and_a_metric_of_more_rows_than_a_replica_has(num_replicas):
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        with create_strategy(num_replicas).scope():
            model = keras.Sequential([layers.Dense(3)])
            model.compile("sgd", hardest, metrics=[hardest])
        x, y, _ = rows(16)
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return np.concatenate([weight.ravel() for weight in model.get_weights()]), history

    assert_alike(fit(num_replicas), fit(1))


def squares(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def limited(y_true, y_pred):
    losses = squares(y_true, y_pred)
    return tf.minimum(losses, tf.reduce_mean(losses) + 0.5 * tf.math.reduce_std(losses))


class Normalized(keras.losses.Loss):
    """Weights of rows that are 1 on average."""

    def call(self, y_true, y_pred):
        weights = ops.max(ops.abs(y_true), axis=-1)
        return squares(y_true, y_pred) * weights / ops.mean(weights)


def of_pairs(y_true, y_pred):
    similar = tf.matmul(y_true, y_pred, transpose_b=True)
    return tf.reduce_logsumexp(similar, axis=1) - tf.linalg.diag_part(similar)


def each_row(y_true, y_pred):
    parts = tf.stack([y_true, y_pred], axis=1)
    return tf.map_fn(lambda pair: tf.reduce_mean(tf.square(pair[0] - pair[1])), parts)


def by_class(y_true, y_pred):
    weights = tf.gather(tf.constant([1.0, 2.0, 3.0]), tf.argmax(y_true, axis=-1))
    return squares(y_true, y_pred) * weights / tf.cast(tf.shape(y_true)[1], tf.float32)


def by_rank(y_true, y_pred):
    """An error counts as many times as its row has others above it."""
    errors = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
    order = tf.argsort(tf.argsort(errors, direction="DESCENDING"))
    return errors * tf.cast(order, errors.dtype)


COMBINE = {"limited": limited, "normalized": Normalized(), "pairs": of_pairs, "ranked": by_rank}
# It has the name and the module of Keras's loss.
named_as_keras = functools.wraps(keras.losses.mean_squared_error)
COMBINE["decorated"] = named_as_keras(lambda *given: limited(*given))
DO_NOT = {"squares": squares, "each row": each_row, "by class": by_class}


@pytest.fixture
def gathered(monkeypatch):
    """What was gathered: losses and metrics of which each row is computed alone gather nothing."""
    calls, gather = [], whole_batch.gather_batch
    monkeypatch.setattr(
        whole_batch, "gather_batch", lambda *args: calls.append(args) or gather(*args)
    )
    return calls


def fit_arrays(num_replicas, weighted=False, kind=keras.Sequential, labels=None, **compiled):
    keras.utils.set_random_seed(1)
    with create_strategy(num_replicas).scope():
        model = kind([layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), **compiled)
    x, y, weights = rows(19)
    y = y if labels is None else labels
    data = (x, y, weights) if weighted else (x, y)
    history = model.fit(
        x,
        y,
        sample_weight=weights if weighted else None,
        validation_data=data,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), history


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*COMBINE, *DO_NOT])
def test_losses_of_rows_that_need_other_rows_get_them(name, gathered):
    loss = {**COMBINE, **DO_NOT}[name]
    assert_alike(fit_arrays(3, loss=loss), fit_arrays(1, loss=loss))
    assert bool(gathered) == (name in COMBINE)


def beside_the_next(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_pred - tf.roll(y_true, 1, axis=0)), axis=-1)


def shares(y_true, y_pred):
    return tf.nn.softmax(y_pred[:, 0])


def own_error(y_true, y_pred):
    return tf.reduce_mean(tf.abs(y_true - tf.nn.softmax(y_pred)), axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("metric", [by_rank, beside_the_next, shares, own_error])
def test_metric_functions_of_rows_that_need_other_rows_get_them(metric, weighted, gathered):
    case = dict(weighted=weighted, loss="mse", metrics=[metric], weighted_metrics=[metric])
    assert_alike(fit_arrays(3, **case), fit_arrays(1, **case))
    assert bool(gathered) == (metric is not own_error)


# In each batch of 8, the last rows alone have labels of -1: 0 is a label of its own.
LABELS = np.where(np.arange(19)[:, None] % 8 > 5, -1.0, np.arange(57).reshape(19, 3) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hinge", "squared_hinge"])
def test_hinges_take_0_for_minus_1_by_the_labels_of_the_whole_batch(name):
    case = dict(weighted=True, loss=name, metrics=[name], weighted_metrics=[name], labels=LABELS)
    assert_alike(fit_arrays(3, **case), fit_arrays(1, **case))


class OfSingleRows(keras.Sequential):
    """Has numbers for its own rows to weigh their losses with."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = keras.losses.Hinge(reduction=None)(y, y_pred)
        return ops.mean(losses * ops.abs(x[:, 0]))


@pytest.mark.slow
def test_hinges_without_a_reduction_return_the_values_of_the_replicas_rows():
    case = dict(kind=OfSingleRows, labels=LABELS)
    assert_alike(fit_arrays(3, **case), fit_arrays(1, **case))


class Centred(keras.losses.MeanSquaredError):
    def call(self, y_true, y_pred):
        return super().call(y_true - ops.mean(y_true, axis=0), y_pred)


@pytest.mark.slow
def test_a_users_own_class_of_a_loss_of_kerass_gets_the_rows_that_it_needs():
    assert_alike(fit_arrays(3, loss=Centred()), fit_arrays(1, loss=Centred()))


STOCK_METRICS = {
    "dice": lambda: keras.losses.dice,
    "tversky": lambda: keras.losses.tversky,
    "a loss of the batch": keras.losses.Dice,
    "a loss": keras.losses.MeanSquaredError,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOCK_METRICS)
def test_losses_of_kerass_own_as_metrics_are_those_of_the_whole_batch(name):
    make = STOCK_METRICS[name]
    three, one = (fit_arrays(number, loss="mse", metrics=[make()]) for number in (3, 1))
    assert_alike(three, one)


def test_a_loss_that_fails_with_any_rows_says_so_of_the_rows_it_was_given():
    def wrong(y_true, y_pred):
        return tf.reduce_mean(tf.reshape(y_true, [-1, 3]) - tf.zeros([5, 2]))

    with create_strategy(2).scope():
        model = keras.Sequential([layers.Dense(3)])
        model.compile("sgd", wrong)
    with pytest.raises(Exception, match=r"must be equal|[Ii]ncompatible shapes") as caught:
        model.fit(*rows(16)[:2], batch_size=8, verbose=0)
    assert "4096" not in str(caught.value)


class Scalars(keras.Model):
    """Gives the loss one number for all rows, as a label or as a weight."""

    def __init__(self, labels, weight):
        super().__init__()
        self.dense, self.labels, self.weight = layers.Dense(2), labels, weight
        self.dice = keras.losses.Dice()

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        labels = y if self.labels is None else self.labels
        with tf.GradientTape() as tape:
            loss = self.dice(labels, tf.sigmoid(self(x)), sample_weight=self.weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    "scalars",
    [(None, 0.5), pytest.param((1.0, np.float32(0.5)), marks=pytest.mark.slow)],
    ids=["weight", "label and weight"],
)
def test_one_number_for_all_rows_is_not_gathered(scalars):
    def trained(num_replicas):
        keras.utils.set_random_seed(0)
        strategy = create_strategy(num_replicas, verify="never")
        with strategy.scope():
            model = Scalars(*scalars)
            model.compile("sgd")
        x = np.random.RandomState(0).rand(9, 3).astype("float32")
        model.fit(x, np.round(x[:, :2]), batch_size=9, verbose=0)
        return model.get_weights()

    for one, two in zip(trained(1), trained(2), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_without_it_keras_own_dice_is_one_devices_too():
    assert_alike(train(2, 32, loss="dice"), train(1, 32, loss="dice"))


@pytest.mark.slow
def test_circle_which_compares_all_pairs():
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            model = keras.Sequential([layers.Dense(3), layers.UnitNormalization()])
            optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(1e-3))
            model.compile(optimizer, tfmulti.WholeBatchLoss(keras.losses.Circle()))
        data = rows(43)[0], np.arange(43) % 5
        feed = tfmulti.distribute_train(data, strategy, 16)
        history = model.fit(feed, epochs=2, verbose=0).history
        return np.concatenate([weight.ravel() for weight in model.get_weights()]), history

    assert_alike(fit(3), fit(1))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_masks_are_gathered_with_the_predictions(num_replicas):
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        x = np.random.RandomState(0).randint(1, 9, (33, 6))
        x[np.arange(6) >= np.random.RandomState(1).randint(1, 7, 33)[:, None]] = 0
        with strategy.scope():
            model = keras.Sequential([layers.Embedding(9, 5, mask_zero=True), layers.Dense(3)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            metric = keras.metrics.SparseCategoricalAccuracy()
            model.compile(
                tfmulti.DistributedOptimizer(keras.optimizers.SGD(STEP_SIZE)),
                tfmulti.WholeBatchLoss(loss),
                weighted_metrics=[tfmulti.WholeBatchMetric(metric)],
            )
        feed = tfmulti.distribute_train((x, x % 3), strategy, 16)
        history = model.fit(feed, epochs=2, verbose=0).history
        return np.concatenate([weight.ravel() for weight in model.get_weights()]), history

    assert_alike(fit(num_replicas), fit(1))


class OwnAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """A class of the user's own, whose base applies the mask of the predictions."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.maximum(y_true, 0), y_pred, sample_weight)


def test_own_classes_of_metrics_see_the_masks_of_all_rows():
    def accuracy(num_replicas):
        keras.utils.set_random_seed(1)
        x = np.random.RandomState(0).randint(0, 4, (21, 6))
        y = np.random.RandomState(1).randint(0, 3, (21, 6))
        with create_strategy(num_replicas, verify="never").scope():
            model = keras.Sequential([layers.Embedding(9, 5, mask_zero=True), layers.Dense(3)])
            model.compile(loss="sparse_categorical_crossentropy", metrics=[OwnAccuracy()])
        return model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)

    assert accuracy(2) == pytest.approx(accuracy(1), abs=1e-6)


class NoisyTargets(keras.losses.Loss):
    """Draws random numbers: a second call in a step would shift all that follow."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, y_true, y_pred):
        noise = 0.1 * keras.random.normal(ops.shape(y_true), seed=self.seed)
        return ops.mean(ops.square(y_true + noise - y_pred), axis=-1)


def fit_with_noise(**settings):
    eager = settings.pop("run_eagerly", False)
    with create_strategy(2, **settings).scope():
        loss, model = NoisyTargets(), keras.Sequential([layers.Dense(3)])
        model.compile("sgd", loss, run_eagerly=eager)
    model.fit(*rows(16)[:2], batch_size=8, verbose=0)
    return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_calls_a_loss_that_draws_numbers_once(run_eagerly):
    loss = fit_with_noise(verify="never", run_eagerly=run_eagerly)
    # Its second number is that of the calls.
    np.testing.assert_array_equal(np.asarray(loss.seed.state.value), [3, 2])


@pytest.mark.slow
def test_such_a_loss_is_no_difference():
    fit_with_noise(on_difference="error")


METRICS = {
    "a largest": Largest,
    "a moving average": Average,
    "a function of one number": lambda: root_of_mean,
    "a sum": lambda: keras.metrics.MeanAbsoluteError(),
    "state made late": lambda: keras.metrics.F1Score(threshold=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_metrics_of_the_whole_batch_are_one_devices(metric):
    one, others = (train(n, 33, metric=metric) for n in (1, 3))
    assert len(one[1]) == 4
    assert_alike(others, one)


@pytest.mark.slow
def test_metrics_with_padding_and_weights():
    one = train(1, 43, metric=lambda: root_of_mean, weighted=True)
    for num_replicas in (1, 3):
        padded = train(
            num_replicas, 43, metric=lambda: root_of_mean, weighted=True, remainder="pad"
        )
        for name in ("root_of_mean", "val_root_of_mean"):
            np.testing.assert_allclose(padded[1][name], one[1][name], rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_one_of_several_outputs_can_have_such_a_loss():
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            inputs = keras.Input((4,))
            outputs = {name: layers.Dense(3, "sigmoid", name=name)(inputs) for name in "ab"}
            model = keras.Model(inputs, outputs)
            model.compile(
                tfmulti.DistributedOptimizer(keras.optimizers.SGD(STEP_SIZE)),
                {"a": tfmulti.WholeBatchLoss("dice"), "b": "mse"},
            )
        x, y, _ = rows(43)
        feed = tfmulti.distribute_train((x, {"a": y, "b": -y}), strategy, 16)
        history = model.fit(feed, epochs=2, verbose=0).history
        return np.concatenate([weight.ravel() for weight in model.get_weights()]), history

    assert_alike(fit(3), fit(1))


@pytest.mark.slow
def test_a_model_that_is_saved_with_them_is_loaded(tmp_path):
    path = tmp_path / "model.keras"
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        model.compile(
            "sgd",
            tfmulti.WholeBatchLoss(keras.losses.Tversky(alpha=0.3)),
            metrics=[tfmulti.WholeBatchMetric(Largest(name="far"))],
        )
    model.fit(*rows(8)[:2], verbose=0)
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.loss.loss.alpha == 0.3
    assert loaded.loss.name == "tversky"
    assert loaded.evaluate(*rows(8)[:2], verbose=0, return_dict=True).keys() == {"loss", "far"}
    metric = tfmulti.WholeBatchMetric(root_of_mean, name="root")
    again = tfmulti.WholeBatchMetric.from_config(metric.get_config())
    assert (again.name, again.metric.name) == ("root", "root_of_mean")


@pytest.mark.slow
def test_another_process_loads_it_where_the_class_is_named(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", tfmulti.WholeBatchLoss("dice"))
    model.save(tmp_path / "model.keras")
    code = (
        "import sys, keras; from tfmulti import WholeBatchLoss; "
        "print(keras.saving.load_model(sys.argv[1]).loss.loss.name)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.keras")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "dice"


class OfFour(keras.losses.Loss):
    """As of a variational autoencoder: neither labels nor weights."""

    def __call__(self, x, made, mean, log_variance):
        divergence = 1 + log_variance - mean**2 - tf.exp(log_variance)
        return tf.reduce_mean(tf.square(x - made)) - 0.5 * tf.reduce_mean(divergence)


class Variational(keras.Model):
    def __init__(self, by_name):
        super().__init__()
        self.divergence, self.by_name = OfFour(), by_name
        self.parts = [layers.Dense(2), layers.Dense(2), layers.Dense(4)]

    def call(self, x):
        mean, log_variance, made = self.parts[0](x), self.parts[1](x), self.parts[2]
        return made(mean), mean, log_variance

    def train_step(self, x):
        with tf.GradientTape() as tape:
            made, mean, log_variance = self(x)
            if self.by_name:
                loss = self.divergence(x, made, mean=mean, log_variance=log_variance)
            else:
                loss = self.divergence(x, made, mean, log_variance)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"value": loss}


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
def test_losses_may_take_other_arguments(by_name):
    seen = []
    for number in (1, 3):
        keras.utils.set_random_seed(1)
        with create_strategy(number).scope():
            model = Variational(by_name)
            model.compile(keras.optimizers.SGD(0.1))
        history = model.fit(rows(19)[0], batch_size=8, shuffle=False, verbose=0).history
        seen.append(np.concatenate([*map(np.ravel, [*model.get_weights(), *history.values()])]))
    np.testing.assert_allclose(seen[1], seen[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("number", [1, 2])
def test_losses_outside_of_replicas_are_those_of_the_rows(number):
    y, predicted = tf.constant([[0.0], [2.0]]), tf.constant([[1.0], [4.0]])
    each, weights = tf.constant([1.0, 4.0]), tf.constant([1.0, 0.5])
    with create_strategy(number).scope():
        assert float(keras.losses.MeanSquaredError()(y, predicted)) == 2.5
        average = tf.nn.compute_average_loss
        assert float(average(each, sample_weight=weights)) == 1.5
        assert float(average(each, sample_weight=weights, global_batch_size=4)) == 0.75
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="shape"):
            keras.losses.MeanSquaredError()([[0.0, 1.0]], [[1.0, 2.0, 3.0]])


def test_on_one_device_they_are_what_they_hold():
    y, predicted = tf.constant([[0.2], [0.9]]), tf.constant([[0.1], [0.7]])
    dice = keras.losses.Dice()
    assert float(tfmulti.WholeBatchLoss(dice)(y, predicted)) == float(dice(y, predicted))
    metric, held = tfmulti.WholeBatchMetric("mae"), keras.metrics.MeanAbsoluteError()
    for each in (metric, held):
        each.update_state(y, predicted)
    assert float(metric.result()) == float(held.result())
    metric.reset_state()
    assert float(metric.metric.count) == 0


@pytest.mark.parametrize("kind", [tfmulti.WholeBatchLoss, tfmulti.WholeBatchMetric])
@pytest.mark.parametrize("wrong", [None, 3, "nothing of this name"])
def test_what_is_no_loss_or_metric_is_refused(kind, wrong):
    with pytest.raises(ValueError, match="` must be a Keras .* Received: .* Use for example"):
        kind(wrong)


def test_a_loss_that_is_not_reduced_is_refused():
    with pytest.raises(ValueError, match="must reduce the whole batch to one number"):
        tfmulti.WholeBatchLoss(keras.losses.MeanSquaredError(reduction=None))


def test_labels_that_are_broadcast_are_compared_with_all_rows():
    """As where a `Flatten` was forgotten: one device compares each row with the labels of all."""
    y = np.array([1, 2, 3, 4, 7], "float32")
    x, seen = np.repeat(y[:, None, None], 2, axis=1), []
    for number in (1, 3):
        with create_strategy(number).scope():
            inner = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((2, 1)), inner])
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        logs = model.fit(x, y, batch_size=3, shuffle=False, verbose=0).history
        seen.append([*model.get_weights()[0].ravel(), *logs["loss"], *logs["mae"]])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-6)
