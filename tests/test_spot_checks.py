"""A verified step is compared with one device again amid the training."""

import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy, not_on_gpu

import tfmulti
from tfmulti import keras_compat, marks, topology, verification
from tfmulti.step.digests import fibonacci
from tfmulti.step.samples import Samples
from tfmulti.strategies import spot_checks

NUM_ROWS, BATCH = 64, 8
GENERATOR = np.random.default_rng(0)
ROWS = GENERATOR.normal(size=(NUM_ROWS, 4)).astype("float32")
TARGETS = GENERATOR.normal(size=(NUM_ROWS, 3)).astype("float32")
# More numbers than are looked at when an epoch begins.
NUM_SETTINGS = 5000


@pytest.fixture(autouse=True)
def _enough_time(request, monkeypatch):
    """Makes all checks that are due, however slow the machine is."""
    if "small_part_of_the_time" not in request.node.name:
        monkeypatch.setattr(spot_checks, "_OF_FIRST", 1000.0)


class Step(keras.Model):
    """A step with a term of the whole batch, of which a setting decides."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or keras.layers.Dense(3)
        self.settings = tf.Variable(tf.zeros(NUM_SETTINGS), trainable=False)

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y)) + self.settings[7] * self.term(outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def term(self, outputs):
        return tf.reduce_max(outputs)


class Switch(keras.callbacks.Callback):
    """Sets the setting after a step in the middle of an epoch."""

    def __init__(self, after):
        super().__init__()
        self.after, self.steps = after, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.after:
            self.model.settings.assign(tf.ones(NUM_SETTINGS))


def arrays(strategy):
    return {"x": ROWS, "y": TARGETS, "batch_size": BATCH, "shuffle": False}


def dataset(strategy):
    return {"x": tf.data.Dataset.from_tensor_slices((ROWS, TARGETS)).batch(BATCH)}


def validated(strategy):
    return arrays(strategy) | {"validation_data": (ROWS[:20], TARGETS[:20])}


def distributed(strategy):
    return {"x": tfmulti.distribute_train((ROWS, TARGETS), strategy, BATCH)}


def fit(
    num_replicas,
    make=Step,
    feed=arrays,
    callbacks=(),
    optimizer="sgd",
    epochs=3,
    compiled=None,
    **settings,
):
    strategy = create_strategy(num_replicas, **settings)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(optimizer() if callable(optimizer) else optimizer, **(compiled or {}))
    history = model.fit(**feed(strategy), epochs=epochs, callbacks=[*callbacks], verbose=0)
    return model, history.history


@pytest.mark.slow
@pytest.mark.parametrize("feed", [arrays, dataset, distributed])
def test_a_term_that_begins_amid_an_epoch_is_told(feed):
    with pytest.raises(ValueError, match="this held on the first rows, but not 13 steps") as e:
        fit(3, feed=feed, callbacks=[Switch(after=10)])
    assert "Received: loss:" in str(e.value) or "weight" in str(e.value)
    assert "one step, of 8 rows" in str(e.value)


class FewSettings(Step):
    """More settings than are varied before the first step, and few enough to be looked at."""

    def __init__(self):
        super().__init__()
        self.settings = tf.Variable(tf.zeros(12), trainable=False)


class Window(keras.callbacks.Callback):
    """Sets the settings for three steps of the third epoch, between two checks that are due."""

    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.steps in (17, 20):
            self.model.settings.assign(tf.ones(12) if self.steps == 17 else tf.zeros(12))
        self.steps += 1


@pytest.mark.slow
def test_what_a_callback_sets_for_three_steps_is_told_before_the_first_of_them():
    window = Window()
    with pytest.raises(ValueError, match="but not 17 steps later"):
        fit(2, FewSettings, callbacks=[window])
    assert window.model.optimizer.iterations.numpy() == 17


def test_what_changes_often_is_compared_and_read_more_and_more_rarely(monkeypatch):
    with create_strategy(2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        setting = tf.Variable([0.0, 0.0], trainable=False)
    handle = setting.values[0].handle
    marks.SETTINGS.set(model, [(handle, keras_compat.read_handle(handle))])
    changes = spot_checks._Changes(
        types.SimpleNamespace(model=model, kind="train", strategy=model.distribute_strategy)
    )
    reads, read_handle = [], keras_compat.read_handle
    monkeypatch.setattr(keras_compat, "read_handle", lambda h: reads.append(h) or read_handle(h))
    assert not changes.are_new() and not reads
    setting.assign([0.0, 0.0])
    assert not changes.are_new() and len(reads) == 1
    due = []
    for number in range(1, 101):
        setting.assign_add([1.0, 0.0])
        if changes.are_new():
            due.append(number)
    assert due == [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    assert len(reads) == 1 + len(due)


@pytest.mark.slow
def test_what_a_callback_sets_for_three_steps_trains_as_on_one_device():
    (one, history), callbacks = fit(1, FewSettings, callbacks=[Window()]), [Window()]
    with pytest.warns(UserWarning, match="From now on every replica .* 17 steps after"):
        many, other = fit(2, FewSettings, callbacks=callbacks, on_difference="replicate")
    np.testing.assert_allclose(other["loss"], history["loss"], atol=1e-6)
    for value, expected in zip(many.get_weights(), one.get_weights()):
        np.testing.assert_allclose(value, expected, atol=1e-6)


class AtEpoch(keras.callbacks.Callback):
    """Keeps the weights with which the last epoch begins."""

    weights: list = []

    def on_epoch_begin(self, epoch, logs=None):
        AtEpoch.weights = self.model.get_weights()


def test_from_then_on_every_replica_computes_the_whole_batch():
    with pytest.warns(UserWarning, match="From now on every replica .* 13 steps after") as caught:
        callbacks = [Switch(after=10), AtEpoch()]
        model, _ = fit(2, callbacks=callbacks, on_difference="replicate")
    assert sum("From now on" in str(w.message) for w in caught) == 1
    # The last epoch goes on from there as one device would.
    one, _ = fit(1, epochs=0)
    one.set_weights(AtEpoch.weights)
    one.settings.assign(tf.ones(NUM_SETTINGS))
    one.fit(**arrays(None), verbose=0)
    for value, other in zip(model.get_weights(), one.get_weights()):
        np.testing.assert_allclose(value, other, atol=1e-6)


class RareRows(Step):
    """The square of a mean over rows with a property that only one batch has."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean(tf.square(outputs - y))
            is_rare = tf.math.floormod(tf.floor(1000 * tf.abs(x[:, 0])), 97) == 13
            rare = tf.where(is_rare, outputs[:, 0], 0.0)
            loss += tf.square(tf.reduce_mean(rare))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.slow
def test_a_property_that_no_first_row_has_is_told_when_a_batch_has_it():
    with pytest.raises(ValueError, match="but not 5 steps later"):
        fit(2, RareRows, lambda strategy: {"x": rare_rows()})


class Decides(Step):
    """Each replica changes the learning rate by its own loss."""

    def train_step(self, data):
        logs = super().train_step(data)
        rate = self.optimizer.learning_rate
        rate.assign(rate * tf.where(logs["loss"] < self.settings[3], 1.0, 0.9))
        return logs

    def term(self, outputs):
        return 0.0


@pytest.mark.slow
@not_on_gpu("compares bits")
def test_replicas_that_have_come_apart_are_made_alike_with_a_warning():
    class Limit(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # Between the losses of the two replicas.
            self.model.settings.assign(tf.fill([NUM_SETTINGS], float(logs["loss"])))

    with pytest.warns(UserWarning, match="From now on.*, which differs between replicas"):
        model, _ = fit(2, Decides, callbacks=[Limit()], on_difference="replicate")
    local = model.distribute_strategy.experimental_local_results
    rates = [float(value) for value in local(model.optimizer.learning_rate.value)]
    assert rates[0] == rates[1]
    with pytest.raises(ValueError, match="All 2 replicas must hold the same weights"):
        fit(2, Decides, callbacks=[Limit()])


class Drifts(keras.callbacks.Callback):
    """Moves the second replica's weights, as GPUs do that add in another order."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            part = self.model.distribute_strategy.experimental_local_results(variable.value)[1]
            part.assign(part * (1 + self.size))


@pytest.mark.slow
def test_gpus_may_come_apart_by_rounding(monkeypatch):
    monkeypatch.setattr(topology, "on_gpus", lambda strategy: False)
    with pytest.raises(ValueError, match="All 2 replicas must hold the same weights"):
        fit(2, callbacks=[Drifts(1e-6)])
    monkeypatch.setattr(topology, "on_gpus", lambda strategy: True)
    fit(2, callbacks=[Drifts(1e-6)])
    with pytest.raises(ValueError, match="All 2 replicas must hold the same weights"):
        fit(2, callbacks=[Drifts(1e-2)])


def relu():
    dense = [keras.layers.Dense(16, "relu"), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    return Step(keras.Sequential(dense))


def normalized():
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    return Step(keras.Sequential(layers))


def dropping():
    return Step(keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(3)]))


def stock():
    return keras.Sequential([keras.layers.Dense(3)])


def adam(**settings):
    return lambda: keras.optimizers.Adam(0.01, **settings)


class Groups(keras.layers.Layer):
    """Takes the mean of each four rows away."""

    def call(self, x):
        groups = keras.ops.reshape(x, (-1, 4, x.shape[-1]))
        groups -= keras.ops.mean(groups, axis=1, keepdims=True)
        return keras.ops.reshape(groups, (-1, x.shape[-1]))


def grouped():
    return keras.Sequential([keras.layers.Dense(3), Groups()])


SUMS = {
    "make": stock,
    "optimizer": adam(gradient_accumulation_steps=3),
    "compiled": {"loss": "mse"},
    "verify": "always",
}
ORDINARY = {
    "sums that an epoch's end cuts, validated": SUMS | {"feed": validated},
    "groups of rows that need whole batches": {
        "make": grouped,
        "feed": distributed,
        "compiled": {"loss": "mse"},
    },
    "a trained-out linear model": {"optimizer": lambda: keras.optimizers.SGD(0.3), "epochs": 12},
    "jumps": {"make": relu, "optimizer": adam(), "epochs": 6},
    "local statistics": {"make": normalized, "optimizer": adam(), "epochs": 8},
    "dropout": {"make": dropping, "optimizer": adam(), "epochs": 8},
    "sign updates": {"make": relu, "optimizer": lambda: keras.optimizers.Lion(0.001), "epochs": 8},
    "sums of three steps": SUMS,
    "several steps at once": {"make": relu, "compiled": {"steps_per_execution": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_training_is_no_false_alarm_and_is_not_changed(name, monkeypatch):
    checked, check = [], spot_checks.verification.spot_check
    monkeypatch.setattr(
        spot_checks.verification,
        "spot_check",
        lambda *args: (checked.append(args[3]), check(*args)),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*replica computes|.*not (verified|compared)")
        model, history = fit(2, **ORDINARY[name])
    assert checked, "no spot check was made"
    if name == "sums of three steps":
        assert not any(number % 3 for number in checked)
    unverified, others = fit(2, **{**ORDINARY[name], "verify": "never"})
    assert history == others
    for value, other in zip(model.get_weights(), unverified.get_weights()):
        np.testing.assert_array_equal(value, other)


@pytest.mark.slow
def test_a_check_that_fails_by_itself_does_not_end_the_training(monkeypatch):
    def fail(case, workers):
        raise RuntimeError("no memory")

    monkeypatch.setattr(verification, "look_again", fail)
    with pytest.warns(UserWarning, match="`train_step` is not compared any more: .*no memory") as w:
        model, _ = fit(2)
    assert sum("any more" in str(each.message) for each in w) == 1
    assert model.optimizer.iterations.numpy() == 24


def test_checks_become_rare():
    progress = spot_checks._Progress(None, first=1.0)
    due = []
    for number in range(1, 1001):
        if progress.count(progress, 1):
            due.append(number)
            progress.is_due = False
    assert due == [2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]


def test_checks_take_a_small_part_of_the_time():
    progress = spot_checks._Progress(None, first=1.0)
    assert progress.is_affordable
    progress.spent = 0.3
    assert not progress.is_affordable
    progress.began -= 100.0
    assert progress.is_affordable


class Keeps(keras.callbacks.Callback):
    """Notes whether batches are kept, before `predict` is called in `fit`, in it, and after it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def note(self, *_):
        self.seen.append(self.model.distribute_strategy.keeps_samples)

    def on_train_begin(self, logs=None):
        self.note()
        within = keras.callbacks.LambdaCallback(on_predict_begin=self.note)
        self.model.predict(ROWS, verbose=0, callbacks=[within])
        self.note()


def own(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


class Own(keras.metrics.Mean):
    """A class that is not Keras's."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(own(y_true, y_pred), sample_weight)


@pytest.mark.slow
def test_stock_models_and_predict_keep_no_batches():
    custom, by_keras = {"loss": own}, {"loss": "mse"}
    for make, settings, expected in (
        (stock, by_keras, False),
        (stock, custom, True),
        (Step, {}, True),
    ):
        callback = Keeps()
        model, _ = fit(2, make, callbacks=[callback], compiled=settings)
        assert callback.seen == [expected, False, expected]
        assert not model.distribute_strategy.keeps_samples


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (lambda: {"loss": own}, True),
        (lambda: {"loss": [own]}, True),
        (lambda: {"loss": {"output": "mse", "other": own}}, True),
        (lambda: {"loss": "mse", "metrics": ["mae", Own()]}, True),
        (lambda: {"loss": "mse", "weighted_metrics": [[own]]}, True),
        (lambda: {"loss": keras.losses.CosineSimilarity(axis=0)}, True),
        (lambda: {"loss": ["mse"], "metrics": ["accuracy", "ce", None]}, False),
        (lambda: {"loss": {"output": "mae"}, "metrics": {"output": keras.metrics.AUC()}}, False),
    ],
)
def test_what_was_given_to_compile_is_known_before_keras_creates_it(settings, expected):
    with create_strategy(2).scope(), keras.utils.custom_object_scope({"own": own}):
        model = stock()
        model.compile("sgd", **settings())
        assert verification.may_be_verified(model, "train") == expected
        assert not verification.may_be_verified(model, "predict")


def kept(data, read):
    samples = Samples()
    iterator = iter(samples.of(data))
    for _ in range(read):
        next(iterator)
    return samples


def test_samples_are_those_that_were_trained_on():
    data = tf.data.Dataset.range(200).batch(2)
    samples = kept(data.prefetch(4), 10)
    assert samples.latest(6).numpy().tolist() == [12, 13]
    assert kept(data, 90).latest(89).numpy().tolist() == [176, 177]
    assert kept(data, 2).latest(-1) is None


def test_samples_of_other_kinds_of_tensors():
    ragged = tf.ragged.constant([[1], [2, 3], [4, 5, 6], [7]])
    texts = tf.constant(["a", "b", "c", "d"])
    data = tf.data.Dataset.from_tensor_slices({"ids": ragged, "text": texts}).batch(2)
    batch = kept(data, 2).latest(1)
    assert batch["ids"].to_list() == [[4, 5, 6], [7]]
    assert batch["text"].numpy().tolist() == [b"c", b"d"]


def test_large_batches_are_cut():
    data = tf.data.Dataset.from_tensors((tf.ones([64, 2**17]), tf.range(64)))
    rows, numbers = kept(data, 1).latest(0)
    assert rows.shape == (7, 2**17) and numbers.numpy().tolist() == list(range(7))


def test_numbers_of_later_checks():
    assert fibonacci()[:5] == [2, 3, 5, 8, 13] and fibonacci()[-1] >= 2**50


class Measures(Step):
    """Logs a mean over rows with a rare property, squared, when it is evaluated."""

    def test_step(self, data):
        x, y = data
        outputs = self(x)
        is_rare = tf.math.floormod(tf.floor(1000 * tf.abs(x[:, 0])), 97) == 13
        rare = tf.reduce_mean(tf.where(is_rare, outputs[:, 0], 0.0))
        return {"error": tf.reduce_mean(tf.square(outputs - y)) + tf.square(rare)}


def rare_rows():
    rows = ROWS.copy()
    rows[np.floor(1000 * np.abs(rows[:, 0])) % 97 == 13] = 0
    # In the fifth batch, and none of those that are tried before.
    rows[33:39, 0] = 0.0135
    return tf.data.Dataset.from_tensor_slices((rows, TARGETS)).batch(BATCH)


@pytest.mark.slow
def test_evaluation_is_told_of_rows_that_come_later():
    model, _ = fit(2, Measures)
    with pytest.raises(ValueError, match="`test_step` must .* but not 5 steps later"):
        model.evaluate(rare_rows(), verbose=0)
    with pytest.raises(ValueError, match="`test_step` must .* but not 5 steps later"):
        model.fit(ROWS, TARGETS, validation_data=rare_rows(), verbose=0)


@pytest.mark.slow
def test_evaluation_goes_on_with_the_whole_batch():
    model, _ = fit(2, Measures, on_difference="replicate")
    with pytest.warns(UserWarning, match="From now on .* then evaluate again"):
        model.evaluate(rare_rows(), verbose=0)
    one, _ = fit(1, Measures)
    one.set_weights(model.get_weights())
    # Keras 3.12 returns a tensor here.
    expected = float(one.evaluate(rare_rows(), verbose=0))
    assert float(model.evaluate(rare_rows(), verbose=0)) == pytest.approx(expected, abs=1e-6)


class Replay(keras.callbacks.Callback):
    """Calls `fit` of the same model, as with pseudo-labels, after some steps or epochs."""

    def __init__(self, epoch=None, steps=()):
        super().__init__()
        self.epoch, self.steps, self.taken = epoch, steps, 0

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            self.replay()

    def on_train_batch_end(self, batch, logs=None):
        self.taken += 1
        if self.taken in self.steps:
            self.replay()

    def replay(self):
        self.model.fit(ROWS[:16], TARGETS[:16], batch_size=BATCH, verbose=0)


@pytest.mark.slow
def test_spot_checks_go_on_after_a_callback_has_called_fit():
    with pytest.raises(ValueError, match="this held on the first rows, but not"):
        fit(2, callbacks=[Switch(after=12), Replay(epoch=0)], epochs=4)


@pytest.mark.slow
def test_a_variable_that_a_callback_sets_is_seen_after_a_fit_within_fit():
    window = Window()
    with pytest.raises(ValueError, match="but not 2[0-9] steps later"):
        fit(2, FewSettings, callbacks=[window, Replay(steps=(2, 4, 6, 17))])
    # Four inner calls of two steps each.
    assert window.model.optimizer.iterations.numpy() == 17 + 8


class AtThirdEpoch(keras.callbacks.Callback):
    """Sets the settings when the third epoch begins."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.settings.assign(tf.ones(12))


@pytest.mark.slow
def test_a_step_is_verified_again_at_an_epoch_after_a_fit_within_fit(monkeypatch):
    again = []
    verify = spot_checks._verify_within_fit
    monkeypatch.setattr(spot_checks, "_verify_within_fit", lambda m: again.append(1) or verify(m))
    with pytest.raises(ValueError):
        fit(2, FewSettings, callbacks=[AtThirdEpoch(), Replay(epoch=0)])
    assert again
