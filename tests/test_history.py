"""The file with the logs of every epoch."""

import csv

import numpy as np
from monitored import create_data, create_model
from replicas import create_strategy

import tfmulti


def test_the_history_file_has_a_row_for_each_epoch(tmp_path):
    path = tmp_path / "history.csv"
    strategy = create_strategy(2)
    rows = np.zeros((10, 4), "float32"), np.zeros((10, 1), "float32")
    history = create_model(strategy).fit(
        create_data(strategy),
        validation_data=tfmulti.distribute_eval(rows, strategy, 4),
        epochs=3,
        verbose=0,
        callbacks=[tfmulti.callbacks.HistoryFile(path)],
    )
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
