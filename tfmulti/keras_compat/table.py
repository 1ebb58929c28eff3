"""The table of the functions of Keras and TensorFlow that are replaced, and the tested versions.

A replacement acts where one of tfmulti's strategies is in use; elsewhere it calls the original
function. Its canary in `tests/test_keras_compat.py` fails when upstream no longer needs it, unless
it serves this package alone.
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
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import optimizer as keras_optimizer
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from keras.src.models import functional
from keras.src.ops import function as keras_function
from keras.src.ops import node
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils, epoch_iterator
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    generator_data_adapter,
    py_dataset_adapter,
    tf_dataset_adapter,
)
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import (
    dataset_ops,
    flat_map_op,
    from_tensor_slices_op,
    map_op,
    prefetch_op,
    random_op,
    shuffle_op,
    structured_function,
    zip_op,
)
from tensorflow.python.distribute import collective_all_reduce_strategy as mwms
from tensorflow.python.distribute import (
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    input_lib,
    mirrored_strategy,
)
from tensorflow.python.distribute import parameter_server_strategy_v2 as servers_strategy
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import (
    function_type_utils,
    polymorphic_function,
)
from tensorflow.python.framework import ops, registry
from tensorflow.python.ops import resource_variable_ops

from tfmulti.keras_compat import table_inside_steps, table_outside_steps

TABLE = (*table_inside_steps.ENTRIES, *table_outside_steps.ENTRIES)


def install_for_repeated_calls(recompute: Callable) -> None:
    """Installs what layers that run again for gradients need, also without a strategy.

    Args:
        recompute: See `around_remat`.
    """
    for entry in (*table_inside_steps.OF_CUSTOM_GRADIENTS, *table_outside_steps.REMAT):
        entry.install({"recompute": recompute})


def install(**functions: Callable) -> None:
    """Installs every entry of the table that is not installed yet.

    Args:
        **functions: The functions that replacements call, by the names in `Replacement.needs`. The
            function that makes a replacement documents their arguments.
    """
    for entry in TABLE:
        # The others are replaced by the context managers that `within` names.
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
    (functional.Functional, "_standardize_inputs", ("inputs",)),
    (keras.optimizers.Optimizer, "_clip_gradients", ("grads",)),
    (keras.optimizers.Optimizer, "_get_variable_index", ("variable",)),
    (keras.optimizers.Optimizer, "_track_variable", ("variable",)),
    (keras.optimizers.Optimizer, "_var_key", ("variable",)),
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
    (distributed_values, "MirroredVariable", None),
    (ops, "gradient_registry", None),
    (ops, "get_gradient_function", ("op",)),
    (registry.Registry, "_registry", None),
    (pywrap_tfe, "TFE_Py_TapeSetShouldRecordBackprop", None),
    (pywrap_tfe, "TFE_Py_TapeSetIsEmpty", None),
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
    (dataset_ops.DatasetV2, "_functions", ()),
    (dataset_ops.DatasetV2, "_inputs", ()),
    (dataset_ops.DatasetV2, "_as_serialized_graph", ()),
    (py_dataset_adapter.PyDatasetAdapter, "_standardize_batch", ("batch",)),
    (keras_optimizer.TFOptimizer, "_backend_reset_gradient_accumulators", ()),
    (keras.optimizers.LossScaleOptimizer, "_common_apply", ("grads",)),
    (ops.Graph, "_get_function", ("name",)),
    (
        function_type_utils,
        "canonicalize_function_inputs",
        ("args", "kwargs", "function_type", "default_values", "is_pure"),
    ),
    (ops.SymbolicTensor, "_id", None),
    (distribute_lib.StrategyExtendedV2, "_num_replicas_in_sync", None),
    (distributed_values.PerReplicaSpec, "_component_specs", None),
    (cross_device_utils.CollectiveReplicaLauncher, "_all_gather", ("input_tensor", "options")),
)
# The same for attributes of objects that methods of these classes set, or these functions.
ATTRIBUTES = {
    keras_variables.Variable: (
        *("_aggregation", "_constraint", "_dtype", "_shape", "_synchronization", "_value"),
    ),
    keras.Layer: ("_seed_generators", "_trainable_variables", "_non_trainable_variables"),
    keras.layers.BatchNormalization: ("_reduction_axes",),
    keras.Sequential: ("_functional",),
    keras_function.Function: ("_nodes_by_depth",),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.ModelCheckpoint: ("_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    node.Node: ("_keras_history",),
    keras.activations.softmax: ("_keras_logits",),
    tf.random.get_global_generator: ("global_generator",),
    keras.layers.Embedding: ("_embeddings",),
    keras_losses.LossFunctionWrapper: ("_fn_kwargs",),
    keras.metrics.MeanMetricWrapper: ("_fn", "_fn_kwargs"),
    keras.metrics.FBetaScore: ("_built",),
    base_optimizer.BaseOptimizer: (
        *("_accumulated_gradients", "_iterations", "_learning_rate", "_trainable_variables"),
        *("_model_variables_moving_average", "_exclude_from_weight_decay"),
    ),
    keras_optimizer.TFOptimizer: ("_distribution_strategy",),
    base_trainer.Trainer: (
        *("_initial_epoch", "_compile_config", "_compile_loss", "_compile_metrics"),
    ),
    compile_utils.CompileLoss: ("_flat_losses", "_user_loss"),
    compile_utils.CompileMetrics: ("_user_metrics", "_user_weighted_metrics"),
    epoch_iterator.EpochIterator: ("_current_iterator", "_num_batches", "_steps_seen"),
    keras_trainer.TFEpochIterator: ("_distribute_strategy", "_distributed_dataset"),
    generator_data_adapter.GeneratorDataAdapter: ("_first_batches",),
    array_data_adapter.ArrayDataAdapter: ("_inputs",),
    tf_dataset_adapter.TFDatasetAdapter: ("_dataset",),
    servers_strategy.ParameterServerStrategyV2Extended: ("_variable_count",),
    input_lib.DistributedDataset: ("_strategy",),
    mirrored_strategy.MirroredExtended: ("_devices",),
    tf.distribute.MirroredStrategy: ("_collective_key_base",),
    mwms.CollectiveAllReduceExtended: ("_collective_keys", "_cross_device_ops"),
    cross_device_ops.CollectiveAllReduce: ("_launchers",),
    cross_device_utils.CollectiveKeys: ("_instance_key_table",),
    cross_device_utils.CollectiveReplicaLauncher: ("_device", "_group_key", "_group_size"),
    distribute_lib.ReplicaContextBase: ("_replica_id_in_sync_group",),
    distributed_values.PerReplicaSpec: ("_value_specs",),
    distributed_values.DistributedVariable: (
        *("_aggregation", "_distribute_strategy", "_distributed_container"),
    ),
    resource_variable_ops.BaseResourceVariable: ("_unique_id",),
    resource_variable_ops.get_eager_safe_handle_data: ("_handle_data",),
    polymorphic_function.Function: (
        *("_autograph", "_default_values", "_function_type", "_is_pure", "_jit_compile"),
        "_python_function",
    ),
    context.Context: ("_thread_local_data", "_rng"),
    dataset_ops.DatasetV2: ("_variant_tensor",),
    flat_map_op._FlatMapDataset: ("_map_func",),
    map_op._ParallelMapDataset: ("_deterministic",),
    from_tensor_slices_op._TensorSliceDataset: ("_tensors",),
    random_op._RandomDataset: ("_seed", "_seed2", "_rerandomize"),
    shuffle_op._ShuffleDataset: ("_seed", "_seed2", "_reshuffle_each_iteration"),
    structured_function.StructuredFunctionWrapper: ("_func",),
    prefetch_op._PrefetchDataset: ("_input_dataset",),
    zip_op._ZipDataset: ("_datasets",),
}
# Where each private name lives, and the arguments that it is used with.
NAMES = (
    *((each.owner, each.name, each.arguments) for each in TABLE if not each.adds),
    *READ,
    *((owner, name, None) for owner, names in ATTRIBUTES.items() for name in names),
)


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
        warnings.warn(f"tfmulti is tested with {tried}. Installed: {have}.", stacklevel=3)


def _fits(owner, name, arguments) -> bool:
    value = getattr(owner, name, None)
    # An attribute of instances is known only to the code that sets it.
    if value is None:
        return arguments is None and name in _attributes_set_by(owner)
    if arguments is None:
        return True
    # Those of the original, where one of our functions is in its place already.
    return set(arguments) <= set(inspect.signature(inspect.unwrap(value)).parameters)


def _attributes_set_by(owner) -> set[str]:
    """Returns the names of attributes that a function or a class's methods set, and others."""
    functions = vars(owner).values() if inspect.isclass(owner) else [owner]
    plain = [inspect.unwrap(each) for each in functions if inspect.isfunction(each)]
    return {name for each in plain for name in each.__code__.co_names}


def _was_tried(name, version) -> bool:
    number = tuple(int(part) for part in version.split(".")[:2])
    low, high = (tuple(int(part) for part in end.split(".")) for end in TRIED[name])
    return low <= number <= high
