"""Compiles a model for training, or uses the way its author compiled it."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti.parallel.activations import checkpoint_activations
from tfmulti.step.optimizer import DistributedOptimizer, distribute_optimizers
from tfmulti.train.config import TrainConfig
from tfmulti.train.learning_rate import scale_learning_rate

_LEARNING_RATES = {
    "adam": 1e-3,
    "adamw": 1e-3,
    "lamb": 1e-3,
    "lion": 1e-4,
    "momentum": 0.05,
    "rmsprop": 1e-3,
    "sgd": 0.1,
}
_OPTIMIZER_FLAGS = (
    "optimizer",
    "learning_rate",
    "learning_rate_scaling",
    "warmup_epochs",
    "gradient_accumulation_steps",
)


def prepare_keras(config: TrainConfig) -> None:
    """Sets seeds and policies, before data are loaded and the model is created."""
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(config.dtype_policy)


def compile_model(model: keras.Model, config: TrainConfig, train) -> float | None:
    """Compiles an uncompiled model; distributes the optimizers of a compiled one.

    Call it in the strategy's scope.

    Args:
        model: The model.
        config: The run.
        train: The training data, as `distribute_train` returned them.

    Returns:
        The learning rate before scaling; None if the model was compiled already.

    Raises:
        ValueError: For optimizer settings of a model that is compiled already.
    """
    if config.checkpoint_activations:
        checkpoint_activations(model)
    if model.compiled:
        given = [name for name in _OPTIMIZER_FLAGS if getattr(config, name) != _default(name)]
        if given:
            raise ValueError(
                f"`{given[0]}` sets the optimizer of a model that is not compiled. Received: "
                f"{given[0]}={getattr(config, given[0])!r}, and --model {config.model} is "
                f"compiled. Leave --{given[0]} out, or return the model uncompiled."
            )
        distribute_optimizers(model, config.compression)
        return None
    model.compile(
        optimizer=DistributedOptimizer(
            _create_optimizer(config, train), compression=config.compression
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None if config.remainder == "pad" else ["accuracy"],
        weighted_metrics=["accuracy"] if config.remainder == "pad" else None,
        steps_per_execution=config.steps_per_execution,
        jit_compile=False,
    )
    return _base_rate(config)


def _default(name):
    return TrainConfig.__dataclass_fields__[name].default


def _base_rate(config) -> float:
    default = _LEARNING_RATES[config.optimizer or "adam"]
    return default if config.learning_rate is None else config.learning_rate


def _create_optimizer(config, train) -> keras.optimizers.Optimizer:
    name = config.optimizer or "adam"
    rate = scale_learning_rate(
        _base_rate(config),
        train.plan.global_batch_size * config.gradient_accumulation_steps,
        base_batch_size=config.base_batch_size,
        rule=config.learning_rate_scaling,
        warmup_epochs=config.warmup_epochs,
        steps_per_epoch=train.plan.steps_per_epoch,
    )
    settings = {"learning_rate": rate}
    if config.gradient_accumulation_steps > 1:
        settings["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if name == "momentum":
        name, settings["momentum"] = "sgd", 0.9
    optimizer = keras.optimizers.get({"class_name": name, "config": settings})
    if config.dtype_policy == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
