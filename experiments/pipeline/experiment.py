"""A model that fits no single worker trains on two, each of which has one half of its layers.

`--memory_mb` limits what the process may take beyond what it has once TensorFlow is there, as a
cgroup or a small machine does. One worker ends with an error; a pipeline of two trains.
"""

from __future__ import annotations

import dataclasses

import keras

import tfmulti
from experiments import common


@dataclasses.dataclass(frozen=True)
class Settings(common.DenseSettings):
    """The flags of this experiment."""

    micro_batches: int = common.flag(4, "In how many parts the rows of a step pass through.")
    checkpoint_activations: bool = common.flag(
        False, "Keep the inputs of stages alone, and run them again for gradients."
    )


def create_model(settings: Settings, strategy) -> keras.Model:
    """Dense layers of the same width; each worker creates those of its stage."""
    with strategy.scope(), tfmulti.sharded_parameters():
        model = tfmulti.pipeline(
            common.create_dense(settings),
            micro_batches=settings.micro_batches,
            checkpoint_activations=settings.checkpoint_activations,
        )
        optimizer = keras.optimizers.Adam(settings.learning_rate)
        model.compile(tfmulti.DistributedOptimizer(optimizer, shard="parameters"), "mse")
    return model


def main() -> None:
    """Runs the command line; the process ends with 1 where memory does not suffice."""
    settings = common.parse(Settings)
    advice = "Use more workers, each of which has a stage, or a smaller model."
    metrics = common.train_within_memory(settings, create_model, advice)
    print(", ".join(f"{name}: {value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
