"""Entries for what acts inside steps: losses, metrics, layers, random numbers and optimizers."""

from __future__ import annotations

import importlib

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.layers.preprocessing import index_lookup
from keras.src.losses import loss as keras_loss
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import custom_gradient

from tfmulti.keras_compat import (
    batch_statistics,
    held,
    lookups,
    recording,
    replaced_calls,
    replaced_models,
    replaced_steps,
    replacement,
    seeds,
    tracing,
)
from tfmulti.keras_compat.replacement import Replacement, model_entry, scope_entry

# Its package has a function of this name.
_RNN = importlib.import_module("keras.src.backend.tensorflow.rnn")
_MERGE_CALL = '"RuntimeError: `merge_call` called while defining a new graph"'
SHAPES = '"Shape mismatch in the collective instance"'

OF_CUSTOM_GRADIENTS = tuple(
    Replacement(
        custom_gradient,
        name,
        recording.around_custom_gradient,
        recording.while_recording,
        "weights without their gradients, in silence, where `tf.recompute_grad` reads them in a "
        "layer whose activations are checkpointed",
        "test_canary_a_function_with_its_own_gradient_loses_those_of_tensors",
        arguments=("f", "args", "kwargs"),
    )
    for name in ("_eager_mode_decorator", "_graph_mode_decorator")
)


def _optimizer(name, repairs, arguments=(), owner=keras.optimizers.Optimizer, plain=None):
    """Returns an entry for an update that each replica does as an optimizer without replicas."""
    # The base class of TensorFlow's optimizer knows no replicas, and reduces nothing.
    plain = plain or getattr(base_optimizer.BaseOptimizer, name)
    make, used = replaced_steps.update_alike(plain), replacement.of_optimizer
    canary = "test_canary_an_optimizers_update_goes_across_replicas"
    needs = ("gradients_are_global",)
    return Replacement(owner, name, make, used, repairs, canary, needs, arguments)


_STEPS = (
    model_entry(
        "_maybe_symbolic_build",
        replaced_models.build_from_one_replica,
        '"Attempt to convert a value (PerReplica...)", "AddN ... Inputs must have same size" if '
        "the first batch does not divide evenly, \"'RaggedTensor' object has no attribute "
        "'device'\", "
        '"Unable to automatically build the model" for data that only a `train_step` understands',
        "test_canary_a_first_batch_that_does_not_divide",
        needs=("first_local_value", "before_pass", "build_by_step", "once_built", "refuse"),
        arguments=("iterator", "data_batch"),
    ),
    model_entry(
        "_make_function",
        replaced_steps.mark_steps,
        "a step that is a tf.function, a partial or a lambda is not recognized as Keras's, and "
        "trains each replica on its own rows",
        "test_canary_a_step_by_another_name",
        needs=("before_making", "watch"),
        arguments=("step_function",),
    ),
    scope_entry(
        tf.GradientTape,
        "gradient",
        replaced_steps.within_steps,
        "gradients of one replica's rows, which only an optimizer adds",
        "test_canary_a_tape_gives_its_own_replicas_gradient",
        needs=("take_gradient",),
        arguments=("target", "sources", "output_gradients", "unconnected_gradients"),
    ),
    scope_entry(
        keras.optimizers.Optimizer,
        "_var_key",
        held.keys_of_held,
        "a sharded weight that is gathered whenever an optimizer looks it up",
        "test_canary_an_optimizer_reads_a_variable_to_look_it_up",
        arguments=("variable",),
    ),
    scope_entry(
        keras.optimizers.LossScaleOptimizer,
        "check_finite",
        replaced_models.around,
        "different loss scales, if each worker has only the gradients of its own weights",
        "test_canary_loss_scaling_looks_at_the_gradients_here",
        needs=("finite_on_all",),
        arguments=("grads",),
    ),
    Replacement(
        polymorphic_function.Function,
        "__call__",
        replaced_steps.inline_functions,
        replacement.in_any_scope,
        f"{_MERGE_CALL}, and a kind of step that reuses another's trace of a tf.function",
        "test_canary_a_tf_function_within_a_step_cannot_reduce",
        needs=("inlines",),
    ),
    *OF_CUSTOM_GRADIENTS,
    scope_entry(
        custom_gradient,
        "_get_dependent_variables",
        tracing.without_search_in_functions,
        "a first step whose tracing grows faster than the number of all-reduces, such as those of "
        "synchronized batch normalization",
        "test_canary_each_all_reduce_is_searched_for_variables",
        arguments=("input_ops", "output_ops"),
    ),
    *(
        scope_entry(
            keras.Layer,
            name,
            replaced_steps.keep_losses_apart(kind),
            "penalties lost, or counted for another replica, beside synchronized batch "
            "normalization",
            "test_canary_penalties_of_replicas_are_kept_apart",
            needs=("notes_of_step",),
            arguments=None,
        )
        for name, kind in (("_losses", list), ("_loss_ids", set))
    ),
    model_entry(
        "make_predict_function",
        tracing.predict_any_rows,
        "`predict` that waits for ever under several workers: a trace for each number of rows",
        "test_canary_predict_is_traced_for_the_rows_that_it_is_given",
        arguments=("force",),
    ),
    *(
        model_entry(
            f"make_{kind}_function",
            tracing.anew_after_moves(kind),
            "a step that reads what weights were before they moved to another worker or device",
            "test_canary_a_step_reads_weights_from_before_they_moved",
            arguments=("force",),
        )
        for kind in ("train", "test")
    ),
    model_entry(
        "_autoconvert_optionals",
        tracing.step_on_any_rows,
        "`train_on_batch` and `test_on_batch` that wait for ever under several workers",
        "test_canary_a_step_on_a_batch_is_traced_for_its_rows",
        arguments=("step_func",),
    ),
    model_entry(
        "predict_on_batch",
        replaced_models.around,
        "predictions that are repeated for each replica: 13 rows in, 26 out",
        "test_canary_predict_on_batch_answers_once_for_each_replica",
        needs=("predict",),
        arguments=("x",),
    ),
)

_LOSSES = (
    scope_entry(
        keras_loss,
        "reduce_weighted_values",
        replaced_models.around,
        "wrong gradients under masks, sample weights, and reductions other than the mean",
        "test_canary_a_loss_is_divided_by_one_replicas_count",
        needs=("reduce_loss",),
        arguments=("sample_weight", "mask", "reduction", "dtype"),
    ),
    *(
        scope_entry(
            keras_loss,
            name,
            replaced_models.around,
            "losses and penalties too small or too big by the number of replicas",
            "test_canary_a_loss_is_divided_by_the_replicas",
            needs=("keep_means",),
            arguments=("value",),
        )
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    ),
    *(
        scope_entry(
            tf.nn,
            name,
            replaced_models.around,
            "gradients too small by the number of replicas: TensorFlow divides for optimizers "
            "that add",
            "test_canary_tensorflows_own_averages_divide_by_the_replicas",
            needs=(function,),
            arguments=(argument,),
        )
        for name, function, argument in (
            ("compute_average_loss", "average_loss", "per_example_loss"),
            ("scale_regularization_loss", "regularization_loss", "regularization_loss"),
        )
    ),
    scope_entry(
        keras.losses.Loss,
        "__call__",
        replaced_models.around,
        "losses that are not means over rows, such as Dice, computed from one replica's rows",
        "test_canary_a_loss_of_the_whole_batch_sees_one_replica_batch",
        needs=("call_loss",),
        arguments=("y_true", "y_pred", "sample_weight"),
    ),
    scope_entry(
        keras.metrics.MeanMetricWrapper,
        "update_state",
        replaced_models.update_with_function,
        "metric functions that return one number for a batch, computed from one replica's rows",
        "test_canary_a_metric_function_sees_one_replica_batch",
        needs=("update_metric_function",),
        arguments=("y_true", "y_pred", "sample_weight"),
    ),
    scope_entry(
        keras.metrics.Mean,
        "result",
        replaced_models.around,
        "one replica's result for a metric that a step logs under another name",
        "test_canary_a_result_under_another_name_is_one_replicas",
        needs=("note_result",),
    ),
    *(
        scope_entry(
            kind,
            "update_state",
            replaced_models.around,
            "running means of one number a step in which replicas with few rows count as much",
            "test_canary_a_running_mean_counts_replicas_alike",
            needs=("weight_mean",),
            arguments=("values", "sample_weight"),
        )
        for kind in (keras.metrics.Mean, keras.metrics.Sum)
    ),
)

_LAYERS = (
    scope_entry(
        index_lookup.IndexLookup,
        "_lookup_dense",
        lookups.of_known_words,
        'InvalidArgumentError: all inputs should be in vocabulary, found OOV values [""]',
        "test_canary_lookups_refuse_a_dummy_row",
        needs=("current_replica_batch",),
        arguments=("inputs",),
    ),
    scope_entry(
        keras_nn,
        "_compute_moments_sync",
        batch_statistics.of_whole_batch,
        "synchronized batch statistics with the dummy row of an empty replica batch, and with a "
        "variance that cancels where a mean is large",
        "test_canary_batch_statistics_count_every_row",
        needs=("current_replica_batch",),
        arguments=("x", "axes", "keepdims"),
    ),
    scope_entry(
        keras.layers.BatchNormalization,
        "_moments",
        batch_statistics.of_all_masks,
        "synchronized batch statistics that are each replica's own under a mask",
        "test_canary_masked_batch_statistics_are_each_replicas_own",
        needs=("current_replica_batch",),
        arguments=("inputs", "mask"),
    ),
    *(
        scope_entry(
            _RNN,
            name,
            replaced_models.clear_gradients_of_masked_steps,
            "gradients of masked time steps that hold whatever the GPU's memory held",
            "test_gradients_of_masked_steps_that_cudnn_leaves_are_cleared",
            arguments=("inputs", "mask"),
        )
        for name in ("_cudnn_lstm", "_cudnn_gru")
    ),
    scope_entry(
        seed_generator,
        "global_seed_generator",
        seeds.share_global_seeds,
        '"tf.function only supports singleton tf.Variables" where a step draws without a seed',
        "test_canary_each_replica_makes_a_generator_of_its_own",
    ),
    scope_entry(
        keras.random.SeedGenerator,
        "next",
        seeds.vary_seeds,
        "masks of dropout and augmentation that are the same on all replicas and workers",
        "test_canary_dropout_is_the_same_on_all_replicas",
    ),
    scope_entry(
        keras.Variable,
        "_initialize",
        replaced_calls.before_variables,
        f"{SHAPES}, or waiting for ever, if workers build different models, because creating a "
        "variable is a collective; and counts of updates that cannot change in a branch",
        "test_canary_a_branch_cannot_count_updates",
        needs=("compare_variable",),
        arguments=("value",),
    ),
)


_OPTIMIZERS = (
    _optimizer(
        "_backend_update_step",
        f"{_MERGE_CALL}, and a second reduction of gradients",
        ("grads", "trainable_variables"),
        plain=replaced_steps.update_on_devices,
    ),
    _optimizer(
        "_apply_weight_decay", _MERGE_CALL, ("variables",), plain=replaced_steps.decay_on_devices
    ),
    _optimizer("_backend_increment_gradient_accumulators", _MERGE_CALL, ("grads",)),
    _optimizer(
        "_overwrite_model_variables_with_average_value", _MERGE_CALL, ("trainable_variables",)
    ),
    _optimizer(
        "_tf_apply",
        f"{_MERGE_CALL} under loss scaling, and replicas that judge by their own gradients",
        ("grads", "trainable_variables"),
        owner=keras.optimizers.LossScaleOptimizer,
        # What Keras does for other backends, and for strategies that need no `merge_call`.
        plain=keras.optimizers.LossScaleOptimizer._common_apply,
    ),
    Replacement(
        keras.optimizers.Optimizer,
        "_backend_apply_gradients",
        replaced_models.around,
        replacement.of_optimizer,
        "a reduction at each step of `gradient_accumulation_steps`",
        "test_canary_an_accumulating_optimizer_reduces_at_each_step",
        ("accumulate",),
        ("grads", "trainable_variables"),
    ),
    *(
        Replacement(
            kind,
            "apply",
            replaced_steps.within_replicas,
            replacement.of_optimizer,
            message,
            canary,
            ("update_of_keras",),
            arguments=("grads", "trainable_variables"),
        )
        for kind, message, canary in (
            (
                keras.optimizers.Optimizer,
                "\"'NoneType' object has no attribute 'merge_call'\", and other errors that name "
                "no cause",
                "test_canary_an_optimizer_outside_of_replicas",
            ),
            (
                keras.optimizers.LossScaleOptimizer,
                "weights that differ between replicas, where each has computed the whole batch "
                "with random numbers of its own",
                "test_canary_loss_scaling_applies_each_replicas_gradients",
            ),
        )
    ),
    model_entry(
        "compile_from_config",
        replaced_calls.after_loading,
        "a loaded model's optimizer that is not distributed any more",
        "test_canary_a_file_holds_the_users_optimizer",
        needs=("distribute_loaded",),
        arguments=("config",),
    ),
)

ENTRIES = (*_STEPS, *_LOSSES, *_LAYERS, *_OPTIMIZERS)
