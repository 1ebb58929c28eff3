"""One worker's part in a run: what it shows and what it writes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

from tfmulti import callbacks, files
from tfmulti.strategies import agreement


class Worker:
    """This process's part in the job: what it shows and what it writes."""

    def __init__(self, strategy, workdir, tell):
        resolver = getattr(strategy, "cluster_resolver", None)
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.strategy = strategy
        self.name = f"{resolver.task_type} {resolver.task_id}" if several else None
        self.num_workers = agreement.num_workers(strategy)
        self.is_chief = agreement.is_chief(strategy)
        self.workdir = Path(workdir) if workdir else None
        self.tell = tell

    @property
    def verbose(self) -> int:
        """Keras's progress bar on the chief's terminal, a line an epoch in its log file."""
        if not self.is_chief:
            return 0
        return 1 if os.isatty(1) else 2

    def introduce(self, global_batch_size: int) -> None:
        """Says where the training runs, on the chief."""
        if self.is_chief:
            replicas = f"{self.strategy.num_replicas_in_sync} replicas"
            self.tell(f"{self.strategy.why}: {replicas}, global batch size {global_batch_size}")

    def create_callbacks(self, train, config) -> list:
        """Makes the callbacks that every worker needs, and those of the chief.

        Args:
            train: The training data.
            config: The run.
        """
        chosen = [callbacks.NonFinite(config.on_nonfinite, self.tell)]
        if train.audit is not None:
            tell = self.tell if self.is_chief else None
            chosen.append(callbacks.ShardAuditLog(train, tell))
        chosen += self._create_monitors(config)
        if self.workdir is None:
            return chosen
        if self.is_chief:
            self.workdir.mkdir(parents=True, exist_ok=True)
            logs = self.workdir / "logs"
            if config.resume == "never" or not self._checkpoints.exists():
                shutil.rmtree(logs, ignore_errors=True)
            chosen.append(callbacks.HistoryFile(self.workdir / "history.csv"))
            chosen.append(keras.callbacks.TensorBoard(logs, write_graph=False))
        saver = callbacks.Checkpoint(
            self._checkpoints,
            train,
            every_steps=config.checkpoint_steps,
            every_minutes=config.checkpoint_minutes,
            resume=config.resume == "auto",
            tell=self.tell,
        )
        return [*chosen, saver]

    def tell_of_monitors(self, config):
        """Returns what the chief tells of the whole job with, or None."""
        return self.tell if config.monitor and self.is_chief else None

    def _create_monitors(self, config) -> list:
        chosen = []
        if config.monitor:
            folder = None if self.workdir is None else self.workdir / "logs"
            chosen.append(callbacks.Devices(folder, self.tell))
        settings = {"folder": self.workdir, "config": dataclasses.asdict(config)}
        if config.track == "wandb":
            chosen.append(callbacks.WandbLogs(**settings))
        if config.track == "mlflow":
            chosen.append(callbacks.MlflowLogs(**settings))
        return chosen

    @property
    def _checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    def finish(self, model, result):
        """Writes the model and the result, on the chief; says the weights' digest everywhere.

        A run that has ended needs its checkpoints no more.
        """
        if self.workdir is not None:
            self._save(model)
            if self.is_chief:
                shutil.rmtree(self._checkpoints, ignore_errors=True)
                text = json.dumps(result, indent=2) + "\n"
                path = self.workdir / "result.json"
                files.write_atomically(path, lambda temporary: temporary.write_text(text))
        if self.name is not None:
            self.tell(f"{self.name}: weights_sha256={result['weights_sha256']}")

    def _save(self, model):
        """Saves on every worker, since reading state can be a collective; keeps the chief's."""
        if self.is_chief:
            files.write_atomically(self.workdir / "model.keras", model.save)
            return
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")


def digest_weights(model: keras.Model) -> str:
    """Returns SHA-256 over all weights in `model.weights` order, as little-endian bytes."""
    digest = hashlib.sha256()
    for weight in model.weights:
        values = keras.ops.convert_to_numpy(weight)
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
