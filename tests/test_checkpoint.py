"""Training that was ended at any step goes on as if it had not been."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import unittest.mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy, not_on_gpu

import tfmulti
from tfmulti.checkpoint import (
    folder_lock,
    generations,
    optimizers,
    own_variables,
    saved_in,
    state,
)

NUM_ROWS, BATCH_SIZE, EPOCHS = 43, 16, 4  # Three steps an epoch, the last one short.


class Killed(Exception):
    """Stands for a process that ends at once."""


class End(keras.callbacks.Callback):
    """Ends training after some steps."""

    def __init__(self, after, how):
        super().__init__()
        self.left, self.how = after, how

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.how()


def kill():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def rows():
    rng = np.random.RandomState(0)
    return rng.randn(NUM_ROWS, 4).astype("float32"), rng.randn(NUM_ROWS, 1).astype("float32")


@pytest.fixture(autouse=True)
def no_handler():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def adam():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)


def train(num_replicas, folder, *more, optimizer=adam, dropout=True, own=(), first=(), **settings):
    """Trains, from the start or from what the folder holds."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization(synchronized=True)]
        layers += [keras.layers.Dropout(0.3)] * dropout
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(tfmulti.DistributedOptimizer(optimizer()), "mse", metrics=["mae"])
    data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=3)
    told = []
    saver = tfmulti.callbacks.Checkpoint(folder, data, print_fn=told.append, **settings)
    stopper = keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=0.5, monitor="val_loss")
    history = model.fit(
        data,
        validation_data=tfmulti.distribute_eval(rows(), strategy, BATCH_SIZE),
        epochs=EPOCHS,
        verbose=0,
        callbacks=[*first, stopper, *own, saver, *more],
    )
    return [weight.copy() for weight in model.get_weights()], history, told


def train_until_killed(num_replicas, folder, steps, **settings):
    with pytest.raises(Killed):
        train(num_replicas, folder, End(steps, kill), **settings)


def test_callbacks_state_is_given_to_callbacks_of_the_same_class():
    keras.utils.set_random_seed(1)
    with create_strategy(1).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(*rows(), verbose=0)
    kinds = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau
    callbacks = [kind("loss", patience=number) for kind in kinds for number in (3, 5)]
    for number, callback in enumerate(callbacks):
        callback.wait = number + 1
    moment = {"epoch": 0, "step": 3, "begun": False, "within_epoch": False}
    tensors, others = state.take_snapshot(model, None, callbacks, **moment)
    resumed = [kind("loss") for kind in (kinds[1], kinds[0], kinds[0])]
    resumed.insert(0, keras.callbacks.LambdaCallback())
    tensors = {name: tf.convert_to_tensor(value) for name, value in tensors.items()}
    state.Resumed({**others, "begun": True}, tensors).finish(model, resumed)
    assert [each.wait for each in resumed[1:]] == [3, 1, 2]


@pytest.mark.slow
def test_callbacks_state_is_kept_where_other_callbacks_come_and_go(whole, tmp_path):
    expected, history, _ = whole(2)
    with pytest.raises(Killed):
        train(2, tmp_path, End(5, kill), every_steps=1, own=[keras.callbacks.EarlyStopping()])
    other = [keras.callbacks.LambdaCallback(), keras.callbacks.EarlyStopping(patience=9)]
    weights, resumed, told = train(2, tmp_path, every_steps=1, first=other)
    assert_same_weights(weights, expected)
    assert_same_history(resumed, history)
    assert not [line for line in told if "state for the callback" in line]


@pytest.mark.slow
def test_a_callback_that_is_missing_is_told(tmp_path):
    with pytest.raises(Killed):
        train(2, tmp_path, End(5, kill), every_steps=1, own=[keras.callbacks.EarlyStopping()])
    _, _, told = train(2, tmp_path, every_steps=1)
    assert any("state for the callback EarlyStopping, which this run does not" in x for x in told)


def assert_same_weights(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_same_history(one, other):
    assert one.epoch == other.epoch
    assert set(one.history) == set(other.history)
    for name, values in one.history.items():
        np.testing.assert_allclose(other.history[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
    cached = {}

    def whole(num_replicas, **settings):
        key = (num_replicas, *settings)
        if key not in cached:
            folder = tmp_path_factory.mktemp("whole")
            cached[key] = train(num_replicas, folder, every_steps=1, **settings)
        return cached[key]

    return whole


@not_on_gpu("compares bits")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_replicas", "steps", "every_steps", "resumed_at"),
    [
        (1, 4, 1, "step 4"),
        (2, 3, 1, "step 3"),
        *((1, steps, 1, f"step {steps}") for steps in (1, 3)),
        *((2, steps, 1, f"step {steps}") for steps in (1, 2, 4, 11)),
        # The end of the second epoch, step 6, is later than the fifth step; two are taken again.
        (2, 8, 5, "step 6, epoch 2"),
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(
    num_replicas, steps, every_steps, resumed_at, whole, tmp_path
):
    weights, history, _ = whole(num_replicas)
    train_until_killed(num_replicas, tmp_path, steps, every_steps=every_steps)
    resumed, resumed_history, told = train(num_replicas, tmp_path, every_steps=every_steps)
    assert f"resumed at {resumed_at}" in told[0]
    assert_same_weights(weights, resumed)
    assert_same_history(history, resumed_history)


class Holder:
    """An object of no library."""


class Moving(keras.Model):
    """Has a variable, a random generator and another model's weights, of which none is its own."""

    def __init__(self):
        super().__init__()
        self.dense, self.holder = keras.layers.Dense(1), Holder()
        self.holder.other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.moving = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)
        self.noise = tf.random.Generator.from_seed(5)

    def call(self, x, training=False):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        self.moving.assign(0.9 * self.moving + tf.reduce_mean(x))
        x += self.noise.normal(tf.shape(x)) + self.moving
        logs = super().train_step((x, y + self.holder.other(x)))
        kernel = self.holder.other.weights[0]
        kernel.assign(0.5 * (kernel + self.dense.kernel))
        return logs


def train_moving(num_replicas, folder, *more, epochs=2, print_fn=print):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas, verify="never")
    with strategy.scope():
        model = Moving()
        model.compile("adam", "mse")
    data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=3)
    saver = tfmulti.callbacks.Checkpoint(folder, data, every_steps=1, print_fn=print_fn)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[saver, *more])
    return [*model.get_weights(), model.moving.numpy(), *model.holder.other.get_weights()]


# On two replicas the last batch has 6 and 5 rows, for which each draws other numbers.
@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_variables_and_generators_that_a_model_holds_go_on_where_they_were(num_replicas, tmp_path):
    expected = train_moving(num_replicas, tmp_path / "whole")
    with pytest.raises(Killed):
        train_moving(num_replicas, tmp_path / "killed", End(4, kill))
    assert_same_weights(expected, train_moving(num_replicas, tmp_path / "killed"))


@pytest.mark.slow
def test_a_checkpoint_without_the_variables_that_a_model_holds_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(own_variables, "own_variables", lambda *_: {})
    train_moving(1, tmp_path, epochs=1)
    monkeypatch.undo()
    train_moving(1, tmp_path, print_fn=(told := []).append)
    assert "the checkpoint has no value of the model's holder/other" in told[1]


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(whole, tmp_path):
    weights, history, _ = whole(1)
    train(1, tmp_path)
    again, again_history, told = train(1, tmp_path)
    assert "resumed at step 12, epoch 4" in told[0]
    assert_same_weights(weights, again)
    assert_same_history(history, again_history)


class Logging(keras.Sequential):
    """A model whose step returns a number that is none of its metrics, as that of a GAN."""

    def train_step(self, data):
        return {"g_loss": super().train_step(data)["loss"]}


def test_a_run_that_ended_while_validating_has_the_logs_of_its_last_step(tmp_path):
    """They are none of the metrics, from which a pass without steps has its logs."""

    def fit(*more, **settings):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(1)
        with strategy.scope():
            model = Logging([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=3)
        model.build((None, 4))
        saver = tfmulti.callbacks.Checkpoint(tmp_path, data, **settings)
        others = {"validation_data": rows(), "epochs": 2, "verbose": 0}
        return model.fit(data, callbacks=[saver, *more], **others).history

    expected = fit(resume=False)
    die = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: kill())
    with pytest.raises(Killed):
        fit(die, every_steps=3, resume=False)
    history = fit(every_steps=3)
    assert history["g_loss"] == expected["g_loss"] and len(history["g_loss"]) == 2


@pytest.fixture(name="small")
def small_fixture(tmp_path):
    """Creates a small model and its data on one device; and a `Checkpoint` in a folder."""
    strategy = create_strategy(1)

    def create(metrics=(), seed=3, optimizer="adam"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(optimizer, "mse", metrics=list(metrics))
        data = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=seed)
        return model, data

    def checkpoint(*arguments, **settings):
        return tfmulti.callbacks.Checkpoint(tmp_path, *arguments, **settings)

    return create, checkpoint


def test_what_follows_a_finished_run_is_trained_whole(small):
    create, checkpoint = small
    model, data = create()
    model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint(data)])
    model, data = create()
    history = model.fit(data, epochs=2, verbose=0, callbacks=[checkpoint(data)])
    assert history.epoch == [0, 1] and len(history.history["loss"]) == 2
    assert model.fit(data, epochs=3, verbose=0).epoch == [0, 1, 2]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_data_that_fit_does_not_train_from_have_no_position_to_save(small, is_distributed):
    create, checkpoint = small
    (model, data), (_, other) = create(), create(seed=4)
    saver = checkpoint(data, every_steps=1)
    given = (other,) if is_distributed else rows()
    size = {} if is_distributed else {"batch_size": BATCH_SIZE}
    with pytest.raises(ValueError, match=r"`dataset` given to `Checkpoint`.* position, \(0, 0\)"):
        model.fit(*given, **size, verbose=0, callbacks=[saver])
    assert not saver.saved
    model.fit(data.map(lambda x, y: (2 * x, y)), epochs=2, verbose=0, callbacks=[saver])


def test_data_with_a_position_that_the_checkpoint_was_not_given_are_refused(small):
    create, checkpoint = small
    model, data = create()
    saver = checkpoint()
    for given in (data, data.map(lambda x, y: (2 * x, y))):
        with pytest.raises(ValueError, match=r"needs `dataset` where.* Received: dataset=None"):
            model.fit(given, verbose=0, callbacks=[saver])
    # The model does not remember data of an earlier call.
    model.fit(*rows(), verbose=0, callbacks=[saver])


@pytest.mark.parametrize("keep, left", [(None, [3, 6, 9]), (1, [9])])
def test_as_many_checkpoints_are_kept_as_was_said(small, tmp_path, keep, left):
    create, checkpoint = small
    model, data = create()
    model.fit(data, epochs=3, verbose=0, callbacks=[checkpoint(data, keep=keep)])
    assert sorted(saved_in(tmp_path)) == left


def test_numbers_of_numpy_and_scores_by_class_are_saved(small, capsys):
    create, checkpoint = small
    for epochs in (2, 3):
        model, data = create([keras.metrics.F1Score(threshold=0.5)], seed=np.int64(3))
        callbacks = [tfmulti.callbacks.Progress(), checkpoint(data)]
        history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    assert np.shape(history.history["f1_score"]) == (3, 1)
    assert "f1_score: [0." in capsys.readouterr().out


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path):
    writer = generations.Writer(print)
    writer.write(tmp_path, 1, {"a": np.zeros(1)}, {"setting": {1, 2}}, 2)
    assert "Received: TypeError: set is no number in" in str(writer.finish())


def test_a_checkpoint_that_is_written_again_is_never_missing(tmp_path, monkeypatch):
    def write(value):
        generations.write(tmp_path, 3, {"a": np.full(1, value)}, {}, keep=1)

    write(1.0)
    there, remove = [], shutil.rmtree

    def remove_and_look(path, **settings):
        remove(path, **settings)
        there.append(saved_in(tmp_path))

    monkeypatch.setattr(shutil, "rmtree", remove_and_look)
    write(2.0)
    assert there and all(there)
    replace = os.replace

    def fail(path, to):
        if path.name.startswith(f".{os.getpid()}."):
            raise OSError("full")
        replace(path, to)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(generations.CheckpointError, match="full"):
        write(3.0)
    monkeypatch.undo()
    assert generations.load(generations.latest_good(tmp_path))["a"].numpy() == [2.0]
    assert [path.name for path in tmp_path.iterdir()] == [generations.checkpoint.name_of(3)]


def test_damaged_checkpoints_and_those_half_written_leave_room(tmp_path):
    for number in (300, 5):
        generations.write(tmp_path, number, {"a": np.zeros(1)}, {}, keep=1)
    half = tmp_path / f".77.{generations.checkpoint.name_of(6)}"
    half.mkdir()
    generations.write(tmp_path, 6, {"a": np.zeros(1)}, {}, keep=1)
    assert sorted(saved_in(tmp_path)) == [6, 300] and not half.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": 100}, "`dataset` must be a result of distribute_train.* dataset=100"),
        ({"dataset": tf.data.Dataset.range(3)}, "a result of .* Received: dataset=<_"),
        ({"every_minutes": float("nan")}, "`every_minutes` must be above 0.* every_minutes=nan"),
    ],
)
def test_what_a_checkpoint_cannot_use_is_refused_when_it_is_made(settings, words):
    with pytest.raises(ValueError, match=words):
        tfmulti.callbacks.Checkpoint("folder", **settings)


def test_an_address_is_no_folder():
    with pytest.raises(ValueError, match="must be a folder of a file system. Received: .*'gs:"):
        tfmulti.callbacks.Checkpoint("gs://bucket/run")


class StopAt(keras.callbacks.Callback):
    """Stops after some steps of a `fit`, as one that looks at the time does."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True


@pytest.mark.slow
@pytest.mark.parametrize("validates", [False, True])
def test_a_run_that_stops_amid_an_epoch_takes_its_other_rows_when_it_resumes(small, validates):
    create, checkpoint = small
    settings = {"epochs": 2, "verbose": 0, "validation_data": rows() if validates else None}
    model, data = create()
    expected = model.fit(data, **settings).history
    weights = model.get_weights()
    model, data = create()
    model.fit(data, callbacks=[StopAt(), checkpoint(data)], **settings)
    model, data = create()
    history = model.fit(data, callbacks=[checkpoint(data)], **settings)
    assert_same_weights(weights, model.get_weights())
    assert history.epoch == [0, 1] and history.history == expected


class StopAfterTwoEpochs(keras.callbacks.Callback):
    """Stops as one that looks at the time does."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 1


def averaging():
    return keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5)


# With a rate of 5 the first epoch is the best. The third step is the last one of an epoch.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "callback", "every_steps"),
    [
        (averaging, keras.callbacks.Callback, None),
        (averaging, keras.callbacks.Callback, 3),
        (averaging, lambda: keras.callbacks.SwapEMAWeights(swap_on_epoch=True), None),
        (
            lambda: keras.optimizers.Adam(5.0),
            lambda: keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
            None,
        ),
    ],
    ids=["averages", "averages, its last step saved", "swapped averages", "best weights"],
)
def test_a_stopped_run_goes_on_with_the_weights_before_keras_ends_it(
    small, optimizer, callback, every_steps
):
    create, checkpoint = small

    def fit(*more, saves=True):
        model, data = create(optimizer=optimizer())
        callbacks = [callback(), *more, *[checkpoint(data, every_steps=every_steps)] * saves]
        return model.fit(data, epochs=4, verbose=0, callbacks=callbacks).history, model

    expected, whole = fit(saves=False)
    fit(StopAfterTwoEpochs())
    history, resumed = fit()
    assert history == expected
    assert_same_weights(whole.get_weights(), resumed.get_weights())


def test_a_finished_run_goes_on_with_the_averages_that_it_left_also_if_its_last_step_was_saved(
    small,
):
    create, checkpoint = small
    model, data = create(optimizer=averaging())
    for epochs in (2, 4):
        model.fit(data, epochs=epochs, initial_epoch=epochs - 2, verbose=0)
    again, data = create(optimizer=averaging())
    for epochs in (2, 4):
        saver = checkpoint(data, every_steps=3)
        again.fit(data, epochs=epochs, verbose=0, callbacks=[saver])
        assert saver.saved == [3 * epochs - 3, 3 * epochs]
    assert_same_weights(model.get_weights(), again.get_weights())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every_steps", [3, None])
def test_a_run_that_early_stopping_ended_is_not_trained_further(small, every_steps):
    create, checkpoint = small

    def fit(epochs, told):
        model, data = create()
        # No loss is smaller by so much.
        stopper = keras.callbacks.EarlyStopping("loss", min_delta=99, restore_best_weights=True)
        saver = checkpoint(data, every_steps=every_steps, print_fn=told.append)
        return model, model.fit(data, epochs=epochs, verbose=0, callbacks=[stopper, saver])

    model, history = fit(9, [])
    again, history_again = fit(9, told := [])
    assert history.epoch == history_again.epoch == [0, 1]
    assert_same_weights(model.get_weights(), again.get_weights())
    assert "EarlyStopping ended this run after epoch 2" in told[1]


def test_early_stopping_at_an_end_of_an_epoch_that_is_repeated_is_remembered(small):
    create, checkpoint = small

    def fit(*more):
        model, data = create()
        stopper = keras.callbacks.EarlyStopping("loss", min_delta=99)
        saver = checkpoint(data, every_steps=3, print_fn=(told := []).append)
        model.fit(data, epochs=9, verbose=0, callbacks=[stopper, saver, *more])
        return told

    with pytest.raises(Killed):
        fit(End(6, kill))
    assert "resumed at step 6, epoch 1" in fit()[0]
    assert "EarlyStopping ended this run after epoch 2" in fit()[-1]


def test_a_run_that_goes_on_after_early_stopping_is_trained_to_its_end(small):
    create, checkpoint = small

    def fit(epochs, patience, *more):
        model, data = create()
        # No loss is smaller by so much.
        stopper = keras.callbacks.EarlyStopping("loss", min_delta=99, patience=patience)
        callbacks = [stopper, checkpoint(data), *more]
        return model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks).history["loss"]

    assert len(fit(5, 0)) == 2
    with pytest.raises(Killed):
        fit(7, 99, End(5, kill))
    assert len(fit(7, 99)) == 7


@pytest.mark.slow
def test_sigterm_without_a_dataset_saves_the_weights_of_the_last_epoch(small):
    create, checkpoint = small

    def fit(*more, saves=True):
        model, _ = create()
        model.optimizer.learning_rate = 5.0
        stopper = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        callbacks = [stopper, *more, *[checkpoint()] * saves]
        settings = {"epochs": 3, "shuffle": False, "batch_size": 16, "verbose": 0}
        history = model.fit(*rows(), callbacks=callbacks, **settings).history["loss"]
        return history, model

    expected, whole = fit(saves=False)
    with pytest.raises(SystemExit):
        fit(End(4, terminate))
    losses, resumed = fit()
    # When it was told to end, the first epoch was the best.
    assert losses == expected and losses[0] < losses[1]
    assert_same_weights(whole.get_weights(), resumed.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize(("has_dataset", "epoch"), [(True, 1), (False, 0)])
def test_sigterm_while_validating_ends_the_run_before_the_next_epoch(small, has_dataset, epoch):
    create, checkpoint = small

    def fit(*more):
        model, data = create()
        # The order of the data is that of one batch.
        train = (data,) if has_dataset else rows()
        saver = checkpoint(data) if has_dataset else checkpoint()
        size = {} if has_dataset else {"batch_size": NUM_ROWS}
        callbacks = [saver, *more]
        settings = {"validation_data": rows(), "callbacks": callbacks, "epochs": 2, "verbose": 0}
        return model.fit(*train, **settings, **size), model

    seen = []

    def validate(logs):
        seen.append(len(seen))
        if seen[-1] == epoch:
            terminate()

    with pytest.raises(SystemExit):
        fit(keras.callbacks.LambdaCallback(on_test_end=validate))
    assert seen == list(range(epoch + 1))
    history, model = fit()
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations) == (6 if has_dataset else 2)


def test_what_a_user_must_know_is_shown_without_a_function_that_prints(small):
    create, checkpoint = small
    with unittest.TestCase().assertLogs("absl", "WARNING") as logs:
        for rate in (0.1, 0.2):
            model, data = create(optimizer=keras.optimizers.SGD(rate))
            model.fit(data, verbose=0, callbacks=[checkpoint(data)])
    text = "\n".join(logs.output)
    assert "resumed at step 3" in text and "the checkpoint's learning rate 0.1 is used" in text


def test_a_fit_after_one_that_failed_counts_anew(small, tmp_path):
    create, checkpoint = small
    model, data = create()
    saver = checkpoint(data, every_steps=2, resume=False)
    with pytest.raises(Killed):
        model.fit(data, epochs=2, verbose=0, callbacks=[saver, End(4, kill)])
    assert saver.saved == [2, 3, 4]
    data.set_position(0)
    model.fit(data, epochs=1, verbose=0, callbacks=[saver])
    assert saver.saved == sorted(saved_in(tmp_path)) == [2, 3]


def test_a_fit_after_one_that_failed_leaves_sigterm_as_it_was(small):
    create, checkpoint = small
    model, data = create()
    saver = checkpoint(data)
    with pytest.raises(Killed):
        model.fit(data, verbose=0, callbacks=[saver, End(1, kill)])
    data.set_position(0)
    model.fit(data, verbose=0, callbacks=[saver])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_model_from_outside_the_scope_of_its_data_is_refused(small):
    create, checkpoint = small
    _, data = create()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="of that dataset's strategy. Received: 'seq"):
        model.fit(data, verbose=0, callbacks=[checkpoint(data)])


def test_sigterm_before_the_first_step_tells_that_nothing_is_saved(small, tmp_path):
    create, checkpoint = small
    model, data = create()
    tell = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: terminate())
    saver = checkpoint(data, print_fn=(told := []).append)
    with pytest.raises(SystemExit):
        model.fit(data, verbose=0, callbacks=[tell, saver])
    assert told == ["SIGTERM: no step to save yet, exiting"] and not saved_in(tmp_path)


def test_whatever_ends_a_write_is_told(monkeypatch, tmp_path):
    """In the writer's thread any other error was lost, and the step said to be saved."""
    monkeypatch.setattr(generations, "_digest", unittest.mock.Mock(side_effect=MemoryError))
    writer = generations.Writer((told := []).append)
    writer.write(tmp_path, 1, {"a": np.zeros(1)}, {}, 2)
    assert "MemoryError" in str(writer.finish()) and "not written" in told[0]
    assert not list(tmp_path.iterdir())


def test_sigterm_tells_of_a_step_only_if_it_is_on_disk(small, monkeypatch):
    create, checkpoint = small
    model, data = create()
    saver = checkpoint(data, print_fn=(told := []).append)
    full = unittest.mock.Mock(side_effect=OSError("full"))
    monkeypatch.setattr(generations, "_write_files", full)
    with pytest.raises(generations.CheckpointError, match="must be written completely"):
        model.fit(data, verbose=0, callbacks=[End(1, terminate), saver])
    assert "checkpoint of step 1 not written" in told[0] and len(told) == 1


ANOTHER_RUN = """
import fcntl, os, socket, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
boot_id = open("/proc/sys/kernel/random/boot_id").read().strip()
file.write(f"{socket.gethostname()} {os.getpid()} {sys.argv[2] or boot_id}")
file.flush()
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("machine", ["", "another-machine"])
def test_a_folder_with_which_another_run_trains_is_refused(machine, tmp_path, monkeypatch):
    """The name of a host does not tell: each container has its own."""
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 0)
    monkeypatch.setattr(folder_lock.socket, "gethostname", lambda: "a-container")
    command = [sys.executable, "-c", ANOTHER_RUN, str(tmp_path / folder_lock.NAME), machine]
    lock = folder_lock.FolderLock((told := []).append)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"here\n"
        if machine:
            lock.take(tmp_path)
            assert len(told) == 1 and f"is locked by process {other.pid} of host" in told[0]
        for removes in (True,) if machine else (True, False):
            with pytest.raises(generations.CheckpointError, match=f"process {other.pid} of"):
                lock.take(tmp_path, removes=removes)
        other.kill()
    # At once, and also where this process has it: an earlier `fit` may have failed.
    lock.take(tmp_path)
    another = folder_lock.FolderLock(told.append)
    another.take(tmp_path)
    another.release()
    # Nor do those hold it that a run has started, and which live on when it is killed.
    held = f"import fcntl; fcntl.lockf(open({str(tmp_path / '.lock')!r}, 'w'), 6)"
    assert subprocess.run([sys.executable, "-c", held], stderr=subprocess.DEVNULL).returncode
    lock.release()
    assert not subprocess.run([sys.executable, "-c", held]).returncode


def test_a_lock_whose_file_an_ending_run_removes_is_taken_anew(tmp_path, monkeypatch):
    """Else a third run would lock a new file beside it."""

    def remove(descriptor):
        monkeypatch.undo()
        (tmp_path / folder_lock.NAME).unlink()
        return True

    monkeypatch.setattr(folder_lock, "_try_for_some_seconds", remove)
    lock = folder_lock.FolderLock(print)
    lock.take(tmp_path)
    assert f" {os.getpid()} " in (tmp_path / folder_lock.NAME).read_text()
    lock.release()


def test_a_run_holds_its_folder_until_its_fit_has_ended(small, monkeypatch):
    create, checkpoint = small
    done = []
    for name in ("take", "release"):
        note = lambda *_, name=name, **__: done.append(name)
        monkeypatch.setattr(folder_lock.FolderLock, name, note)
    model, data = create()
    model.fit(data, verbose=0, callbacks=[checkpoint(data)])
    assert done == ["take", "release"]


@pytest.mark.slow
def test_signals_that_come_together_are_one_request(tmp_path):
    def twice():
        terminate()
        terminate()

    # Where a second one ends the process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at once"))
    with pytest.raises(SystemExit) as ended:
        train(1, tmp_path, End(4, twice))
    assert ended.value.code == 143


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_sigterm_saves_and_exits(num_replicas, whole, tmp_path):
    weights, history, _ = whole(num_replicas)
    with pytest.raises(SystemExit) as ended:
        train(num_replicas, tmp_path, End(4, terminate))
    assert ended.value.code == 143
    resumed, resumed_history, told = train(num_replicas, tmp_path)
    assert "resumed at step" in told[0]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert_same_weights(weights, resumed)
    assert_same_history(history, resumed_history)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_replicas(whole, tmp_path):
    weights, _, _ = whole(1, dropout=False)
    train_until_killed(2, tmp_path, 4, every_steps=1, dropout=False)
    resumed, _, _ = train(3, tmp_path, every_steps=1, dropout=False)
    for one, other in zip(weights, resumed, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_differs_with_another_number_of_replicas_is_told(tmp_path):
    train_until_killed(2, tmp_path, 4, every_steps=1)
    _, _, told = train(1, tmp_path, every_steps=1)
    assert "resuming on 1 replicas a run that was saved on 2: the result will not be" in told[-1]
    assert "because of random streams" in told[-1]


def damage_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


DAMAGES = {
    "flipped": lambda folder: damage_byte(folder / generations.FILES[2]),
    "flipped index": lambda folder: damage_byte(folder / generations.FILES[1]),
    "flipped manifest": lambda folder: damage_byte(folder / generations.FILES[0]),
    "cut": lambda folder: os.truncate(folder / generations.FILES[2], 100),
    "empty": lambda folder: os.truncate(folder / generations.FILES[0], 0),
    "torn": lambda folder: (folder / generations.FILES[1]).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_generation_is_told_and_the_one_before_taken(damage, tmp_path):
    tensors = {"a": np.arange(1000, dtype="float32"), "b": np.array([True, False])}
    generations.write(tmp_path, 1, tensors, {"step": 1})
    tensors["a"] += 1
    DAMAGES[damage](generations.write(tmp_path, 2, tensors, {"step": 2}))
    told = []
    found = generations.latest_good(tmp_path, told.append)
    assert found.state == {"step": 1}
    assert "step_000000000002 is damaged" in told[0]
    np.testing.assert_array_equal(generations.load(found)["a"], np.arange(1000))


def test_a_folder_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    DAMAGES["cut"](generations.write(tmp_path, 7, {"a": np.zeros(1000)}, {}))
    told = []
    with pytest.raises(generations.CheckpointError, match="Received: .*has changed in .*step_0.*7"):
        generations.latest_good(tmp_path, told.append)
    assert "step_000000000007 is damaged" in told[0] and "the one before" not in told[0]


def test_generations_are_kept_and_no_others(tmp_path):
    for number in range(5):
        generations.write(tmp_path, number, {"a": np.zeros(3)}, {"number": number}, keep=2)
    assert sorted(p.name[-1] for p in tmp_path.iterdir()) == ["3", "4"]


def test_a_checkpoint_whose_writer_was_killed_while_it_replaced_it_is_still_there(
    tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def replace(source, target, rename=os.replace):
        if target.name.startswith("step"):
            raise Killed
        rename(source, target)

    generations.write(tmp_path, 7, {"a": np.zeros(3)}, {"number": 0}, keep=1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace)
        generations.write(tmp_path, 7, {"a": np.zeros(3)}, {"number": 1}, keep=1)
    assert not list(tmp_path.glob("step_*"))
    assert generations.latest_good(tmp_path).state == {"number": 0}
    # It stays until another is written.
    with pytest.raises(generations.CheckpointError):
        generations.write(tmp_path, 8, {"a": object()}, {}, keep=1)
    assert generations.latest_good(tmp_path).state == {"number": 0}
    for number in (7, 8):
        generations.write(tmp_path, number, {"a": np.zeros(3)}, {"number": number}, keep=1)
        assert generations.latest_good(tmp_path).state == {"number": number}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000008"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint64", "bool"])
def test_every_dtype_comes_back(dtype, tmp_path):
    value = keras.ops.cast(np.array([[0, 1], [1, 0]]), dtype).numpy()
    generations.write(tmp_path, 0, {"a": value}, {})
    np.testing.assert_array_equal(generations.load(generations.latest_good(tmp_path))["a"], value)


@pytest.mark.slow
def test_another_model_is_refused(tmp_path):
    train(1, tmp_path)
    with pytest.raises(generations.CheckpointError, match="of the same model and optimizer"):
        train(1, tmp_path, optimizer=lambda: keras.optimizers.SGD(0.1))


def test_another_optimizer_is_refused_where_its_slots_are_the_same(small):
    create, checkpoint = small
    model, data = create()
    model.fit(data, verbose=0, callbacks=[checkpoint(data)])
    model, data = create(optimizer="adamw")
    received = "Received: Adam in the checkpoint, AdamW in this run"
    with pytest.raises(generations.CheckpointError, match=received):
        model.fit(data, verbose=0, callbacks=[checkpoint(data)])


@pytest.mark.parametrize(("optimizer", "fits"), [("sgd", True), ("adam", False)])
def test_slots_of_other_variables_of_the_same_shapes_are_refused(small, optimizer, fits):
    create, checkpoint = small

    def fit(trained):
        _, data = create()
        with data.strategy.scope():
            layers = [keras.layers.Dense(4, name=f"layer_{number}") for number in range(2)]
            layers[1 - trained].trainable = False
            model = keras.Sequential([keras.Input((4,)), *layers])
            model.compile(optimizer, "mse")
        model.fit(data, epochs=trained + 1, verbose=0, callbacks=[checkpoint(data)])

    fit(0)
    if fits:
        fit(1)
        return
    received = "Received: slots of .*layer_0/kernel in the checkpoint, and of .*layer_1/kernel in"
    with pytest.raises(generations.CheckpointError, match=received):
        fit(1)


@pytest.mark.slow
def test_a_learning_rate_that_is_not_used_is_told_and_one_that_callbacks_changed_is_not(small):
    create, checkpoint = small

    def fit(rate, epochs):
        model, data = create(optimizer=keras.optimizers.Adam(rate))
        reduces = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=99, patience=0)
        saver = checkpoint(data, print_fn=(told := []).append)
        model.fit(data, epochs=epochs, verbose=0, callbacks=[reduces, saver])
        return saver.resumed_rate, [line for line in told if "learning rate" in line]

    assert fit(0.1, 2) == (None, [])
    assert fit(0.1, 3) == (0.1, [])
    begun, told = fit(0.3, 4)
    assert begun == 0.1 and len(told) == 1
    assert "the checkpoint's learning rate 0.0" in told[0] and "and not 0.3" in told[0]


@pytest.mark.parametrize("kind", ["LossScaleOptimizer", "MultiOptimizer"])
def test_the_learning_rate_is_that_of_the_optimizer_within(kind):
    if not hasattr(keras.optimizers, kind):
        pytest.skip("in a later Keras")
    adam = keras.optimizers.Adam(0.25)
    around = getattr(keras.optimizers, kind)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(around(adam if kind.startswith("Loss") else lambda variable: adam), "mse")
    model.optimizer.build(model.trainable_variables)
    assert optimizers.rates_of(model) == [None, 0.25]


def test_a_folder_that_cannot_be_written_is_refused_before_training(small, tmp_path):
    """The first checkpoint told, and the run went on: without any, at its end, it failed."""
    create, _ = small
    (tmp_path / "file").write_text("")
    model, data = create()
    before = model.get_weights()
    saver = tfmulti.callbacks.Checkpoint(tmp_path / "file", data)
    words = "`folder` must be a folder that can be written to. Received: .*: it is a file"
    with pytest.raises(generations.CheckpointError, match=words):
        model.fit(data, verbose=0, callbacks=[saver])
    assert_same_weights(model.get_weights(), before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every_steps", "begun"), [(None, 2), (2, 3)], ids=["whole", "within"])
def test_fewer_epochs_than_a_run_has_begun_are_refused(small, every_steps, begun):
    """It counted as finished, with the weights of more epochs than were asked for."""
    create, checkpoint = small

    def fit(epochs, *more):
        model, data = create()
        callbacks = [checkpoint(data, every_steps=every_steps), *more]
        return model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)

    with pytest.raises(Killed):
        fit(9, End(8, kill))
    words = f"Received: epochs={begun - 1}, and {begun} epochs in the checkpoint"
    with pytest.raises(generations.CheckpointError, match=words):
        fit(begun - 1)
    assert len(fit(begun).history["loss"]) == begun


class BestOfEach(keras.callbacks.Callback):
    """Remembers by the names that stock callbacks use, but other things."""

    def __init__(self):
        super().__init__()
        self.best, self.wait, self.best_epoch = {}, np.arange(3), object()

    def on_train_batch_end(self, batch, logs=None):
        self.best = {name: min(value, self.best.get(name, value)) for name, value in logs.items()}


@pytest.mark.slow
def test_a_callback_may_remember_anything(whole, tmp_path):
    first, second = BestOfEach(), BestOfEach()
    train_until_killed(1, tmp_path, 4, every_steps=1, own=[first])
    train(1, tmp_path, every_steps=1, own=[second])
    unbroken = BestOfEach()
    train(1, tmp_path / "whole", own=[unbroken])
    assert second.best == pytest.approx(unbroken.best)
    assert second.best["loss"] <= first.best["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [1, None])
def test_what_callbacks_do_as_an_epoch_begins_is_done_once(every_steps, tmp_path):
    """A schedule that halves the rate, resumed within an epoch and where one begins."""

    def halve():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    whole, history, _ = train(1, tmp_path / "whole", own=halve())
    train_until_killed(1, tmp_path, 5, every_steps=every_steps, own=halve())
    weights, resumed, told = train(1, tmp_path, every_steps=every_steps, own=halve())
    assert any("resumed at step" in line for line in told)
    assert resumed.history["learning_rate"] == pytest.approx(history.history["learning_rate"])
    for one, other in zip(whole, weights):
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_run_without_a_dataset_is_saved_between_epochs(tmp_path):
    with pytest.raises(ValueError, match="need `dataset`"):
        tfmulti.callbacks.Checkpoint(tmp_path, every_steps=1)

    def fit(folder, *more):
        keras.utils.set_random_seed(1)
        with create_strategy(2).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(tfmulti.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
        saver = tfmulti.callbacks.Checkpoint(folder)
        calls = [saver, *more]
        model.fit(*rows(), batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=calls)
        return model.get_weights()

    expected = fit(tmp_path / "whole")
    with pytest.raises(Killed):
        fit(tmp_path / "killed", End(9, kill))
    assert_same_weights(expected, fit(tmp_path / "killed"))


@pytest.mark.slow
def test_minutes_are_the_chiefs(tmp_path):
    now = iter(range(0, 100_000, 61))
    saver_settings = {"every_minutes": 5.0, "clock": lambda: float(next(now))}
    train(2, tmp_path, **saver_settings)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[-1] == "step_000000000012"
    assert json.loads((tmp_path / names[-1] / "manifest.json").read_text())["state"]["epoch"] == 4


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    own = generations._FORMAT
    monkeypatch.setattr(generations, "_FORMAT", own + 1)
    path = generations.write(tmp_path, 3, {"a": np.zeros(2)}, {})
    monkeypatch.undo()
    # A version that keeps its values in other files is told all the same.
    (path / generations.FILES[1]).unlink()
    received = f"format {own}. Received: format {own + 1} in"
    with pytest.raises(generations.CheckpointError, match=received):
        generations.latest_good(tmp_path)


@pytest.mark.slow
def test_another_shuffle_buffer_is_told(tmp_path):
    examples = tf.data.Dataset.from_tensor_slices(rows())
    strategy = create_strategy(1)

    def fit(shuffle_buffer):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = tfmulti.distribute_train(examples, strategy, 8, shuffle_buffer=shuffle_buffer)
        saver = tfmulti.callbacks.Checkpoint(tmp_path, data)
        model.fit(data, epochs=1, verbose=0, callbacks=[saver])

    fit(10)
    fit(10)
    with pytest.raises(generations.CheckpointError, match="shuffle_buffer=2, and 10"):
        fit(2)


def test_a_step_that_terminate_on_nan_ends_replaces_no_checkpoint(small, tmp_path):
    create, checkpoint = small
    rows_, labels = rows()
    labels[10] = np.nan
    batches = tf.data.Dataset.from_tensor_slices((rows_, labels))
    for _ in range(2):
        model, _ = create()
        data = tfmulti.distribute_train(batches, model.distribute_strategy, 4, shuffle_buffer=0)
        saver = checkpoint(data, every_steps=1, keep=1, print_fn=(told := []).append)
        model.fit(data, epochs=9, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN(), saver])
        assert not np.isfinite(model.get_weights()[0]).all()
        assert "is nan: it is not saved" in told[-1]
        values = generations.load(generations.latest_good(tmp_path, print))
        assert all(np.isfinite(v).all() for name, v in values.items() if "model/" in name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [2, 3])
def test_counters_of_stock_callbacks_go_on(steps, small, tmp_path):
    create, checkpoint = small

    def fit(*more, folder):
        model, data = create()
        writer = keras.callbacks.ModelCheckpoint(
            tmp_path / folder / "{epoch}_{batch}.weights.h5", save_weights_only=True, save_freq=2
        )
        board = keras.callbacks.TensorBoard(tmp_path / "logs", write_graph=False)
        callbacks = [writer, board, *more, *[checkpoint(data)] * (folder == "parts")]
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        names = sorted(path.name for path in (tmp_path / folder).glob("*.h5"))
        return names, board._global_train_batch

    expected = fit(folder="whole")
    assert len(expected[0]) > 2
    with pytest.raises(SystemExit):
        fit(End(steps, terminate), folder="parts")
    assert fit(folder="parts") == expected


@pytest.mark.slow
def test_a_resumed_run_seeds_random_numbers_no_more(small, tmp_path):
    """Keras seeds them from Python's random numbers when a step first draws."""

    class Noisy(keras.Sequential):
        def train_step(self, data):
            features, labels = data
            features += 0.1 * keras.random.normal((tf.shape(features)[0], 4))
            return super().train_step((features, labels))

    def fit(*more, seed):
        keras.utils.clear_session()
        random.seed(seed)
        with (strategy := create_strategy(2)).scope():
            model = Noisy([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
            model.compile("sgd", "mse")
        data, drawn = tfmulti.distribute_train(rows(), strategy, BATCH_SIZE, seed=3), []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: drawn.append(random.random())
        )
        saver = tfmulti.callbacks.Checkpoint(tmp_path, data, resume=seed == 2)
        model.fit(data, epochs=3, verbose=0, callbacks=[note, *more, saver])
        return drawn

    whole = fit(seed=1)
    with pytest.raises(SystemExit):
        fit(End(4, terminate), seed=1)
    rest = fit(seed=2)
    assert len(rest) > 2 and rest == whole[-len(rest) :]
