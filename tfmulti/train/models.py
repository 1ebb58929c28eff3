"""Creates and compiles a model: one that the command line offers, or "package.module:function"."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmulti import devices
from tfmulti.data.datasets import resolve_function
from tfmulti.parallel.activations import checkpoint_activations
from tfmulti.parallel.pipeline import pipeline
from tfmulti.parallel.tensor import tensor_parallel
from tfmulti.settings import check_model
from tfmulti.step.optimizer import DistributedOptimizer, distribute_optimizers
from tfmulti.train.config import TrainConfig
from tfmulti.train.learning_rate import scale_learning_rate


def create_model(name: str, train) -> keras.Model:
    """Creates a model; call it in the strategy's scope.

    Args:
        name: `"cnn"` or `"mlp"`, both classifiers that give logits, or
            `"package.module:function"`, a function that returns a `keras.Model`. Its first
            parameter is given `train`, unless it has a default and another name.
        train: The training split that `load_dataset` returned.

    Returns:
        A `keras.Model`, compiled or not.

    Raises:
        ValueError: For a name that is unknown or does not give a model, or for data that the
            model cannot take.
    """
    check_model(name)
    function = find_function(name)
    if function is not None:
        model = function(train) if _takes_data(function) else function()
        if not isinstance(model, keras.Model):
            raise ValueError(
                "`model` must name a function that returns a keras.Model. "
                f"Received: {name!r}, which returned {type(model).__name__}. "
                "Return the model, compiled or not."
            )
        return model
    return MODELS[name](train)


def find_function(name: str) -> Callable | None:
    """Returns the function that a name of a model names; None for a built-in model.

    Raises:
        ValueError: For a function that is not there.
    """
    return resolve_function(name, argument="--model") if ":" in name else None


def create_cnn(train) -> keras.Model:
    """Creates a small convolutional classifier, without dropout or batch normalization.

    It is smooth everywhere. Rounding errors depend on the number of rows of a device; a maximum
    over equal pixels (a flat background) or a ReLU at 0 would amplify them into a different
    gradient.

    The inputs are images of shape `(batch, height, width, channels)`, the outputs logits of shape
    `(batch, classes)`.
    """
    shape, num_classes = _describe(train, rank=3, model="cnn")
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="tanh"),
            keras.layers.Conv2D(32, 3, padding="same", activation="tanh", strides=2),
            keras.layers.Conv2D(64, 3, padding="same", activation="tanh"),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(num_classes),
        ],
        name="cnn",
    )


def create_mlp(train) -> keras.Model:
    """Creates a classifier with two dense layers; gives logits of shape `(batch, classes)`."""
    shape, num_classes = _describe(train, rank=None, model="mlp")
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(128, activation="tanh"),
            keras.layers.Dense(num_classes),
        ],
        name="mlp",
    )


MODELS = {"cnn": create_cnn, "mlp": create_mlp}
_BY_NAME, _ALL_NAMED = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD


def _takes_data(function) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        # The signature of a function that is not written in Python is unknown.
        return True
    by_position = [each for each in parameters if each.kind not in (_BY_NAME, _ALL_NAMED)]
    # A first parameter with a default, as in `create(deep=False)`, is a setting.
    return any(each.default is each.empty or each.name == "train" for each in by_position[:1])


def _describe(train, rank, model) -> tuple[tuple[int, ...], int]:
    """Returns the shape of one example and the number of classes."""
    if isinstance(train, tf.data.Dataset):
        shape = tuple(tf.nest.flatten(train.element_spec)[0].shape)
        largest = train.map(lambda x, y, *_: tf.cast(y, tf.int64)).reduce(np.int64(0), tf.maximum)
        num_classes = int(tf.reduce_max(largest)) + 1
    else:
        x, y = train[0], np.asarray(train[1])
        shape = None if isinstance(x, dict) else tuple(np.shape(x)[1:])
        num_classes = int(y.max()) + 1 if y.dtype.kind in "iu" else 0
    if shape is None or num_classes < 2 or (rank is not None and len(shape) != rank):
        raise ValueError(
            f"`model={model}` needs examples of one array{' with rank 3' if rank else ''} and "
            f"integer labels. Received: example shape {shape}, {num_classes} classes. "
            "Write your own model: --model package.module:function."
        )
    return shape, num_classes


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
    if config.pipeline_stages:
        pipeline(
            model,
            config.pipeline_stages,
            config.micro_batches,
            checkpoint_activations=config.checkpoint_activations,
            devices=stage_devices(config),
        )
    elif config.checkpoint_activations:
        checkpoint_activations(model)
    if config.tensor_parallel:
        tensor_parallel(model, config.layout)
    if model.compiled:
        fields = TrainConfig.__dataclass_fields__
        given = [n for n in _OPTIMIZER_FLAGS if getattr(config, n) != fields[n].default]
        if given:
            raise ValueError(
                f"`{given[0]}` sets the optimizer of a model that is not compiled. Received: "
                f"{given[0]}={getattr(config, given[0])!r}, and --model {config.model} is "
                f"compiled. Leave --{given[0]} out, or return the model uncompiled."
            )
        if config.steps_per_execution > 1:
            # The function of a call is made when `fit` begins.
            model.steps_per_execution = config.steps_per_execution
        distribute_optimizers(model, config.compression, config.sharded, config.synchronize_every)
        return None
    model.compile(
        optimizer=DistributedOptimizer(
            _create_optimizer(config, train),
            compression=config.compression,
            shard=config.sharded,
            synchronize_every=config.synchronize_every,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=None if config.remainder == "pad" else ["accuracy"],
        weighted_metrics=["accuracy"] if config.remainder == "pad" else None,
        steps_per_execution=config.steps_per_execution,
        jit_compile=False,
    )
    return _base_rate(config)


def stage_devices(config: TrainConfig) -> list[str] | None:
    """Returns the device of each stage, where stages are on devices of this process; else None.

    Raises:
        RuntimeError: If there are fewer devices than stages.
    """
    if not config.has_stages_on_devices:
        return None
    on_cpus, number = bool(config.logical_cpus), config.pipeline_stages
    known = devices.list_cpus() if on_cpus else devices.list_gpus()
    if len(known) < number:
        kind = "logical CPUs" if on_cpus else "GPUs"
        fewer = f"{len(known)} stages, " if len(known) > 1 else ""
        raise RuntimeError(
            "`pipeline_stages` with one_device needs a device for each stage. Received: "
            f"pipeline_stages={number}, {len(known)} {kind}. Use {fewer}--logical_cpus "
            f"{number} to try it without GPUs, or workers: python -m tfmulti.launch "
            f"--num_workers {number} --mpi with --strategy multi_worker."
        )
    return known[:number]


def _base_rate(config) -> float:
    default = _LEARNING_RATES[config.optimizer or "adam"]
    return default if config.learning_rate is None else config.learning_rate


def scaled_rate(config: TrainConfig, plan, base_rate: float, *, with_warm_up: bool = True):
    """Returns the learning rate of a run: a float, or a Keras schedule with a warm-up.

    Args:
        config: The run.
        plan: The `ShardPlan` of the training data.
        base_rate: The rate for a batch of `config.base_batch_size`.
        with_warm_up: False for the rate that follows the warm-up.
    """
    return scale_learning_rate(
        base_rate,
        plan.global_batch_size * config.gradient_accumulation_steps,
        base_batch_size=config.base_batch_size,
        rule=config.learning_rate_scaling,
        warmup_epochs=config.warmup_epochs if with_warm_up else 0,
        steps_per_epoch=plan.steps_per_epoch,
    )


def _create_optimizer(config, train) -> keras.optimizers.Optimizer:
    name = config.optimizer or "adam"
    settings = {"learning_rate": scaled_rate(config, train.plan, _base_rate(config))}
    if config.gradient_accumulation_steps > 1:
        settings["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if name == "momentum":
        name, settings["momentum"] = "sgd", 0.9
    # `keras.optimizers.get` does not know Lamb.
    kinds = {name.lower(): kind for name, kind in vars(keras.optimizers).items()}
    optimizer = kinds[name](**settings)
    if config.dtype_policy == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
