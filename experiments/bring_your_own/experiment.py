"""Trains a user's own package, of which tfmulti knows nothing but two names."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tfmulti
from experiments import common

PACKAGE = "experiments.bring_your_own.my_project"
METRICS = ("loss", "val_loss")
COMPARISONS = (
    common.Comparison("A regression with its own loss and metric"),
    common.Comparison(
        "A subclassed model with two inputs and its own train_step",
        ("--project=two_inputs",),
        ("one device", "two logical CPUs"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment; the model brings its own optimizer."""

    unused: ClassVar = ("learning_rate",)

    project: str = common.flag("regression", "Which module.", ("regression", "two_inputs"))
    epochs: int = common.flag(5, "Passes over the data.")


def train(settings: Settings):
    """Trains as the command line does; returns what was measured, and no weights."""
    result = tfmulti.train_and_evaluate(
        tfmulti.TrainConfig(
            strategy=settings.strategy,
            logical_cpus=settings.logical_cpus,
            model=f"{PACKAGE}.{settings.project}:create",
            dataset=settings.dataset or f"{PACKAGE}.{settings.project}:load",
            global_batch_size=settings.global_batch_size,
            epochs=settings.epochs,
            dtype_policy=settings.dtype_policy,
            seed=settings.seed,
        )
    )
    metrics = {**result["metrics"], "examples_per_second": result["examples_per_second"]}
    return metrics, []


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
