"""The table of the functions of Keras and TensorFlow that are replaced, and the tested versions.

A replacement acts where one of tfmulti's strategies is in use; elsewhere it calls the original
function. Its canary in `tests/test_keras_compat.py` fails when upstream no longer needs it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src import losses as keras_losses
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from keras.src.random import seed_generator
from keras.src.trainers import epoch_iterator
from keras.src.trainers import trainer as base_trainer
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import dataset_ops, flat_map_op, prefetch_op
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.distribute import parameter_server_strategy_v2 as servers_strategy
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.framework import ops, registry

from tfmulti.keras_compat import table_runs, table_steps

TABLE = (*table_steps.ENTRIES, *table_runs.ENTRIES)


def install(**functions: Callable) -> None:
    """Installs every entry of the table that is not installed yet.

    Args:
        **functions: The functions that replacements call, by the names in `Replacement.needs`. The
            function that makes a replacement documents their arguments.
    """
    for entry in TABLE:
        if entry.make is not None:
            entry.install(functions)


# The lowest and the highest tested versions. `setup.cfg`, the Makefile and the documentation name
# them too; a test compares.
TRIED = {"keras": ("3.12", "3.15"), "tensorflow": ("2.20", "2.21")}
# Private names that are read, called or overridden, but not replaced.
READ = (
    (keras_trainer, "reduce_per_replica", ("values", "strategy", "reduction")),
    (keras.Model, "_symbolic_build", ("data_batch",)),
    (keras.Model, "_flatten_layers", ()),
    (keras.optimizers.Optimizer, "_backend_update_step", ("grads", "trainable_variables")),
    (keras.optimizers.Optimizer, "_backend_apply_gradients", ("grads", "trainable_variables")),
    (keras.optimizers.Optimizer, "_clip_gradients", ("grads",)),
    (keras.optimizers.Optimizer, "_get_variable_index", ("variable",)),
    (keras.optimizers.Optimizer, "_track_variable", ("variable",)),
    (epoch_iterator.EpochIterator, "_enumerate_iterator", ()),
    (epoch_iterator.EpochIterator, "reset", ()),
    (keras_loss, "apply_mask", ("sample_weight", "mask", "dtype", "reduction")),
    (seed_generator, "global_seed_generator", ()),
    (seed_generator, "make_default_seed", ()),
    (global_state, "set_global_attribute", ("name", "value")),
    (keras_losses, "LossFunctionWrapper", ("fn", "name")),
    (keras_backend, "compute_output_spec", ("fn",)),
    (keras_backend, "get_keras_mask", ("x",)),
    (keras_backend, "set_keras_mask", ("x", "mask")),
    (cross_device_utils.CollectiveReplicaLauncher, "_next_instance_key", ()),
    (keras.Variable, "_maybe_autocast", ("value",)),
    (keras.Variable, "_direct_assign", ("value",)),
    (distributed_values, "MirroredVariable", None),
    (ops, "gradient_registry", None),
    (registry.Registry, "_registry", None),
    (pywrap_tfe, "TFE_Py_TapeSetShouldRecordBackprop", None),
    (mwms.CollectiveAllReduceExtended, "_initialize_local_devices", ("worker_device",)),
    (mwms.CollectiveAllReduceExtended, "_batch_reduce_to", ("reduce_op", "options")),
    (
        mwms.CollectiveAllReduceExtended,
        "_get_variable_creator_initial_value",
        ("replica_id", "device", "primary_var"),
    ),
    (
        servers_strategy.ParameterServerStrategyV2Extended,
        "_create_variable_round_robin",
        ("next_creator",),
    ),
    (servers_strategy.ParameterServerStrategyV2Extended, "_variable_count", None),
    (base_trainer.Trainer, "_initial_epoch", None),
    (dataset_ops.DatasetV2, "_functions", ()),
    (dataset_ops.DatasetV2, "_inputs", ()),
    (flat_map_op._FlatMapDataset, "_map_func", None),
    (prefetch_op._PrefetchDataset, "_input_dataset", None),
)
# Where each private name lives, and the arguments that it is used with.
NAMES = (*((each.owner, each.name, each.arguments) for each in TABLE if not each.adds), *READ)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Keras and TensorFlow."""
    return {"keras": keras.__version__, "tensorflow": tf.__version__}


def check_versions(versions: dict[str, str] | None = None, names=NAMES) -> None:
    """Raises an error if a private name is missing; warns of versions that were not tested.

    Args:
        versions: The versions to check, by package; by default the installed ones.
        names: The names that must exist: owner, name and arguments.

    Raises:
        RuntimeError: If Keras or TensorFlow has no such name, or without these arguments.
    """
    versions = versions or installed_versions()
    tried = ", ".join(f"{name} {low} to {high}" for name, (low, high) in TRIED.items())
    have = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for owner, name, arguments in names if not _fits(owner, name, arguments)]
    if missing:
        raise RuntimeError(
            "tfmulti needs private names of Keras and TensorFlow that are missing: "
            f"{', '.join(missing)}. Received: {have}. Install the tested versions: {tried}."
        )
    if not all(_was_tried(name, version) for name, version in versions.items()):
        warnings.warn(f"tfmulti was tried with {tried}. This is {have}.", stacklevel=3)


def _fits(owner, name, arguments) -> bool:
    value = getattr(owner, name, None)
    if value is None:
        # An attribute of objects, which their class sets in `__init__`.
        is_attribute = arguments is None and inspect.isclass(owner)
        return is_attribute and name in inspect.unwrap(owner.__init__).__code__.co_names
    if arguments is None:
        return True
    return set(arguments) <= set(inspect.signature(inspect.unwrap(value)).parameters)


def _was_tried(name, version) -> bool:
    number = tuple(int(part) for part in version.split(".")[:2])
    low, high = (tuple(int(part) for part in end.split(".")) for end in TRIED[name])
    return low <= number <= high
