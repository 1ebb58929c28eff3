"""The only place that uses private names of Keras and TensorFlow.

`table.TABLE` has all that is replaced: each entry with the message or wrong result that it cures,
and its canary in `tests/test_keras_compat.py`, which fails when upstream no longer needs the cure.
`table.TRIED` has the versions that all of it was tried on, `table.NAMES` what is read as well.
"""

from tfmulti.keras_compat.coordination import check_peers as check_peers
from tfmulti.keras_compat.coordination import heartbeats as heartbeats
from tfmulti.keras_compat.coordination import own_launchers as own_launchers
from tfmulti.keras_compat.coordination import publish as publish
from tfmulti.keras_compat.coordination import read_if_published as read_if_published
from tfmulti.keras_compat.coordination import read_published as read_published
from tfmulti.keras_compat.coordination import report_error as report_error
from tfmulti.keras_compat.hooks import feed_of as feed_of
from tfmulti.keras_compat.hooks import follow_position as follow_position
from tfmulti.keras_compat.hooks import number_of_batches as number_of_batches
from tfmulti.keras_compat.hooks import set_number_of_batches as set_number_of_batches
from tfmulti.keras_compat.names import LocalCPUs as LocalCPUs
from tfmulti.keras_compat.names import OwnAllReduce as OwnAllReduce
from tfmulti.keras_compat.names import all_layers as all_layers
from tfmulti.keras_compat.names import all_metrics as all_metrics
from tfmulti.keras_compat.names import compiled_losses as compiled_losses
from tfmulti.keras_compat.names import is_batched as is_batched
from tfmulti.keras_compat.names import is_stock as is_stock
from tfmulti.keras_compat.names import keep_on_each_replica as keep_on_each_replica
from tfmulti.keras_compat.names import local_statistics as local_statistics
from tfmulti.keras_compat.names import loss_of as loss_of
from tfmulti.keras_compat.names import mask_of as mask_of
from tfmulti.keras_compat.names import output_loss_trackers as output_loss_trackers
from tfmulti.keras_compat.names import own_losses as own_losses
from tfmulti.keras_compat.names import random_layers as random_layers
from tfmulti.keras_compat.names import set_initial_epoch as set_initial_epoch
from tfmulti.keras_compat.names import set_mask as set_mask
from tfmulti.keras_compat.names import stateful_layers as stateful_layers
from tfmulti.keras_compat.names import states_from_rows as states_from_rows
from tfmulti.keras_compat.names import step_of as step_of
from tfmulti.keras_compat.names import updated_variables as updated_variables
from tfmulti.keras_compat.names import variant_tensor as variant_tensor
from tfmulti.keras_compat.patches import around_call_of as around_call_of
from tfmulti.keras_compat.patches import rows_from_all_over as rows_from_all_over
from tfmulti.keras_compat.patches import update_metric_by as update_metric_by
from tfmulti.keras_compat.patches import without_tuning as without_tuning
from tfmulti.keras_compat.randomness import Draws as Draws
from tfmulti.keras_compat.randomness import fixed_random_numbers as fixed_random_numbers
from tfmulti.keras_compat.reference import be_first_replica as be_first_replica
from tfmulti.keras_compat.reference import compiled_state as compiled_state
from tfmulti.keras_compat.reference import container_of as container_of
from tfmulti.keras_compat.reference import handle_key as handle_key
from tfmulti.keras_compat.reference import handles_of as handles_of
from tfmulti.keras_compat.reference import operations_of as operations_of
from tfmulti.keras_compat.reference import predict_step_of as predict_step_of
from tfmulti.keras_compat.reference import read_handle as read_handle
from tfmulti.keras_compat.reference import reduce_outputs as reduce_outputs
from tfmulti.keras_compat.reference import reducing_nothing as reducing_nothing
from tfmulti.keras_compat.reference import same_eager_numbers as same_eager_numbers
from tfmulti.keras_compat.reference import separate_traces as separate_traces
from tfmulti.keras_compat.reference import write_handle as write_handle
from tfmulti.keras_compat.replacement import Replacement as Replacement
from tfmulti.keras_compat.replacement import note_strategy as note_strategy
from tfmulti.keras_compat.seeds import global_seed_state as global_seed_state
from tfmulti.keras_compat.seeds import prepare_global_seeds as prepare_global_seeds
from tfmulti.keras_compat.seeds import set_global_seed_state as set_global_seed_state
from tfmulti.keras_compat.steps import accumulators as accumulators
from tfmulti.keras_compat.steps import has_own_step as has_own_step
from tfmulti.keras_compat.steps import is_accumulating as is_accumulating
from tfmulti.keras_compat.steps import is_update_step as is_update_step
from tfmulti.keras_compat.steps import mark_step as mark_step
from tfmulti.keras_compat.steps import mark_updates_alike as mark_updates_alike
from tfmulti.keras_compat.steps import update_by as update_by
from tfmulti.keras_compat.table import TABLE as TABLE
from tfmulti.keras_compat.table import check_versions as check_versions
from tfmulti.keras_compat.table import install as install
from tfmulti.keras_compat.table import installed_versions as installed_versions
from tfmulti.keras_compat.tracing import is_built as is_built
from tfmulti.keras_compat.tracing import noting_unbuilt as noting_unbuilt
from tfmulti.keras_compat.tracing import unbuilt_metrics as unbuilt_metrics
