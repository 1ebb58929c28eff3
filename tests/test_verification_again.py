"""A step that changes while it trains is verified again, also with the numbers it compares with."""

import collections
import gc
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import verification_later as later
from replicas import create_strategy

from tfmulti import marks, verification
from tfmulti.verification.compared_numbers import find_compared_numbers

ROWS, LABELS = later.sorted_classes()


def deviating_where(condition):
    """A loss that cannot be split where a condition of the model and the labels holds."""

    def loss(model, y, losses, weights, outputs):
        more = tf.where(condition(model, y), tf.math.reduce_std(outputs), 0.0)
        return tf.reduce_mean(losses) + tf.reduce_mean(more)

    return loss


class Phased(later.Step):
    """Trains in phases: by a variable that begins at 1, and by a Python attribute."""

    def __init__(self, loss=later.mean):
        super().__init__(loss, later.dense)
        self.phase = tf.Variable(1, trainable=False)
        # Of two numbers: a single one would be tried at other values.
        self.share = tf.Variable([1.0, 1.0], trainable=False)
        self.stage, self.kind = 1, "easy"

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self.net(x, training=True)
            errors = tf.square(outputs[:, 0] - tf.cast(tf.maximum(y, 0), tf.float32))
            loss = self.loss_of(self, y, errors, None, outputs)
            if self.stage == 2 or self.kind == "hard":
                loss += tf.math.reduce_std(outputs)
            loss += (1.0 - self.share[0]) * tf.math.reduce_std(outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        return {"error": tf.reduce_mean(tf.square(self(x)[:, 0] - tf.cast(y, tf.float32)))}


def compiled(num_replicas, loss=later.mean, on_difference="replicate", verify="always", **settings):
    strategy = create_strategy(num_replicas, on_difference=on_difference, verify=verify)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Phased(loss)
        model.compile(keras.optimizers.SGD(0.1), **settings)
    return model


def fit(model, **settings):
    held_out = ROWS[::7], LABELS[::7]
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0, **settings}
    model.fit(ROWS, LABELS, validation_data=held_out, **settings)


NUMBERS = {
    "labels at -999": lambda model, y: tf.equal(-999.0, tf.cast(y, tf.float32)),
    "labels at -5": lambda model, y: y == -5,
    "labels at 7": lambda model, y: tf.reduce_any(y == 7),
    "labels at 3": lambda model, y: tf.gather([0.0, 0.0, 0.0, 1.0], y) > 0.0,
    "variables at 7": lambda model, y: tf.one_hot(model.phase, 8)[7] > 0.0,
    "labels at 4": lambda model, y: (
        tf.bitwise.bitwise_and(tf.maximum(y, 0), tf.constant(4, y.dtype)) > 0
    ),
    "variables at 2": lambda model, y: model.phase == 2,
    "variables at 3": lambda model, y: keras.ops.greater_equal(model.phase, 3),
    "variables at 100": lambda model, y: (
        (model.optimizer.iterations >= 100) & (model.optimizer.iterations < 200)
    ),
    "variables at 501": lambda model, y: (
        (tf.cast(model.optimizer.iterations, tf.float32) > 500.0)
        & (model.optimizer.iterations < 900)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_what_happens_at_a_number_of_the_steps_is_told(name):
    model = compiled(3, deviating_where(NUMBERS[name]), "error")
    with pytest.raises(ValueError, match=f"nothing has been trained yet.*with .*{name}"):
        fit(model)


@pytest.mark.slow
def test_a_row_that_is_left_out_by_its_number_is_no_false_alarm():
    def loss(model, y, losses, weights, outputs):
        return tf.reduce_mean(losses * tf.cast(y != -5, tf.float32))

    fit(compiled(3, loss, "error"))


def test_numbers_on_both_sides_of_a_limit_are_found():
    @tf.function
    def step(x, n):
        low, high = n >= 10, tf.cast(n, tf.float32) > 20.0
        chosen = tf.reduce_any(x == tf.constant([3.5, -1.0]))
        return low, high, chosen, 30 > n, x > 0.5

    graph = step.get_concrete_function(tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)).graph
    assert set(find_compared_numbers(graph)) == {9, 10, 20, 21, 3.5, -1, 29, 30}


class SecondStage(keras.callbacks.Callback):
    """Changes the step when the second epoch begins."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_epoch_begin(self, epoch, logs=None):
        if epoch != 1:
            return
        model = self.model
        if self.how == "a variable":
            model.share.assign([0.5, 1.0])
        elif self.how == "a text":
            model.kind = "hard"
        else:
            model.stage = 2
        if self.how == "compiled":
            with model.distribute_strategy.scope():
                model.compile(model.optimizer)
        if self.how == "forgotten":
            model.train_function = None
        if self.how in ("made", "forgotten", "compiled"):
            model.make_train_function(force=self.how == "made")


WAYS = ["made", "a variable", "eager", "forgotten", "compiled", "a text"]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_a_step_that_a_callback_changes_gives_one_devices_result(how):
    models = [compiled(number, run_eagerly=how in ("eager", "a text")) for number in (1, 3)]
    fit(models[0], epochs=3, callbacks=[SecondStage(how)])
    with pytest.warns(UserWarning, match="Every replica computes `train_step`"):
        fit(models[1], epochs=3, callbacks=[SecondStage(how)])
    for one, many in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(many, one, 1e-5, 1e-6)


class OwnLoss(keras.callbacks.Callback):
    """Makes a model of Keras's own parts one with a loss that cannot be split."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:

            def compute_loss(model, x=None, y=None, y_pred=None, *_, **__):
                return tf.math.reduce_std(y_pred)

            self.model.compute_loss = types.MethodType(compute_loss, self.model)
            self.model.make_train_function(force=True)


@pytest.mark.slow
def test_a_stock_model_that_a_callback_changes_is_verified():
    weights = []
    for number in (1, 3):
        keras.utils.set_random_seed(0)
        with create_strategy(number, on_difference="replicate").scope():
            model = keras.Sequential([keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(ROWS, ROWS[:, :3], batch_size=8, epochs=2, verbose=0, callbacks=[OwnLoss()])
        told = any("Every replica computes" in str(each.message) for each in caught)
        assert told == (number > 1)
        weights.append(model.get_weights())
    np.testing.assert_allclose(weights[1][0], weights[0][0], 1e-5, 1e-6)


@pytest.mark.slow
def test_what_changes_with_every_epoch_is_not_verified_every_time(monkeypatch):
    class Fading(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.phase.assign(10 + epoch)

    verified = []
    find_out = verification.find_out
    monkeypatch.setattr(verification, "find_out", lambda *a: verified.append(a) or find_out(*a))
    # The step reads this variable, and is exact whatever its value.
    model = compiled(2, deviating_where(lambda model, y: model.phase < 0), verify="auto")
    fit(model, epochs=1)
    before = len(verified)
    fit(model, epochs=9, callbacks=[Fading()])
    assert len(verified) - before == 5


@pytest.mark.slow
def test_masks_that_are_all_1_in_the_first_rows_are_varied():
    class Masked(Phased):
        def train_step(self, data):
            self.observed = tf.clip_by_value(data[0][:, 0], 0.0, 1.0)
            return super().train_step(data)

    def loss(model, y, losses, weights, outputs):
        return tf.reduce_sum(losses * model.observed) / (tf.reduce_sum(model.observed) + 1e-6)

    strategy = create_strategy(3, verify="always")
    with strategy.scope():
        model = Masked(loss)
        model.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="with (some inputs at 0|opposite signs)"):
        model.fit(np.ones_like(ROWS), LABELS, batch_size=8, verbose=0)


@pytest.mark.slow
def test_the_error_says_that_the_step_was_made_again():
    model = compiled(3, on_difference="error")
    with pytest.raises(ValueError, match="it was exact before it was changed"):
        fit(model, epochs=2, callbacks=[SecondStage("made")])
    # The first epoch, and nothing of the second.
    assert model.optimizer.iterations == len(ROWS) // 8


class PredictsFirst(keras.callbacks.Callback):
    """Calls another method of the model before the first step of `fit`."""

    def on_train_begin(self, logs=None):
        self.model.predict(ROWS[:8], verbose=0)


@pytest.mark.slow
def test_a_step_is_verified_again_also_if_a_callback_has_called_predict():
    model = compiled(2, on_difference="error")
    # It runs Python code, so that its first batch is drawn only after `on_train_begin`.
    batches = tf.data.Dataset.from_generator(
        lambda: ((ROWS[:8], LABELS[:8]) for _ in range(2)),
        output_types=("float32", "int64"),
        output_shapes=([8, 4], [8]),
    ).apply(tf.data.experimental.assert_cardinality(2))
    callbacks = [PredictsFirst(), SecondStage("made")]
    with pytest.raises(ValueError, match="it was exact before it was changed"):
        model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
    # The first epoch, and nothing of the second.
    assert model.optimizer.iterations == 2


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [True, False])
def test_a_step_that_changes_between_two_fits_is_verified(make):
    model = compiled(3, on_difference="error")
    fit(model)
    model.stage, model.train_function = 2, None
    if make:
        model.make_train_function()
    with pytest.raises(ValueError, match="must give one device's result"):
        fit(model)


class SecondStageAtOnce(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.stage = 2


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_attribute_that_is_set_before_the_first_step_is_noticed(run_eagerly):
    model = compiled(3, on_difference="error", run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="it was exact before it was changed"):
        fit(model, callbacks=[SecondStageAtOnce()])
    assert model.optimizer.iterations == 0


@pytest.mark.slow
def test_an_attribute_that_an_eager_step_reads_may_be_set_between_two_fits():
    model = compiled(3, on_difference="error", run_eagerly=True)
    fit(model)
    model.stage = 2
    with pytest.raises(ValueError, match="it was exact before it was changed"):
        fit(model)


def test_attributes_are_not_read_in_each_step_of_a_loop(monkeypatch):
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input(ROWS.shape[1:]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    read = []
    monkeypatch.setattr(verification, "attributes_of", read.append)
    for _ in range(2):
        model.train_on_batch(ROWS[:8], LABELS[:8])
    assert not read


@pytest.mark.slow
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_step_that_stays_is_verified_once(run_eagerly, monkeypatch):
    verified, find_out = [], verification.find_out
    monkeypatch.setattr(verification, "find_out", lambda *a: verified.append(a) or find_out(*a))
    model = compiled(2, run_eagerly=run_eagerly)
    fit(model, epochs=2)
    number = len(verified)
    assert [case.kind for case, _ in verified].count("train") == 1
    model.predict(ROWS[:8], verbose=0)
    number += 1
    fit(model, epochs=2, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(verified) == number > 0


@pytest.mark.slow
def test_a_verification_that_ctrl_c_has_ended_is_made_again(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    model = compiled(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(verification, "find_out", interrupted)
        model.fit(ROWS, LABELS, batch_size=8, verbose=0)
    assert model.distribute_strategy.seconds_verified == 0
    model.fit(ROWS, LABELS, batch_size=8, verbose=0)
    assert model.distribute_strategy.seconds_verified > 0


@pytest.mark.slow
def test_the_copies_of_the_state_are_let_go():
    model = compiled(2)
    # One step: a spot check would let go of them, too.
    model.evaluate(ROWS[:8], LABELS[:8], batch_size=8, verbose=0)
    model.predict(ROWS[:8], batch_size=8, verbose=0)
    checked = marks.CHECKED.get(model)
    assert checked["predict"] is None
    assert checked["test"].trial._original is checked["test"].trial._at_begin is None


@pytest.mark.slow
def test_the_traces_of_the_comparison_are_let_go():
    def kept_graphs(verify):
        gc.collect()
        before = sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects())
        fit(compiled(2, verify=verify))
        gc.collect()
        return sum(type(each).__name__ == "FuncGraph" for each in gc.get_objects()) - before

    assert kept_graphs("always") <= kept_graphs("never")


TRACES = collections.Counter()


class WithUnused(keras.Model):
    """A layer that no step calls: Keras never marks the model as built."""

    def __init__(self):
        super().__init__()
        self.dense, self.unused = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        TRACES["train"] += 1
        return super().train_step(data)

    def test_step(self, data):
        TRACES["test"] += 1
        return super().test_step(data)


@pytest.mark.slow
def test_what_a_step_never_builds_is_looked_for_once():
    with create_strategy(2, verify="never").scope():
        model = WithUnused()
        model.compile("sgd", "mse")
    rows = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    model.fit(*rows, batch_size=4, epochs=2, validation_data=rows, verbose=0)
    counts = dict(TRACES)
    model.fit(*rows, batch_size=4, epochs=2, validation_data=rows, verbose=0)
    model.evaluate(*rows, batch_size=4, verbose=0)
    assert counts == TRACES
    # What is compiled anew is built anew.
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse")
    model.evaluate(*rows, batch_size=4, verbose=0)
    assert TRACES["test"] > counts["test"]


def test_a_loop_searches_a_model_once_for_each_function_of_a_step(monkeypatch):
    found = []
    original = verification.has_stock_step
    monkeypatch.setattr(
        verification, "has_stock_step", lambda *given: found.append(given) or original(*given)
    )
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    calls = (
        lambda: model.train_on_batch(*rows),
        lambda: model.test_on_batch(*rows),
        lambda: model.predict_on_batch(rows[0]),
    )
    for call in calls:
        call()
        found.clear()
        for _ in range(3):
            call()
        assert not found
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse")
    for call in calls[:2]:
        call()
        assert found
        found.clear()
