"""Trains a model on a dataset under a strategy, and writes what came of it."""

from __future__ import annotations

import platform
import time

import keras
import numpy as np
import tensorflow as tf

from tfmulti import callbacks
from tfmulti.config import TrainConfig
from tfmulti.data import distribute_eval, distribute_train
from tfmulti.datasets import load_dataset
from tfmulti.learning_rate import scale_learning_rate
from tfmulti.models import create_model
from tfmulti.optimizers import DistributedOptimizer, distribute_optimizers
from tfmulti.strategies import create_strategy
from tfmulti.trainer.worker import Worker, digest_weights

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


def train_and_evaluate(config: TrainConfig, tell=print) -> dict:
    """Trains and validates a model, on this worker or this process's devices.

    Every worker of a cluster calls it with the same configuration. With `workdir` the chief
    writes `model.keras`, `history.csv`, `result.json` and `logs/`.

    Args:
        config: The run.
        tell: Function that takes one line of text for the user.

    Returns:
        The contents of `result.json`.

    Raises:
        ValueError: For a model, data or settings that do not go together.
        RuntimeError: Where the devices or the cluster are not there.
    """
    strategy = create_strategy(
        config.strategy,
        logical_cpus=config.logical_cpus,
        tf_config=config.tf_config,
        communication=config.communication,
    )
    keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.config.set_dtype_policy(config.dtype_policy)
    train_split, test_split = load_dataset(config.dataset)
    global_batch_size = config.resolve_global_batch_size(strategy.num_replicas_in_sync)
    train = distribute_train(
        train_split,
        strategy,
        global_batch_size,
        seed=config.seed,
        remainder=config.remainder,
        steps_per_epoch=config.steps_per_epoch,
        audit=config.audit_shards,
    )
    test = distribute_eval(test_split, strategy, global_batch_size)
    with strategy.scope():
        model = create_model(config.model, train_split)
        _compile(model, config, train)
    worker = Worker(strategy, config.workdir, tell)
    worker.introduce(global_batch_size)
    throughput = callbacks.Throughput(train)
    began = time.perf_counter()
    history = model.fit(
        train,
        validation_data=test,
        epochs=config.epochs,
        shuffle=False,
        verbose=worker.verbose,
        callbacks=[throughput, *worker.create_callbacks(train)],
    )
    seconds = time.perf_counter() - began
    result = _describe(config, worker, train, throughput, history, seconds)
    result["weights_sha256"] = digest_weights(model)
    worker.finish(model, result)
    return result


def _compile(model, config, train):
    """Compiles a model that its author has not compiled; else distributes its optimizers."""
    if model.compiled:
        given = [name for name in _OPTIMIZER_FLAGS if getattr(config, name) != _default(name)]
        if given:
            raise ValueError(
                f"`{given[0]}` sets the optimizer of a model that is not compiled. Received: "
                f"{given[0]}={getattr(config, given[0])!r}, and --model {config.model} is "
                f"compiled. Leave --{given[0]} out, or return the model uncompiled."
            )
        distribute_optimizers(model)
        return
    model.compile(
        optimizer=DistributedOptimizer(_create_optimizer(config, train)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None if config.remainder == "pad" else ["accuracy"],
        weighted_metrics=["accuracy"] if config.remainder == "pad" else None,
        steps_per_execution=config.steps_per_execution,
        jit_compile=False,
    )


def _default(name):
    return TrainConfig.__dataclass_fields__[name].default


def _create_optimizer(config, train) -> keras.optimizers.Optimizer:
    name = config.optimizer or "adam"
    base = _LEARNING_RATES[name] if config.learning_rate is None else config.learning_rate
    rate = scale_learning_rate(
        base,
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


def _describe(config, worker, train, throughput, history, seconds) -> dict:
    metrics = {name: float(np.ravel(values[-1])[0]) for name, values in history.history.items()}
    rate = metrics.pop("examples_per_second", None)
    return {
        "strategy": type(worker.strategy).__name__,
        "num_workers": worker.num_workers,
        "num_replicas": worker.strategy.num_replicas_in_sync,
        "global_batch_size": train.plan.global_batch_size,
        "steps": throughput.steps,
        "epochs": len(history.epoch),
        "examples": throughput.examples,
        "seconds": round(seconds, 3),
        "examples_per_second": rate,
        "metrics": metrics,
        "restarts": 0,
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
    }
