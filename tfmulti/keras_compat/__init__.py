"""The only place that uses private names of Keras and TensorFlow.

`table.TABLE` lists all functions that are replaced, each with the error or wrong result that the
replacement repairs, and with a test in `tests/test_keras_compat.py`: a canary, which fails when
Keras and TensorFlow no longer need it, unless it serves this package alone. `table.TRIED` has
the tested versions, `table.READ` and `table.ATTRIBUTES` the private names that are only read.
"""

# Several names on a line: ruff would make it 140 lines.
# fmt: off
from tfmulti.keras_compat.accessors import (
    COUNTERS, HAS_AVERAGES, WithLogits, activated, activation_of, adopt_optimizer, all_layers,
    all_metrics,
    averages_and_sums, axes_of, build_model, compiled_losses, exclude_parts, given_to_compile,
    inner_optimizer, is_batched, keep_on_each_replica, local_statistics, loss_of, mask_of,
    masked_weights, metric_variables, noted_logits, output_loss_trackers, own_losses, path_of,
    random_layers, remove_mask, replace_table, runs_eagerly, set_initial_epoch, set_mask,
    slots_of, stateful_layers, states_from_rows, step_of, sums_activity_penalty, take_initial_epoch,
    updated_variables, variable_index, variant_tensor,
)
from tfmulti.keras_compat.batch_sizes import batch_sizes_of, batch_sizes_of_dataset
from tfmulti.keras_compat.calls import (
    COMMUNICATION, arguments_of_nodes, assigns, call_context, is_symbolic,
    layers_of_nodes, next_op, nodes_of, operations_inside, operations_within, own_ops,
    noting_read, part_of_calls, sources_of, standardized_inputs, unrepeatable_ops, values_of,
    variables_assigned,
)
from tfmulti.keras_compat.collectives import (
    SENT_AS, broadcast_from, exchange_rows, gather_from_workers, mark_launchers,
    next_collective_key, order_of_workers, skip_collective_keys, use_own_groups,
)
from tfmulti.keras_compat.coordination import (
    abort_collectives, check_peers, heartbeats, listen_for_ends, publish, publish_failure,
    read_if_published, read_published, report_end, report_error, republish,
)
from tfmulti.keras_compat.extended import (
    AllDtypesExtended, CustomAllReduceExtended, LogicalCpusExtended, place_variables,
)
from tfmulti.keras_compat.held import (
    HeldVariable, UpdatedRows, after_add_weight, are_held_values, call_outside_scope,
    held_values, hold, in_stateless_scope, is_initialized, move_held, num_moves,
    own_state, own_weights, put_on,
)
from tfmulti.keras_compat.layer_states import states_assigned
from tfmulti.keras_compat.replaced_calls import (
    has_own_function, own_function_error,
)
from tfmulti.keras_compat.replaced_data import (
    distributed_dataset_of, feed_of, follow_position, number_of_batches, set_number_of_batches,
)
from tfmulti.keras_compat.replaced_models import (
    MAX_BYTES, MAX_ROWS, around_call_of, gather_local, lacks_call, means_updated_by,
    noting_reductions, reading_kernels_first, rows_from_all_over,
    update_metric_by, without_tuning,
)
from tfmulti.keras_compat.randomness import (
    Draws, draws_of, fixed_random_numbers, forget_draws_after, num_draws, same_draws_along,
    scratch_graph,
)
from tfmulti.keras_compat.reference import (
    among_all_replicas, as_first_replica, as_one_device, compiled_state,
    computes_like_one_device, container_of, handle_key, handles_of, in_separate_traces,
    on_first_replica, operations_of, predict_step_of, read_handle, reduce_outputs,
    reducing_as_usual, reducing_over_replicas, same_eager_numbers, separate_traces,
    without_optimized_graphs, write_handle,
)
from tfmulti.keras_compat.changes import noting_changes, noting_eager_run
from tfmulti.keras_compat.optimizer_methods import (
    after_updates, clip_by, method_below, own_methods, own_parts_of_apply, reset_method, set_method,
)
from tfmulti.keras_compat.recording import (
    AssignsInInnerGraph, RecordingScope, is_recording, is_updated,
)
from tfmulti.keras_compat.replacement import has_servers, is_ours, note_strategy, shuffling_for
from tfmulti.keras_compat.replaced_ops import traces_of_its_own
from tfmulti.keras_compat.seeds import (
    global_seed, global_seed_state, global_states, has_seeded, is_seed_state, note_seeding,
    prepare_global_seeds, random_stream, set_global_seed_state,
)
from tfmulti.keras_compat.replaced_steps import (
    accumulators, has_custom_step, is_accumulating, in_vectorized_loop, is_update_step, num_steps,
    strategy_of, track_variable, update_by,
)
from tfmulti.keras_compat.stock import is_stock, users_function
from tfmulti.keras_compat.streams import (
    calls_python, find_changing_order, is_from_python, is_zipped, made_of, reads_by_python,
    source_tensors,
)
from tfmulti.keras_compat.table import (
    TABLE, check_versions, install, install_for_repeated_calls, installed_versions,
)
from tfmulti.keras_compat.tracing import (
    has_built_layers, is_built, is_differentiating_forward, is_loop, is_recorded, is_taping,
    noting_unbuilt,
    tensors_read_after, tensors_read_from_before, unbuilt_layers, unbuilt_metrics, without_rows,
)
