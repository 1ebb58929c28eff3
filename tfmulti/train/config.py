"""The configuration of a training run, checked before TensorFlow is imported."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from tfmulti import choices
from tfmulti.cluster import environment
from tfmulti.cluster.scheduler_variables import check_num_ps
from tfmulti.cluster.schedulers import ANY_OF_THEM
from tfmulti.runtime.memory import parse_size
from tfmulti.settings import check_model, check_settings, check_used, setting, unused_by
from tfmulti.sharding import REMAINDERS
from tfmulti.train import techniques


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run; every setting is a flag of `python -m tfmulti.train`.

    Raises:
        ValueError: For a value that is invalid or incompatible with another.

    Example:
    >>> TrainConfig(strategy="mirrored", logical_cpus=2, epochs=3).epochs
    3
    """

    strategy: str = setting("auto", "Where to train.", choices.STRATEGIES)
    tf_config: str | Mapping | None = setting(
        None, "File or folder with the cluster; by default the variable TF_CONFIG.", per_worker=True
    )
    model: str = setting("cnn", "cnn, mlp, or package.module:function.")
    dataset: str = setting(
        "digits", "digits, a tensorflow-datasets name, or package.module:function."
    )
    per_replica_batch_size: int | str | None = setting(
        None,
        "Examples per step of one replica, instead of --global_batch_size; auto takes as many as "
        "fit in memory.",
        at_least=1,
        word=choices.AUTO,
        on_servers=False,
    )
    memory_limit: str | None = setting(
        None,
        "Memory of one worker for --per_replica_batch_size auto, such as 4GB; by default that of "
        "a GPU, or without GPUs half of this container's, divided by its workers.",
    )
    estimate_memory: int | None = setting(
        None,
        "Print, without training, the memory that each of this many one-replica workers would "
        "need.",
        at_least=1,
        on_servers=False,
    )
    global_batch_size: int | None = setting(
        None,
        f"Examples per step over all replicas. By default {choices.DEFAULT_GLOBAL_BATCH_SIZE}.",
        at_least=1,
    )
    epochs: int = setting(20, "Passes over the data.", at_least=1)
    steps_per_epoch: int | None = setting(
        None, "Steps per epoch; by default one pass over the data.", at_least=1
    )
    optimizer: str | None = setting(
        None, "Optimizer; momentum is SGD with momentum 0.9. By default adam.", choices.OPTIMIZERS
    )
    learning_rate: float | None = setting(
        None, "Rate for the base batch size; by default, 0.001 for adam.", at_least=0.0
    )
    learning_rate_scaling: str = setting(
        "none", "How the rate grows with the global batch size.", choices.SCALING_RULES
    )
    base_batch_size: int = setting(
        256, "Batch size for which the learning rate was tuned.", at_least=1
    )
    warmup_epochs: float = setting(0.0, "Epochs of gradual warm-up.", at_least=0.0)
    dtype_policy: str = setting("float32", "Keras dtype policy.", choices.DTYPE_POLICIES)
    gradient_accumulation_steps: int = setting(
        1, "Steps whose gradients are accumulated for one update.", at_least=1
    )
    steps_per_execution: int = setting(
        1, "Steps per call of the compiled function.", at_least=1, on_servers=False
    )
    remainder: str = setting("uneven", "What to do with the last, short batch.", REMAINDERS)
    communication: str = setting("auto", "How workers reduce gradients.", choices.COMMUNICATIONS)
    bucket_bytes: int | None = setting(
        None,
        "Bytes of small gradients that workers send together; by default 4 MiB over MPI, 16 MiB "
        "over the ring, and all of them over NCCL.",
        at_least=1,
    )
    compression: str | None = setting(
        None, "Send gradients rounded to half precision.", choices.COMPRESSIONS, on_servers=False
    )
    shard: str | None = setting(
        None,
        "Shard over the workers: state shards the optimizer's slots (ZeRO 1 and 2), parameters "
        "also large weights (ZeRO 3, FSDP).",
        choices.SHARDS,
        on_servers=False,
    )
    pipeline_stages: int | None = setting(
        None,
        "Number of pipeline stages, one per worker; the number of workers must be a multiple of "
        "it. With --strategy one_device, the stages are placed on the first GPUs of this process, "
        "or on its --logical_cpus.",
        at_least=2,
        on_servers=False,
    )
    micro_batches: int = setting(
        4, "Number of micro-batches into which a pipeline splits each step.", at_least=1
    )
    tensor_parallel: str | None = setting(
        None,
        "Split wide layers over all workers: patterns of weights' paths and kinds, such as "
        "dense/kernel=column,dense_1/kernel=row.",
        on_servers=False,
    )
    synchronize_every: int = setting(
        1,
        "Local steps of each worker between two averages of the weights, for slow networks; 1 "
        "reduces gradients in every step.",
        at_least=1,
        on_servers=False,
    )
    start_timeout: float | None = setting(
        None,
        "Seconds that workers wait for one another; by default TFMULTI_START_TIMEOUT, else 60.",
        at_least=0.001,
        per_worker=True,
    )
    heartbeat_timeout: float = setting(
        choices.DEFAULT_HEARTBEAT_TIMEOUT_S,
        "Seconds without a heartbeat until a worker counts as lost.",
        at_least=1.0,
    )
    checkpoint_activations: bool = setting(
        False,
        "Checkpoint activations: recompute them in the backward pass, which saves memory and "
        "costs a second forward pass.",
    )
    logical_cpus: int = setting(
        0,
        "Number of logical CPUs into which to split the CPU; 0 does not split it (mirrored then "
        "uses 2).",
        at_least=0,
    )
    seed: int = setting(0, "Seed of weights, order and randomness.", at_least=0)
    on_nonfinite: str = setting(
        "stop", "What to do if a gradient is infinite or not a number.", choices.ON_NONFINITE
    )
    resume: str = setting(
        "auto",
        "Whether to resume from the checkpoints in --workdir; a job that the launcher or Slurm "
        "starts again always does.",
        choices.RESUME,
    )
    checkpoint_steps: int | None = setting(
        None, "Steps between checkpoints within an epoch.", at_least=1
    )
    checkpoint_minutes: float | None = setting(
        None, "Minutes between checkpoints within an epoch.", at_least=0.001
    )
    audit_shards: bool = setting(
        False, "Report which rows each replica received.", on_servers=False
    )
    monitor: bool = setting(
        False,
        "Report throughput, CPU, memory and GPUs of every worker after every epoch.",
        on_servers=False,
    )
    track: str = setting(
        "none", "Log every epoch to Weights & Biases or to MLflow.", choices.TRACKERS
    )
    workdir: str | None = setting(
        None, "Folder for model.keras, history.csv, result.json and logs/.", per_worker=True
    )
    verify: str = setting(
        "auto",
        "Whether to check with a few rows, before the first step, that many replicas give the "
        "result of one device; auto checks models with custom parts only.",
        choices.VERIFY,
    )
    on_difference: str = setting(
        choices.REPLICATE,
        "What to do if this check finds a difference: replicate computes the whole batch on every "
        "replica, with the result and the speed of one device; error stops.",
        choices.ON_DIFFERENCE,
    )
    deterministic: bool = setting(False, "Use deterministic operations only; slower.")
    num_ps: int | None = setting(
        None,
        f"With parameter_server in a job of {ANY_OF_THEM}: how many of its tasks, "
        "the last ones, are servers; by default TFMULTI_NUM_PS.",
        at_least=1,
    )
    max_staleness: int | None = setting(
        None,
        "With parameter_server: the maximum number of updates by other workers between reading "
        "weights and applying a gradient; by default unlimited; 0 for synchronous steps.",
        at_least=0,
    )

    def __post_init__(self):
        check_settings(self)
        check_model(self.model)
        if self.global_batch_size and self.per_replica_batch_size:
            raise ValueError(
                "`global_batch_size` and `per_replica_batch_size` exclude each other. Received: "
                f"global_batch_size={self.global_batch_size}, "
                f"per_replica_batch_size={self.per_replica_batch_size}. Give one of them."
            )
        if self.estimate_memory is not None and self.per_replica_batch_size == choices.AUTO:
            raise ValueError(
                "`estimate_memory` needs the number of examples. Received: estimate_memory="
                f"{self.estimate_memory}, per_replica_batch_size='auto'. "
                "Use --per_replica_batch_size 32, say, or --global_batch_size."
            )
        if self.memory_limit is not None:
            parse_size(self.memory_limit)
            if self.per_replica_batch_size != choices.AUTO:
                raise ValueError(
                    "`memory_limit` needs per_replica_batch_size=auto. Received: "
                    f"memory_limit={self.memory_limit!r}, "
                    f"per_replica_batch_size={self.per_replica_batch_size}. "
                    "Use --per_replica_batch_size auto, or leave --memory_limit out."
                )
        if self.strategy != "parameter_server":
            advice = "Leave --{name} out, or use --strategy {strategy}."
            check_used("strategy", vars(self), self.defaults(), advice)
        on_one = self.strategy in ("one_device", "tpu") and not self.has_stages_on_devices
        if self.logical_cpus > 1 and on_one:
            raise ValueError(
                "`logical_cpus` above 1 needs mirrored, multi_worker or auto, or one_device "
                "with `pipeline_stages`. "
                f"Received: logical_cpus={self.logical_cpus}, strategy={self.strategy!r}. "
                "Use --strategy mirrored."
            )
        self._check_checkpoints()
        self._check_rate()
        self._check_servers()
        techniques.check(self)

    def _check_checkpoints(self):
        for name in ("checkpoint_steps", "checkpoint_minutes"):
            if getattr(self, name) and not self.workdir:
                raise ValueError(
                    f"`{name}` needs a folder for the checkpoints. Received: "
                    f"{name}={getattr(self, name)} without workdir. Add --workdir FOLDER."
                )

    def _check_rate(self):
        is_given = self.base_batch_size != self.defaults()["base_batch_size"]
        if is_given and self.learning_rate_scaling == "none":
            raise ValueError(
                "`base_batch_size` needs a rule by which the rate grows with the batch. Received: "
                f"base_batch_size={self.base_batch_size}, learning_rate_scaling='none'. "
                "Add --learning_rate_scaling linear, or leave --base_batch_size out."
            )

    def _check_servers(self):
        """Raises ValueError for what belongs to parameter servers, or cannot be used with them."""
        check_num_ps(self.num_ps, self.strategy)
        if self.strategy != "parameter_server":
            if self.max_staleness is not None:
                raise ValueError(
                    "`max_staleness` can be used with parameter_server only. Received: "
                    f"max_staleness={self.max_staleness}, strategy={self.strategy!r}. "
                    "Use --strategy parameter_server, or leave --max_staleness out."
                )
            return
        given = [
            field.name
            for field in dataclasses.fields(self)
            if not field.metadata["on_servers"] and getattr(self, field.name) != field.default
        ]
        given += unused_by(self.strategy, vars(self), self.defaults())
        if self.remainder not in ("uneven", "drop"):
            given.append("remainder")
        if given:
            name = given[0]
            raise ValueError(
                f"`{name}` cannot be used with parameter_server, which auto chooses if the cluster "
                f"has parameter servers. Received: {name}={getattr(self, name)!r}. "
                f"Leave --{name} out, or use --strategy multi_worker."
            )

    @classmethod
    def defaults(cls) -> dict[str, object]:
        """Returns the defaults of all settings, by name."""
        return {field.name: field.default for field in dataclasses.fields(cls)}

    def check_with_servers(self) -> None:
        """Raises ValueError for a setting that has no effect once `auto` chooses servers."""
        dataclasses.replace(self, strategy="parameter_server")

    def resumes(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether to resume from checkpoints: with `never`, they are an earlier run's at first.

        Once a job has been started again, they are its own.

        >>> config = TrainConfig(resume="never")
        >>> config.resumes({}), config.resumes({"TFMULTI_RESTARTS": "1"})
        (False, True)
        """
        return self.resume == "auto" or environment.count_restarts(environ) > 0

    @property
    def has_stages_on_devices(self) -> bool:
        """Whether the stages of a pipeline are on the devices of this one process."""
        return bool(self.pipeline_stages) and self.strategy == "one_device"

    @property
    def sharded(self) -> str | None:
        """What is sharded: weights of stages and split weights lie with their workers."""
        return "parameters" if self.pipeline_stages or self.tensor_parallel else self.shard

    @property
    def layout(self) -> dict[str, str]:
        """The splits of `tensor_parallel`, by pattern.

        >>> TrainConfig(tensor_parallel="dense/kernel=column").layout
        {'dense/kernel': 'column'}
        """
        items = self.tensor_parallel.split(",") if self.tensor_parallel else []
        pairs = [item.rpartition("=") for item in items]
        return {pattern: kind for pattern, _, kind in pairs}

    def resolve_global_batch_size(self, num_replicas: int) -> int:
        """Returns the examples per step over all replicas.

        Raises:
            ValueError: If `"auto"` has not been replaced with a number.

        >>> TrainConfig(per_replica_batch_size=32).resolve_global_batch_size(4)
        128
        """
        if self.per_replica_batch_size == choices.AUTO:
            raise ValueError(
                "`per_replica_batch_size` must be a number here. Received: 'auto'. "
                "Use train_and_evaluate, which finds it."
            )
        if self.per_replica_batch_size:
            return self.per_replica_batch_size * num_replicas
        return self.global_batch_size or choices.DEFAULT_GLOBAL_BATCH_SIZE
