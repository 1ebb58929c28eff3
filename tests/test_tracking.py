"""The logs of every epoch: in a file, in Weights & Biases and in MLflow, of the chief alone."""

import csv
import sys
import types
import unittest.mock

import numpy as np
import pytest
from monitored import create_data, create_model
from replicas import create_strategy

import tfmulti
from tfmulti.callbacks import HistoryFile, MlflowLogs, Throughput, WandbLogs

TRACKERS = {"wandb": WandbLogs, "mlflow": MlflowLogs}


@pytest.mark.parametrize("package", TRACKERS)
def test_a_missing_extra_says_what_to_install(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=rf"needs the package {package}.*tfmulti\[{package}\]"):
        TRACKERS[package]()


@pytest.mark.parametrize("package", TRACKERS)
def test_other_workers_track_nothing(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    callback = TRACKERS[package]()
    extended = types.SimpleNamespace(should_checkpoint=False)
    strategy = types.SimpleNamespace(extended=extended)
    callback.set_model(types.SimpleNamespace(distribute_strategy=strategy))
    # Without the package, beginning a run would be an ImportError.
    monkeypatch.setitem(sys.modules, package, None)
    callback.on_train_begin()
    callback.on_epoch_end(0, {"loss": 1.0})
    callback.on_train_end()


def fit_tracked(callback):
    strategy = create_strategy(2)
    data = create_data(strategy)
    callbacks = [Throughput(data), callback]
    return create_model(strategy).fit(data, epochs=3, verbose=0, callbacks=callbacks).history


def test_wandb_gets_every_epoch(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'tfmulti[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="theirs", dir=tmp_path) as run:
        history = fit_tracked(WandbLogs())
        assert wandb.run is run
        summary = dict(run.summary)
    assert summary["epoch/epoch"] == 2
    for name in ("loss", "examples_per_second"):
        assert summary[f"epoch/{name}"] == pytest.approx(history[name][-1])
    fit_tracked(WandbLogs("own", tmp_path / "new", {"epochs": 3}))
    assert wandb.run is None
    [files] = (tmp_path / "new" / "wandb").glob("offline-run-*")
    assert list(files.glob("run-*.wandb"))


def test_mlflow_gets_every_epoch(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install 'tfmulti[mlflow]'")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    history = fit_tracked(MlflowLogs("digits", tmp_path / "runs", {"epochs": 3, "seed": None}))
    assert mlflow.active_run() is None and not mlflow.is_tracking_uri_set()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["epochs"], run.data.params["seed"]) == ("3", "None")
    for name in ("loss", "examples_per_second"):
        values = [metric.value for metric in client.get_metric_history(run.info.run_id, name)]
        assert values == pytest.approx(history[name])
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_the_history_file_has_a_row_for_each_epoch(tmp_path):
    path = tmp_path / "history.csv"
    strategy = create_strategy(2)
    rows = np.zeros((10, 4), "float32"), np.zeros((10, 1), "float32")
    history = create_model(strategy).fit(
        create_data(strategy),
        validation_data=tfmulti.distribute_eval(rows, strategy, 4),
        epochs=3,
        verbose=0,
        callbacks=[HistoryFile(path)],
    )
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [float(row["val_loss"]) for row in rows] == history.history["val_loss"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["history.csv"]


def test_the_history_file_is_replaced_not_written_into(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("epoch,loss\n0,9.0\n")
    callback = HistoryFile(path)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_epoch_end(0, {"loss": 1.0})
    before = path.stat().st_ino
    callback.on_epoch_end(1, {"loss": 0.5, "new": 2})
    assert path.stat().st_ino != before
    assert path.read_text().splitlines() == ["epoch,loss,new", "0,1.0,", "1,0.5,2"]


def test_a_history_that_cannot_be_written_for_a_time_ends_no_run(tmp_path, monkeypatch):
    """A full disk ended the run, although a checkpoint that cannot be written does not."""
    path = tmp_path / "history.csv"
    callback = HistoryFile(path)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    with monkeypatch.context() as patch:
        full = unittest.mock.Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(HistoryFile, "_write", full)
        callback.on_epoch_end(0, {"loss": 1.0})
    callback.on_epoch_end(1, {"loss": 0.5})
    assert path.read_text().splitlines() == ["epoch,loss", "0,1.0", "1,0.5"]
