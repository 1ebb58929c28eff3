"""The logs of every epoch: in a CSV file, in Weights & Biases, and in MLflow."""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import keras
from absl import logging

from tfmulti import topology
from tfmulti.runtime import files


class HistoryFile(keras.callbacks.Callback):
    """Writes one row per epoch to a CSV file, under a temporary name that is then renamed.

    Use it on the chief only. Columns are those of the first epoch, and new ones as they appear.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = Path(path)
        self._rows: list[dict] | None = None

    def on_train_begin(self, logs=None):
        """Starts anew."""
        self._rows = None

    def on_epoch_begin(self, epoch, logs=None):
        """Keeps the rows of earlier epochs if training resumes."""
        if self._rows is None:
            self._rows = [row for row in self._read() if int(row["epoch"]) < epoch]

    def _read(self) -> list[dict]:
        if not self._path.exists():
            return []
        with open(self._path, newline="") as file:
            return list(csv.DictReader(file))

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's row."""
        self._rows.append({"epoch": epoch, **(logs or {})})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        try:
            files.write_atomically(self._path, lambda path: self._write(path, columns))
        except OSError as error:
            # As for a checkpoint: a disk that is full for an hour must not end a run of days.
            logging.warning("history of epoch %d not written, later ones have it: %s", epoch, error)

    def _write(self, path, columns):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)


class _OfChief(keras.callbacks.Callback):
    """Wraps a logging callback that is created when `fit` begins, on the chief only."""

    package = ""

    def __init__(self):
        super().__init__()
        if importlib.util.find_spec(self.package) is None:
            raise RuntimeError(
                f"`{type(self).__name__}` needs the package {self.package}. "
                f"Received: no module named {self.package}. "
                f"pip install 'tfmulti[{self.package}]'"
            )
        self._inner: keras.callbacks.Callback | None = None

    def on_train_begin(self, logs=None):
        """Begins a run, or continues one that was begun before `fit`."""
        if not topology.is_chief(self.model.distribute_strategy):
            return
        self._inner = self._begin()
        self._inner.set_params(self.params)
        self._inner.set_model(self.model)
        self._inner.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        """Hands the epoch on."""
        if self._inner is not None:
            self._inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Hands the epoch's logs on."""
        if self._inner is not None:
            self._inner.on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        """Ends the run if this callback began it."""
        if self._inner is not None:
            self._inner.on_train_end(logs)
            self._inner = None
            self._end()

    def _begin(self) -> keras.callbacks.Callback:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError


class WandbLogs(_OfChief):
    """Logs every epoch to Weights & Biases, through its `WandbMetricsLogger`.

    Only the chief logs. A run that was begun with `wandb.init` before is continued, and stays
    open. The variables of the package apply: WANDB_MODE=offline, WANDB_DIR, and WANDB_RUN_ID with
    WANDB_RESUME=allow to continue a run after a restart.

    Args:
        project: The project.
        folder: Where wandb keeps its files; None for its own place.
        config: The configuration of the run, by name.
        **settings: Further arguments of `wandb.init`.

    Raises:
        RuntimeError: Where the package wandb is missing.
    """

    package = "wandb"

    def __init__(
        self,
        project: str = "tfmulti",
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
        **settings,
    ):
        super().__init__()
        self._settings = {"project": project, "config": dict(config or {}), **settings}
        if folder is not None:
            self._settings["dir"] = str(folder)
        self._run = None

    def _begin(self):
        import wandb
        from wandb.integration.keras import WandbMetricsLogger

        if wandb.run is None:
            # It would write to a temporary folder where this one is not there.
            Path(self._settings.get("dir") or ".").mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(**self._settings)
        return WandbMetricsLogger(log_freq="epoch")

    def _end(self):
        if self._run is not None:
            self._run.finish()
            self._run = None


class MlflowLogs(_OfChief):
    """Logs every epoch to MLflow, through its `MlflowCallback`.

    Only the chief logs. A run that was begun with `mlflow.start_run` before is continued, and
    stays open. The variables of MLflow apply: MLFLOW_TRACKING_URI, and MLFLOW_RUN_ID to continue
    a run after a restart.

    Args:
        experiment: The experiment.
        folder: Where to keep a database, `mlflow.db`, where no tracking server is set by
            MLFLOW_TRACKING_URI or `mlflow.set_tracking_uri`; None for MLflow's own place.
        config: What the run was made from, by name: the run's parameters.

    Raises:
        RuntimeError: Where the package mlflow is missing.
    """

    package = "mlflow"

    def __init__(
        self,
        experiment: str = "tfmulti",
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
    ):
        super().__init__()
        self._experiment, self._folder, self._config = experiment, folder, dict(config or {})
        self._run, self._keeps = None, False

    def _begin(self):
        import mlflow
        from mlflow.keras import MlflowCallback

        if mlflow.active_run() is None:
            self._keeps = self._folder is not None and not mlflow.is_tracking_uri_set()
            if self._keeps:
                _keep_in(mlflow, Path(self._folder), self._experiment)
            else:
                mlflow.set_experiment(self._experiment)
            self._run = mlflow.start_run()
            mlflow.log_params(self._config)
        return MlflowCallback()

    def _end(self):
        import mlflow

        mlflow.flush_async_logging()
        if self._run is not None:
            mlflow.end_run()
            self._run = None
        if self._keeps:
            # The next run may have another folder.
            mlflow.set_tracking_uri(None)


def _keep_in(mlflow, folder, experiment):
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    if mlflow.get_experiment_by_name(experiment) is None:
        # Else its files go to the folder in which the process was started.
        mlflow.create_experiment(experiment, (folder / "mlartifacts").as_uri())
    mlflow.set_experiment(experiment)
