"""Entries for what acts outside of steps: calls of `fit`, callbacks, data, remat and servers."""

from __future__ import annotations

import keras
from keras.src.backend.tensorflow import core as keras_core
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.trainers import epoch_iterator
from keras.src.trainers.data_adapters import array_data_adapter
from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python import pywrap_tfe
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import cross_device_utils, input_lib, values
from tensorflow.python.distribute import mirrored_strategy as mirrored
from tensorflow.python.eager import execute
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops import summary_ops_v2

from tfmulti.keras_compat import (
    collectives,
    held,
    recording,
    replaced_calls,
    replaced_data,
    replaced_models,
    replacement,
)
from tfmulti.keras_compat.replaced_models import without_tuning
from tfmulti.keras_compat.replacement import Replacement, model_entry, temporary_entry
from tfmulti.keras_compat.table_inside_steps import SHAPES

_UNLIKE = "waiting for ever, or mixed results, if workers call different methods"


_NUMBERS = tuple(
    Replacement(
        values.DistributedVariable,
        name,
        replaced_calls.number_of(kind),
        replacement.of_value,
        f"TypeError: {kind.__name__}() argument must be ..., not 'MirroredVariable'",
        "test_canary_a_variable_of_replicas_is_no_number",
        adds=True,
    )
    for name, kind in (("__int__", int), ("__float__", float))
)

_ASSIGNMENTS = tuple(
    Replacement(
        values.DistributedVariable,
        name,
        replaced_calls.counting_assignments,
        replacement.of_value,
        "a step that differs while a callback has changed a setting, between two spot checks",
        "test_assignments_are_counted",
        arguments=("value",),
    )
    for name in ("assign", "assign_add", "assign_sub")
)

_CALLS = (
    *(
        Replacement(
            keras.Model,
            name,
            replaced_calls.before_calls(name),
            # Not only models of our strategies: one created outside of the scope is to be found.
            replacement.while_a_strategy_exists,
            f"{_UNLIKE}; a model created outside the scope that silently trains on one device",
            "test_calls_are_looked_at",
            ("before_call", "during_call"),
            ("x",),
        )
        for name in ("fit", "evaluate", "predict")
    ),
    *(
        Replacement(
            keras.Model,
            name,
            replaced_calls.before_calls(name),
            replacement.of_model_or_servers,
            "a step on a batch that is not verified",
            "test_calls_are_looked_at",
            ("before_batch",),
            ("x",),
        )
        for name in ("train_on_batch", "test_on_batch")
    ),
    *(
        Replacement(
            owner,
            name,
            replaced_calls.before_saving(with_optimizer),
            replacement.of_model,
            "a file with one worker's own weights, between two averages of local steps, or with "
            "one replica's sum of gradients, between two updates",
            "test_no_model_is_saved_between_averages",
            ("before_saving",),
            (argument,),
        )
        # `model.save`, `keras.saving.save_model` and their like call these, `OrbaxCheckpoint` the
        # last one. A file of weights has the optimizer's state, too.
        for owner, name, with_optimizer, argument in (
            (saving_lib, "save_model", True, "filepath"),
            (saving_lib, "save_weights_only", True, "filepath"),
            (legacy_h5_format, "save_model_to_hdf5", True, "filepath"),
            (keras.Model, "export", False, "filepath"),
            (keras.Model, "get_state_tree", True, "value_format"),
        )
    ),
    Replacement(
        keras.callbacks.CallbackList,
        "set_model",
        replaced_calls.prepare_callbacks,
        replacement.of_given_model,
        '"BadZipFile", "unable to lock file" and doubled lines, because every worker writes the '
        "same file",
        "test_canary_stock_callbacks_know_no_chief",
        ("prepare_callback", "more_callbacks"),
        ("model",),
    ),
    Replacement(
        keras.callbacks.CallbackList,
        "on_epoch_end",
        replaced_calls.end_epochs,
        replacement.of_callbacks,
        '"Collective ... expected type" if only one worker stops after an epoch; callbacks that '
        "read one replica's sum of gradients",
        "test_canary_callbacks_see_one_replicas_sum_of_gradients",
        ("settle", "agree"),
        ("epoch", "logs"),
    ),
    model_entry(
        "_get_metrics_result_or_logs",
        replaced_models.around,
        "an epoch without logs if training resumes after its last step; workers that wait for one "
        "that has left the epoch alone",
        "test_canary_an_epoch_without_steps_has_no_logs",
        needs=("result_or_logs",),
        arguments=("logs",),
    ),
)

_AVERAGES = tuple(
    Replacement(
        keras.callbacks.SwapEMAWeights,
        name,
        make,
        replacement.of_sharded_optimizer,
        repairs,
        "test_canary_a_callback_asks_the_strategy_for_averages",
        ("keep_swapped",),
        ("optimizer",),
    )
    for name, make, repairs in (
        (
            "_tf_swap_variables",
            held.swap_held_averages,
            "weights and averages that only their owners have, which a callback cannot read",
        ),
        (
            "_tf_finalize_ema_values",
            held.end_with_held_averages,
            "AssertionError: with sharded state, averages are no variables of the strategy",
        ),
    )
)

_DATA = (
    Replacement(
        epoch_iterator.EpochIterator,
        "_enumerate_iterator",
        replaced_data.only_iterators_in_use,
        replacement.of_epochs,
        "a second iterator over the data in each epoch, which nobody uses",
        "test_canary_every_epoch_creates_an_iterator_that_is_not_used",
    ),
    Replacement(
        array_data_adapter.ArrayDataAdapter,
        "get_tf_dataset",
        replaced_data.shuffled_alike,
        replacement.shuffling,
        "rows that come twice or never in an epoch: without a seed each worker shuffles arrays in "
        "an order of its own",
        "test_canary_each_worker_shuffles_arrays_by_itself",
    ),
    *(
        Replacement(
            owner,
            "__iter__",
            lambda original: lambda self: replacement.note_distributing(original, self),
            replacement.of_dataset,
            "the same as `_create_device_dataset`, which does not know the strategy",
            "test_canary_datasets_of_devices_are_tuned",
        )
        for owner in (input_lib.DistributedDataset, input_lib.DistributedDatasetsFromFunction)
    ),
    Replacement(
        multi_device_iterator_ops,
        "_create_device_dataset",
        lambda create: lambda *args, **kwargs: without_tuning(create(*args, **kwargs)),
        replacement.distributing,
        "`fit` and `evaluate` that return seconds after their last step: destroying such a dataset "
        "waits until its tuning thread wakes up",
        "test_canary_datasets_of_devices_are_tuned",
        arguments=("prefetch_buffer_size",),
    ),
    *(
        Replacement(
            cross_device_utils.CollectiveReplicaLauncher,
            name,
            make,
            replacement.of_launcher,
            repairs,
            canary,
            arguments=arguments,
        )
        for name, make, repairs, canary, arguments in (
            (
                "_use_unique_instance_key",
                # Keys are assigned while functions are traced: nested functions have keys too.
                lambda original: lambda self: False,
                f"{SHAPES}: keys that are new in each call do not reach Keras's nested functions",
                "test_canary_new_keys_do_not_reach_nested_functions",
                (),
            ),
            (
                "_all_gather",
                collectives.gather_by_shape,
                f"{SHAPES} if sparse gradients have different numbers of rows in different steps; "
                "and no gather of bfloat16",
                "test_canary_a_key_stands_for_one_shape",
                ("input_tensor", "options"),
            ),
            (
                "all_reduce",
                collectives.reduce_by_size,
                f"{SHAPES} if sums have different numbers of rows in different steps; and "
                "`Collective all-reduce does not support datatype DT_INT32 on DEVICE_GPU`, or "
                "DT_BFLOAT16",
                "test_canary_a_key_stands_for_one_shape",
                ("input_tensor", "control_input", "options"),
            ),
        )
    ),
)

_CREATED_OPS = "training that reuses traces and outputs of verification"
_REDUCES = "no way to compute one device's result on each replica, to verify a step"
REMAT = (
    Replacement(
        keras_core,
        "remat",
        recording.around_remat,
        # A layer may wrap its call before the scope is entered; the call itself looks for it.
        recording.while_a_strategy_exists_or_recording,
        "other random numbers of dropout in the second run, and statistics that are updated twice",
        "test_canary_keras_computes_activations_from_another_state",
        ("recompute",),
        ("f",),
    ),
)

_SERVERS = (
    Replacement(
        keras.layers.Embedding,
        "build",
        replaced_models.around,
        replacement.in_scope_of_servers,
        "tables that every worker receives whole in each step, and \"'ShardedVariable' object has "
        "no attribute 'handle'\" if TensorFlow cuts them",
        "test_canary_embeddings_on_servers_are_read_whole",
        ("build_table",),
        ("input_shape",),
    ),
)

# They are in the table for their canaries, and so that their names are checked at import.
_FOR_A_TIME = (
    temporary_entry(
        keras.layers.Layer,
        "_maybe_build",
        "noting_unbuilt",
        '"Unable to lift tensor" if variables are created within a trace that has not run yet',
        "test_canary_a_trace_cannot_make_variables_for_later",
        arguments=("call_spec",),
    ),
    *(
        temporary_entry(
            owner,
            name,
            within,
            _CREATED_OPS,
            "test_canary_a_function_of_the_users_own_is_not_traced_again_within_another_trace",
            arguments=arguments,
        )
        for owner, name, within, arguments in (
            (function_context, "make_function_context", "separate_traces", ("scope_type",)),
            (function_context, "make_function_context", "replaced_ops", ("scope_type",)),
            (function_cache.FunctionCache, "add", "replaced_ops", ("fn",)),
            (execute, "execute", "replaced_ops", ("op_name", "inputs")),
            (pywrap_tfe, "TFE_Py_FastPathExecute", "replaced_ops", None),
        )
    ),
    temporary_entry(
        summary_ops_v2,
        "_should_record_summaries_internal",
        "separate_traces",
        "summaries of verification's runs in a user's files of events",
        "test_canary_a_step_records_summaries_also_within_a_record_if_around_it",
        arguments=("default_state",),
    ),
    *(
        temporary_entry(
            mirrored.MirroredExtended,
            name,
            "reducing_nothing",
            _REDUCES,
            "test_canary_replicas_reduce_unless_prevented",
            arguments=arguments,
        )
        for name, arguments in (
            ("_batch_reduce_to", ("value_destination_pairs", "options")),
            ("_reduce_to", ("reduce_op", "value", "destinations", "options")),
            ("_replica_ctx_all_reduce", ("reduce_op", "value", "options")),
            ("_gather_to_implementation", ("value", "axis", "options")),
        )
    ),
)


ENTRIES = (
    *_NUMBERS,
    *_ASSIGNMENTS,
    *_CALLS,
    *_AVERAGES,
    *_DATA,
    *REMAT,
    *_SERVERS,
    *_FOR_A_TIME,
)
