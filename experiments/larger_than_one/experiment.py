"""A model whose training does not fit into one worker's memory trains on two.

`--memory_mb` limits what the process may take beyond what it has once TensorFlow is there, as a
cgroup or a small machine does. One worker ends with an error; two that shard parameters train.
"""

from __future__ import annotations

import contextlib
import dataclasses

import keras

import tfmulti
from experiments import common


@dataclasses.dataclass(frozen=True)
class Settings(common.DenseSettings):
    """The flags of this experiment."""

    shard: str = common.flag("parameters", "What to shard.", ("none", "state", "parameters"))


def create_model(settings: Settings, strategy) -> keras.Model:
    """Dense layers of the same width; each worker creates what it will hold."""
    sharded = settings.shard == "parameters"
    context = tfmulti.sharded_parameters() if sharded else contextlib.nullcontext()
    with strategy.scope(), context:
        model = common.create_dense(settings)
        shard = None if settings.shard == "none" else settings.shard
        optimizer = keras.optimizers.Adam(settings.learning_rate)
        model.compile(tfmulti.DistributedOptimizer(optimizer, shard=shard), "mse")
    return model


def main() -> None:
    """Runs the command line; the process ends with 1 where memory does not suffice."""
    settings = common.parse(Settings)
    advice = "Use more workers with --shard=parameters, or a smaller model."
    metrics = common.train_within_memory(settings, create_model, advice)
    if common.is_chief():
        print(", ".join(f"{name}: {value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
