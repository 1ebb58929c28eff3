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

from tfmulti import callbacks
from tfmulti.cluster import environment
from tfmulti.runtime import console, files
from tfmulti.strategies import collectives


class RunReporter:
    """This process's part in the job: what it shows and what it writes."""

    def __init__(self, strategy, workdir, print_fn):
        resolver = getattr(strategy, "cluster_resolver", None)
        several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        self.strategy = strategy
        self.name = f"{resolver.task_type} {resolver.task_id}" if several else None
        self.num_workers = collectives.num_workers(strategy)
        self.is_chief = collectives.is_chief(strategy)
        self.workdir = Path(workdir) if workdir else None
        self._print_fn, self.print_fn = print_fn, self._print_with_name
        self.progress = self.saver = None

    def _print_with_name(self, line):
        # A launcher puts the name before each line by itself.
        named = self.is_chief or environment.PROGRESS in os.environ
        self._print_fn(line if named else f"{self.name}: {line}")

    def introduce(self, global_batch_size: int) -> None:
        """Says where the training runs, on the chief."""
        if self.is_chief:
            replicas = console.count(self.strategy.num_replicas_in_sync, "replica")
            self.print_fn(f"{self.strategy.why}: {replicas}, global batch size {global_batch_size}")

    def show_numbers(self, numbers) -> None:
        """Shows the effective numbers, on the chief: a table on a terminal, else lines.

        Args:
            numbers: The `Numbers` of the run.
        """
        if self.is_chief:
            console.show_rows(numbers.rows(), None if console.is_terminal() else self.print_fn)

    def show_progress(self, train) -> keras.callbacks.Callback:
        """Makes the callback that says how far training is: a bar, or plain lines.

        Args:
            train: The training data.
        """
        if not self.is_chief:
            return callbacks.Events(self.print_fn)
        self.progress = callbacks.Progress(
            train, print_fn=None if console.is_terminal() else self.print_fn
        )
        return self.progress

    def create_callbacks(self, train, config) -> list:
        """Makes the callbacks that every worker needs, and those of the chief.

        Args:
            train: The training data.
            config: The run.
        """
        chosen = [callbacks.NonFinite(config.on_nonfinite, self.print_fn)]
        if train.audit is not None:
            print_fn = self.print_fn if self.is_chief else None
            chosen.append(callbacks.ShardAuditLog(train, print_fn))
        chosen += self._create_monitors(config)
        if self.workdir is None:
            return [*chosen, self.show_progress(train)]
        if self.is_chief:
            self.workdir.mkdir(parents=True, exist_ok=True)
            logs = self.workdir / "logs"
            if config.resume == "never" or not self._checkpoints.exists():
                shutil.rmtree(logs, ignore_errors=True)
            chosen.append(callbacks.HistoryFile(self.workdir / "history.csv"))
            chosen.append(keras.callbacks.TensorBoard(logs, write_graph=False))
        self.saver = callbacks.Checkpoint(
            self._checkpoints,
            train,
            every_steps=config.checkpoint_steps,
            every_minutes=config.checkpoint_minutes,
            resume=config.resume == "auto",
            print_fn=self.print_fn,
        )
        return [*chosen, self.saver, self.show_progress(train)]

    def print_fn_of_monitors(self, config):
        """Returns what the chief tells of the whole job with, or None."""
        return self.print_fn if config.monitor and self.is_chief else None

    def _create_monitors(self, config) -> list:
        chosen = []
        if config.monitor:
            folder = None if self.workdir is None else self.workdir / "logs"
            chosen.append(callbacks.Devices(folder, self.print_fn))
        settings = {"folder": self.workdir, "config": dataclasses.asdict(config)}
        if config.track == "wandb":
            chosen.append(callbacks.WandbLogs(**settings))
        if config.track == "mlflow":
            chosen.append(callbacks.MlflowLogs(**settings))
        return chosen

    @property
    def _checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    def done_before(self, plan) -> tuple[int, int]:
        """Returns the steps and the examples of this run before its last start.

        Args:
            plan: The `ShardPlan` of the training data.
        """
        if self.saver is None or self.saver.resumed_position is None:
            return 0, 0
        return self.saver.resumed_step, plan.count_before(*self.saver.resumed_position)

    def close(self) -> None:
        """Gives the terminal back, however training has ended."""
        if self.progress is not None:
            self.progress.close()

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
            self._print_fn(f"{self.name}: weights_sha256={result['weights_sha256']}")

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
