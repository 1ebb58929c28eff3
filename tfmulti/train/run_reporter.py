"""The results of a run: what one worker prints, and the files that it writes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import keras

from tfmulti import callbacks, checkpoint, keras_compat, marks, topology
from tfmulti.checkpoint import folder_lock, generations
from tfmulti.checkpoint.on_chief import on_chief
from tfmulti.cluster import environment
from tfmulti.runtime import console, files
from tfmulti.runtime.console import count
from tfmulti.runtime.memory import show_size
from tfmulti.step import model_contents, owners, split_weights
from tfmulti.strategies import coordination
from tfmulti.train import models
from tfmulti.train.config import TrainConfig

_RESULT = "result.json"


class RunSettings:
    """The effective settings of a run, once devices, data and flags are known.

    Args:
        config: The run.
        plan: The `ShardPlan` of the training data.
        num_workers: Workers of the job.
        model: The compiled model.
        base_learning_rate: The rate before scaling; None if the model was compiled already.

    Attributes:
        plan: As given.
        per_worker_batch_size: Largest number of examples of a step on one worker; the
            `batch_size` of PyTorch, Horovod and Lightning with one process per worker.
        per_replica_batch_size: Largest number of examples of a step on one replica.
        base_learning_rate: As given.
        learning_rate: The rate after scaling and warm-up; None if the model has its own schedule.
    """

    def __init__(
        self, config: TrainConfig, plan, num_workers: int, model, base_learning_rate: float | None
    ):
        self._config, self.plan, self._num_workers = config, plan, num_workers
        self._model = model
        self._optimizer = keras_compat.inner_optimizer(model.optimizer)
        self.per_replica_batch_size = -(-plan.global_batch_size // plan.num_replicas)
        local = plan.num_replicas // num_workers * self.per_replica_batch_size
        self.per_worker_batch_size = min(local, plan.global_batch_size)
        self.base_learning_rate = base_learning_rate
        self.learning_rate = self._final_rate()

    def rows(self) -> dict[str, str]:
        """Returns the block to show: name -> text, both conventions of batch sizes named."""
        config, plan = self._config, self.plan
        most = "at most " if plan.global_batch_size % plan.num_replicas else ""
        replicas = count(plan.num_replicas // self._num_workers, "replica")
        rows = {
            "batch per replica": f"{most}{self.per_replica_batch_size:,}"
            " (batch_size in PyTorch, Horovod, Lightning)",
            "batch per worker": f"{most}{self.per_worker_batch_size:,}, {replicas}",
            "global batch": f"{plan.global_batch_size:,}, {count(self._num_workers, 'worker')}"
            " (batch_size in Keras and tf.distribute)",
        }
        number = config.gradient_accumulation_steps
        if number > 1:
            rows["batch per update"] = f"{plan.global_batch_size * number:,} ({number} steps)"
        rows["learning rate"] = self._show_rate()
        rows["warm-up"] = count(config.warmup_epochs, "epoch") if config.warmup_epochs else "none"
        rows["steps"] = (
            f"{plan.steps_per_epoch * config.epochs:,}: {count(config.epochs, 'epoch')} of "
            f"{plan.steps_per_epoch:,}, {plan.num_examples:,} examples"
        )
        weight_bytes = sum(map(owners.held_bytes, self._model.variables))
        if weight_bytes:  # Else the first batch will create them.
            rows["memory"] = self._show_memory(weight_bytes)
        return rows

    def _show_memory(self, weight_bytes) -> str:
        shard = self._config.sharded if self._num_workers > 1 else None
        slots = "all" if shard is None else show_size(self._updated_bytes())
        where = "this worker" if shard == "parameters" else "each replica"
        return f"{show_size(weight_bytes)} of weights on {where}, optimizer slots for {slots}"

    def _updated_bytes(self) -> int:
        """Returns the bytes of the weights that a worker updates, the largest of what each has."""
        variables = self._model.trainable_variables
        if self._config.pipeline_stages or self._config.tensor_parallel:
            return sum(map(owners.held_bytes, variables))
        by_rows = self._config.sharded == "state"
        optimizer = self._model.optimizer
        return split_weights.most_updated(optimizer, variables, self._num_workers, by_rows)

    def _show_rate(self) -> str:
        name = "none" if self._optimizer is None else self._optimizer.name
        if self.learning_rate is None:
            return f"{name}, by the model's own schedule"
        rate = f"{self.learning_rate:.4g} ({name})"
        if self.base_learning_rate is None:
            return f"{rate}, as the model was compiled"
        if self._config.learning_rate_scaling == "none":
            return f"{rate}, not scaled"
        return (
            f"{rate}: {self.base_learning_rate:.4g} for a base batch of "
            f"{self._config.base_batch_size:,}, {self._config.learning_rate_scaling} rule"
        )

    def _final_rate(self) -> float | None:
        if self.base_learning_rate is not None:
            rate = self.base_learning_rate
            return models.scaled_rate(self._config, self.plan, rate, with_warm_up=False)
        if self._optimizer is None:
            return None
        rate = self._optimizer.get_config().get("learning_rate")
        return rate if isinstance(rate, float) else None


class RunReporter:
    """Prints the lines and writes the files of this worker."""

    def __init__(self, strategy, workdir, print_fn):
        self.strategy = strategy
        self.name = topology.worker_name(strategy) if topology.cluster_of(strategy) else None
        self.num_workers = topology.num_workers(strategy)
        self.is_chief = topology.is_chief(strategy)
        self.workdir = Path(workdir) if workdir else None
        self._print_fn, self.print_fn = print_fn, self._print_with_name
        self.progress = self.saver = None
        self._lock = folder_lock.FolderLock(self.print_fn)

    def _print_with_name(self, line):
        # A launcher already prefixes each line with the name.
        named = self.is_chief or environment.PROGRESS in os.environ
        self._print_fn(line if named else f"{self.name}: {line}")

    def introduce(self, settings: RunSettings, stages: list[str] | None = None) -> None:
        """Prints on the chief where the training runs, and its numbers.

        Args:
            settings: The numbers.
            stages: The device of each stage, where stages are on devices of this process.
        """
        if self.is_chief:
            replicas = count(self.strategy.num_replicas_in_sync, "replica")
            where = f" in stages on {', '.join(stages)}" if stages else ""
            size = settings.plan.global_batch_size
            self.print_fn(f"{self.strategy.why}: {replicas}{where}, global batch size {size}")
            console.show_rows(settings.rows(), self.print_fn)

    def result_of_finished(self) -> dict | None:
        """Returns the result if this job had finished the run before it was started again.

        A worker that fails after that, as while it exits, makes the launcher start all again.
        """
        if not coordination.any_worker(self.strategy, environment.count_restarts(os.environ)):
            return None
        own = self._read_finished() if self.is_chief else None
        text = coordination.broadcast(self.strategy, own)
        if not text:
            return None
        self.print_fn("the run had finished before this restart: nothing is trained")
        result = json.loads(text)
        self._print_digest(result)
        return result

    def _read_finished(self) -> bytes:
        if self.workdir is None:
            return b""
        with contextlib.suppress(OSError):
            jobs = (self.workdir / checkpoint.FINISHED).read_text().splitlines()
            if set(jobs) & set(environment.jobs_of(os.environ)):
                return (self.workdir / _RESULT).read_bytes()
        return b""

    def create_callbacks(self, train, config) -> list:
        """Creates the callbacks that every worker needs, and those of the chief.

        Args:
            train: The training data.
            config: The run.
        """
        # Each host's launcher counts its own restarts.
        resumes = coordination.any_worker(self.strategy, config.resumes())
        chosen = [callbacks.NonFinite(config.on_nonfinite, self.print_fn)]
        if train.audit is not None:
            print_fn = self.print_fn if self.is_chief else None
            chosen.append(callbacks.ShardAuditLog(train, print_fn))
        chosen += self._create_monitors(config)
        if self.is_chief:
            shown = None if console.is_terminal() else self.print_fn
            self.progress = callbacks.Progress(train, print_fn=shown)
        progress = self.progress or callbacks.Events(self.print_fn)
        if self.workdir is None:
            return [*chosen, progress]
        on_chief(self.strategy, lambda: self._take_folder(resumes))
        if self.is_chief:
            logs = self.workdir / "logs"
            chosen.append(callbacks.HistoryFile(self.workdir / "history.csv"))
            chosen.append(keras.callbacks.TensorBoard(logs, write_graph=False))
        self.saver = callbacks.Checkpoint(
            self._checkpoints,
            train,
            every_steps=config.checkpoint_steps,
            every_minutes=config.checkpoint_minutes,
            resume=resumes,
            print_fn=self.print_fn,
        )
        return [*chosen, self.saver, progress]

    def _take_folder(self, resumes):
        """Locks the folder, in which another run may be training, and removes earlier logs."""
        self._lock.take(self._checkpoints, removes=not resumes)
        self.workdir.mkdir(parents=True, exist_ok=True)
        if not resumes or not checkpoint.saved_in(self._checkpoints):
            _remove_logs(self.workdir / "logs")

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
        return self.workdir / checkpoint.FOLDER

    def done_before(self, plan) -> tuple[int, int]:
        """Returns the steps and the examples of this run before its last start.

        Args:
            plan: The `ShardPlan` of the training data.
        """
        if self.saver is None or self.saver.resumed_position is None:
            return 0, 0
        return self.saver.resumed_step, plan.count_before(*self.saver.resumed_position)

    def close(self) -> None:
        """Restores the terminal and leaves the folder to others, also after an error."""
        self._lock.release()
        if self.progress is not None:
            self.progress.close()

    def finish(self, model, result):
        """Writes the model and the result on the chief; prints the weights' digest on all workers.

        It removes the checkpoints of the finished run once all workers have come here: if one fails
        before, all start again, and must not train from the beginning.
        """
        if self.progress is not None:
            self.progress.close()
        if self.workdir is not None:
            self._save(model)
            if self.is_chief:
                text = json.dumps(result, indent=2) + "\n"
                path = self.workdir / _RESULT
                files.write_atomically(path, lambda temporary: temporary.write_text(text))
        coordination.min_and_max(self.strategy, 0)
        if self.workdir is not None and self.is_chief:
            jobs = "\n".join(environment.jobs_of(os.environ))
            if jobs:
                (self.workdir / checkpoint.FINISHED).write_text(jobs)
            generations.remove_all(self._checkpoints)
            (self._checkpoints / folder_lock.NAME).unlink(missing_ok=True)
            _remove_if_empty(self._checkpoints)
        coordination.leave_together(self.strategy)
        self._print_digest(result)

    def _print_digest(self, result):
        if self.name is not None:
            self._print_fn(f"{self.name}: weights_sha256={result['weights_sha256']}")

    def _save(self, model):
        """Saves on the chief; on the others, too, where reading the model is a collective."""
        if self.is_chief:
            files.write_atomically(self.workdir / "model.keras", model.save)
        elif _is_read_together(model):
            with tempfile.TemporaryDirectory() as folder:
                model.save(Path(folder) / "model.keras")


def _remove_logs(folder: Path) -> None:
    """Removes what runs write into a folder of logs, and no files of others."""
    for path in (folder / "train", folder / "validation", *folder.glob("devices_*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_read_together(model) -> bool:
    """Whether workers hold different parts of a model's state, so that all must read it."""
    optimizers = model_contents.optimizers_of(model, nested=True)
    return any(marks.SHARDS.get(each) is not None for each in optimizers) or any(
        hasattr(weight, "is_here") or getattr(weight, "synchronization", "") == "on_read"
        for weight in model.weights
    )


def digest_weights(model: keras.Model) -> str:
    """Returns SHA-256 over all weights in `model.weights` order, as little-endian bytes."""
    digest = hashlib.sha256()
    for weight in model.weights:
        values = keras.ops.convert_to_numpy(weight)
        digest.update(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
