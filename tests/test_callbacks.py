import csv

import keras
import numpy as np
import pytest
from replicas import create_strategy

import tfmulti


class Clock:
    """Each reading is one second later than the last."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return float(self.now)


def fit(callbacks, *, epochs=3, num_replicas=2, steps_per_execution=1, position=None):
    """Trains three steps an epoch; `callbacks` can be a function of the dataset."""
    strategy = create_strategy(num_replicas)
    data = np.zeros((10, 4), "float32"), np.zeros((10, 1), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    train = tfmulti.distribute_train(data, strategy, 4, seed=0)
    if position is not None:
        train.set_position(*position)
        callbacks = callbacks(train)
    test = tfmulti.distribute_eval(data, strategy, 4)
    return model.fit(train, epochs=epochs, validation_data=test, verbose=0, callbacks=callbacks)


def test_throughput_counts_global_examples_without_the_first_call():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    history = fit([callback])
    assert (callback.steps, callback.examples) == (9, 30)
    # A second for each step; of nine steps the first is not timed.
    assert callback.seconds == 8.0
    assert callback.examples_per_second == pytest.approx(30 / 9)
    assert len(history.history["examples_per_second"]) == 3


def test_throughput_counts_what_is_left_of_an_epoch_that_was_begun():
    made = []

    def callbacks(dataset):
        made.append(tfmulti.callbacks.Throughput(dataset, clock=Clock()))
        return made

    fit(callbacks, epochs=2, position=(0, 1))
    # Batches of 4, 4 and 2 rows: the first was taken before.
    assert (made[0].steps, made[0].examples) == (5, 16)


def test_throughput_counts_the_steps_of_a_call():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    fit([callback], steps_per_execution=3)
    assert (callback.steps, callback.examples) == (9, 30)


def test_throughput_of_one_call_is_not_measured():
    callback = tfmulti.callbacks.Throughput(clock=Clock())
    history = fit([callback], epochs=1, steps_per_execution=3)
    assert callback.examples_per_second is None
    assert "examples_per_second" not in history.history


def test_the_history_file_has_a_row_for_each_epoch(tmp_path):
    path = tmp_path / "history.csv"
    history = fit([tfmulti.callbacks.HistoryFile(path)])
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [float(row["val_loss"]) for row in rows] == history.history["val_loss"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.csv"]


def test_the_history_file_is_replaced_not_written_into(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("epoch,loss\n0,9.0\n")
    callback = tfmulti.callbacks.HistoryFile(path)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {"loss": 1.0})
    before = path.stat().st_ino
    callback.on_epoch_end(1, {"loss": 0.5, "new": 2})
    assert path.stat().st_ino != before
    assert path.read_text().splitlines() == ["epoch,loss,new", "0,1.0,", "1,0.5,2"]
