"""The flags of a run that divide a model or its training over workers, checked together."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from tfmulti.choices import AUTO, SPLITS
from tfmulti.settings import unused_by

if TYPE_CHECKING:
    from tfmulti.train.config import TrainConfig


def check(config: TrainConfig) -> None:
    """Raises ValueError for flags of techniques that are invalid, or exclude each other."""
    if config.pipeline_stages:
        _check_stages(config)
    elif config.micro_batches != config.__dataclass_fields__["micro_batches"].default:
        raise ValueError(
            "`micro_batches` can be used only with `pipeline_stages`. Received: "
            f"micro_batches={config.micro_batches}, without pipeline_stages. Use --pipeline_stages "
            "2, say, or leave --micro_batches out."
        )
    if config.tensor_parallel is not None:
        _check_layout(config)
    if config.estimate_memory is not None:
        _check_estimate(config)
    if config.compression is not None and config.sharded == "parameters":
        name, value = _sharding_flag(config)
        raise ValueError(
            f"Gradients are sent in full precision with `{name}`. Received: {name}={value!r}, "
            f"compression={config.compression!r}. Leave --compression out."
        )
    if config.synchronize_every > 1:
        _check_local_steps(config)
    if config.tensor_parallel or config.strategy == "multi_worker":
        check_batch_size(config)


def check_batch_size(config: TrainConfig) -> None:
    """Raises ValueError for a batch size to be found for a model that is divided over workers.

    Stages of `auto` may still be placed on the devices of one process, where it can be found.
    """
    name, value = _sharding_flag(config)
    is_divided = name != "shard" and value is not None and not config.has_stages_on_devices
    if is_divided and config.per_replica_batch_size == AUTO:
        raise ValueError(
            "`per_replica_batch_size=auto` runs steps in one process, and cannot find the batch "
            f"size of a model that `{name}` divides over workers. Received: "
            f"per_replica_batch_size='auto', {name}={value!r}. "
            "Use --per_replica_batch_size 32, say, or --global_batch_size."
        )


def with_stages_placed(config: TrainConfig, num_workers: int) -> TrainConfig:
    """Returns the run with `one_device` for `auto` where one process has all stages.

    Args:
        config: The run.
        num_workers: The number of workers; 1 for a process of its own.

    Raises:
        ValueError: If there are not as many workers as the stages of a pipeline need, or for a
            batch size that cannot be found with stages on workers.
    """
    stages = config.pipeline_stages
    if not stages or config.has_stages_on_devices:
        return config
    if num_workers == 1 and config.strategy == "auto":
        # What `auto` accepts for workers has no effect in one process.
        defaults = config.defaults()
        unused = unused_by("one_device", vars(config), defaults)
        return dataclasses.replace(
            config, strategy="one_device", **{name: defaults[name] for name in unused}
        )
    check_batch_size(config)
    if num_workers % stages == 0:
        return config
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    raise ValueError(
        "`pipeline_stages` needs a worker for each stage, or a multiple of that. Received: "
        f"pipeline_stages={stages}, {workers}. Start python -m tfmulti.launch --num_workers "
        f"{stages} --mpi -- python -m tfmulti.train, or use --strategy one_device for stages on "
        f"the GPUs of this process, or on --logical_cpus {stages}."
    )


def _check_stages(config):
    received = f"Received: pipeline_stages={config.pipeline_stages}, "
    if config.shard == "state":
        raise ValueError(
            "`pipeline_stages` cannot be combined with shard='state': it already divides weights "
            f"and slots over the stages. {received}shard='state'. Leave --shard out."
        )
    if config.strategy in ("mirrored", "tpu"):
        raise ValueError(
            "`pipeline_stages` needs one_device, whose devices then have a stage each, or "
            f"workers. {received}strategy={config.strategy!r}. Use --strategy one_device, or "
            f"python -m tfmulti.launch --num_workers {config.pipeline_stages} --mpi with "
            "--strategy multi_worker."
        )
    if not config.has_stages_on_devices:
        return
    if 0 < config.logical_cpus < config.pipeline_stages:
        raise ValueError(
            "`logical_cpus` must be at least `pipeline_stages`: each stage is on one. "
            f"{received}logical_cpus={config.logical_cpus}. "
            f"Use --logical_cpus {config.pipeline_stages}, or leave it out to use GPUs."
        )


def _check_layout(config):
    given = f"Received: tensor_parallel={config.tensor_parallel!r}"
    if not all("=" in item for item in config.tensor_parallel.split(",")):
        raise ValueError(
            "`tensor_parallel` must be patterns and kinds of splits, as in "
            f"dense/kernel=column. {given}. Write PATTERN=KIND,PATTERN=KIND."
        )
    for pattern, kind in config.layout.items():
        if kind not in SPLITS:
            raise ValueError(
                f"`tensor_parallel` must name one of {', '.join(SPLITS)} for each pattern. "
                f"{given}, where {kind!r} is not one of them. Use column for a layer's outputs, "
                "row for its inputs, vocabulary for the rows of a table."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"Each pattern of `tensor_parallel` must be a regular expression. {given}, where "
                f"{pattern!r} is not: {error}. Use for example dense/kernel=column."
            ) from error
    for name, value in (("pipeline_stages", config.pipeline_stages), ("shard", config.shard)):
        if value not in (None, "parameters"):
            raise ValueError(
                f"`tensor_parallel` cannot be combined with `{name}`: it already divides weights "
                f"and slots over the workers. {given}, {name}={value!r}. Leave --{name} out."
            )


def _check_estimate(config):
    name, value = _sharding_flag(config)
    if name != "shard":
        raise ValueError(
            "`estimate_memory` cannot estimate models in parts: it assumes that each worker runs "
            f"the whole model. Received: {name}={value!r}, "
            f"estimate_memory={config.estimate_memory}. Leave --{name} out of the estimate."
        )


def _check_local_steps(config):
    others = (
        (*_sharding_flag(config), "all weights and slots on every worker"),
        ("compression", config.compression, "no compression: no gradients are sent"),
    )
    for name, value, needs in others:
        if value is not None:
            raise ValueError(
                f"`synchronize_every` above 1 needs {needs}. Received: synchronize_every="
                f"{config.synchronize_every}, {name}={value!r}. Leave one of them out."
            )


def _sharding_flag(config):
    """Returns the flag that divides weights or slots over workers, and its value or None."""
    for name in ("pipeline_stages", "tensor_parallel"):
        if getattr(config, name) is not None:
            return name, getattr(config, name)
    return "shard", config.shard
