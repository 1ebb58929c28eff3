"""Whether this Keras and this TensorFlow are ones that the cures were tried on."""

from __future__ import annotations

import inspect
import warnings

import keras
import tensorflow as tf
from keras.src import losses as keras_losses
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import epoch_iterator
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms
from tensorflow.python.distribute import cross_device_utils

TRIED = {"keras": ("3.12", "3.15"), "tensorflow": ("2.20", "2.21")}

# Where each private name lives, and the arguments that it is used with.
NAMES = (
    (keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build", ("iterator", "data_batch")),
    (keras_trainer.TensorFlowTrainer, "_make_function", ("step_function",)),
    (keras.Model, "_symbolic_build", ("data_batch",)),
    (keras.Model, "_flatten_layers", ()),
    (keras.Model, "_get_metrics_result_or_logs", ("logs",)),
    (epoch_iterator.EpochIterator, "_enumerate_iterator", ()),
    (seed_generator, "global_seed_generator", ()),
    (keras_nn, "_compute_moments_sync", ("x", "axes", "keepdims")),
    (keras_losses.loss, "reduce_weighted_values", ("sample_weight", "mask", "reduction", "dtype")),
    (keras_losses.loss, "scale_loss_for_distribution", ("value",)),
    (keras_losses.loss, "unscale_loss_for_distribution", ("value",)),
    (base_optimizer.BaseOptimizer, "_backend_update_step", ("grads", "trainable_variables")),
    (base_optimizer.BaseOptimizer, "_apply_weight_decay", ("variables",)),
    (base_optimizer.BaseOptimizer, "_backend_increment_gradient_accumulators", ("grads",)),
    (
        base_optimizer.BaseOptimizer,
        "_overwrite_model_variables_with_average_value",
        ("trainable_variables",),
    ),
    (epoch_iterator.EpochIterator, "reset", ()),
    (keras.random.SeedGenerator, "next", ()),
    (keras.Variable, "_initialize", ("value",)),
    (keras.callbacks.CallbackList, "set_model", ("model",)),
    (keras.callbacks.CallbackList, "on_epoch_end", ("epoch", "logs")),
    (mwms.CollectiveAllReduceExtended, "_initialize_local_devices", ("worker_device",)),
    (mwms.CollectiveAllReduceExtended, "_batch_reduce_to", ("reduce_op", "options")),
    (multi_device_iterator_ops, "_create_device_dataset", ("prefetch_buffer_size",)),
    (cross_device_utils.CollectiveReplicaLauncher, "_all_gather", ("input_tensor", "options")),
    (cross_device_utils.CollectiveReplicaLauncher, "_next_instance_key", ()),
    (cross_device_utils.CollectiveReplicaLauncher, "_prefer_unique_instance_key", None),
)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Keras and TensorFlow."""
    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def check_versions(versions: dict[str, str] | None = None, names=NAMES) -> None:
    """Raises where a private name is gone; warns once of versions that were not tried.

    Args:
        versions: The versions to look at, by package; by default those that are installed.
        names: What must be there: owner, name and arguments.

    Raises:
        RuntimeError: For a Keras or TensorFlow that the cures do not fit.
    """
    versions = versions or installed_versions()
    tried = ", ".join(f"{name} {low} to {high}" for name, (low, high) in TRIED.items())
    have = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for owner, name, arguments in names if not _fits(owner, name, arguments)]
    if missing:
        raise RuntimeError(
            "tfmulti needs names inside Keras and TensorFlow that are not here: "
            f"{', '.join(missing)}. Received: {have}. Install what was tried: {tried}."
        )
    strange = [name for name, version in versions.items() if not _was_tried(name, version)]
    if strange:
        warnings.warn(f"tfmulti was tried with {tried}. This is {have}.", stacklevel=3)


def _fits(owner, name, arguments) -> bool:
    found = getattr(owner, name, None)
    if found is None:
        return False
    if arguments is None:
        return True
    return set(arguments) <= set(inspect.signature(inspect.unwrap(found)).parameters)


def _was_tried(name, version) -> bool:
    number = tuple(int(part) for part in version.split(".")[:2])
    low, high = (tuple(int(part) for part in end.split(".")) for end in TRIED[name])
    return low <= number <= high
