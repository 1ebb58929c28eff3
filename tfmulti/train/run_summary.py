"""The effective numbers of a run: batch sizes, learning rate and steps, in one block."""

from __future__ import annotations

import dataclasses

from tfmulti.runtime.console import count
from tfmulti.train.config import TrainConfig
from tfmulti.train.learning_rate import scale_learning_rate


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """What a run comes to, once devices, data and flags are known.

    Attributes:
        num_workers: Workers of the job.
        num_replicas: Replicas over all workers.
        global_batch_size: Examples of a step over all replicas; tf.distribute's `batch_size`.
        per_worker_batch_size: Examples of a step of one worker, the largest share; the
            `batch_size` of PyTorch, Horovod and Lightning with one process a worker.
        per_replica_batch_size: Examples of a step of one replica, the largest share.
        gradient_accumulation_steps: Steps whose gradients make one update.
        base_batch_size: Batch size for which the base rate was tuned.
        base_learning_rate: The rate before scaling; None where the model has its own schedule.
        learning_rate: The rate after scaling and warm-up; None likewise.
        learning_rate_scaling: The rule that scaled it.
        optimizer: The optimizer's name.
        warmup_epochs: Epochs of gradual warm-up.
        num_examples: Examples of the training split.
        steps_per_epoch: Steps of an epoch.
        epochs: Epochs.
    """

    num_workers: int
    num_replicas: int
    global_batch_size: int
    per_worker_batch_size: int
    per_replica_batch_size: int
    gradient_accumulation_steps: int
    base_batch_size: int
    base_learning_rate: float | None
    learning_rate: float | None
    learning_rate_scaling: str
    optimizer: str
    warmup_epochs: float
    num_examples: int
    steps_per_epoch: int
    epochs: int

    def rows(self) -> dict[str, str]:
        """Returns the block to show: name -> text, both conventions of batch sizes named."""
        most = "at most " if self.global_batch_size % self.num_replicas else ""
        replicas = count(self.num_replicas // self.num_workers, "replica")
        workers = count(self.num_workers, "worker")
        all_steps = self.steps_per_epoch * self.epochs
        return {
            "batch per replica": f"{most}{self.per_replica_batch_size:,}"
            " (batch_size in PyTorch, Horovod, Lightning)",
            "batch per worker": f"{most}{self.per_worker_batch_size:,}, {replicas}",
            "global batch": f"{self.global_batch_size:,}, {workers}"
            " (batch_size in Keras and tf.distribute)",
            **self._update_row(),
            "learning rate": self._show_rate(),
            "warm-up": count(self.warmup_epochs, "epoch") if self.warmup_epochs else "none",
            "steps": f"{all_steps:,}: {count(self.epochs, 'epoch')} of {self.steps_per_epoch:,}, "
            f"{self.num_examples:,} examples",
        }

    def _update_row(self):
        number = self.gradient_accumulation_steps
        if number == 1:
            return {}
        return {"batch per update": f"{self.global_batch_size * number:,} ({number} steps)"}

    def _show_rate(self) -> str:
        if self.learning_rate is None:
            return f"{self.optimizer}, by the model's own schedule"
        if self.base_learning_rate is None:
            return f"{self.learning_rate:.4g} ({self.optimizer}), as the model was compiled"
        if self.learning_rate_scaling == "none":
            return f"{self.learning_rate:.4g} ({self.optimizer}), not scaled"
        return (
            f"{self.learning_rate:.4g} ({self.optimizer}): {self.base_learning_rate:.4g} for a "
            f"base batch of {self.base_batch_size:,}, {self.learning_rate_scaling} rule"
        )


def summarize_run(
    config: TrainConfig, plan, num_workers: int, model, base_learning_rate: float | None
) -> RunSummary:
    """Returns the numbers of a run.

    Args:
        config: The run.
        plan: The `ShardPlan` of the training data.
        num_workers: Workers of the job.
        model: The compiled model.
        base_learning_rate: The rate before scaling; None where the model's author compiled it.
    """
    share = -(-plan.global_batch_size // plan.num_replicas)
    local = plan.num_replicas // num_workers
    return RunSummary(
        num_workers=num_workers,
        num_replicas=plan.num_replicas,
        global_batch_size=plan.global_batch_size,
        per_worker_batch_size=min(share * local, plan.global_batch_size),
        per_replica_batch_size=share,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        base_batch_size=config.base_batch_size,
        base_learning_rate=base_learning_rate,
        learning_rate=_final_rate(config, plan, model, base_learning_rate),
        learning_rate_scaling=config.learning_rate_scaling,
        optimizer="none" if model.optimizer is None else _inner(model.optimizer).name,
        warmup_epochs=config.warmup_epochs,
        num_examples=plan.num_examples,
        steps_per_epoch=plan.steps_per_epoch,
        epochs=config.epochs,
    )


def _final_rate(config, plan, model, base) -> float | None:
    if base is not None:
        return scale_learning_rate(
            base,
            plan.global_batch_size * config.gradient_accumulation_steps,
            base_batch_size=config.base_batch_size,
            rule=config.learning_rate_scaling,
        )
    if model.optimizer is None:
        return None
    rate = _inner(model.optimizer).get_config().get("learning_rate")
    return rate if isinstance(rate, float) else None


def _inner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)
