"""The only place that uses private names of Keras and TensorFlow.

Each entry says which message or wrong result it cures and on which versions it was tried
(Keras 3.12 to 3.15, TensorFlow 2.20 and 2.21). `tests/test_keras_compat.py` has a canary
for each: it fails when upstream no longer needs the cure.
"""

from tfmulti.keras_compat.coordination import check_peers as check_peers
from tfmulti.keras_compat.coordination import heartbeats as heartbeats
from tfmulti.keras_compat.coordination import publish as publish
from tfmulti.keras_compat.coordination import read_if_published as read_if_published
from tfmulti.keras_compat.coordination import read_published as read_published
from tfmulti.keras_compat.coordination import report_error as report_error
from tfmulti.keras_compat.hooks import after_loading as after_loading
from tfmulti.keras_compat.hooks import around_callbacks as around_callbacks
from tfmulti.keras_compat.hooks import before_calls as before_calls
from tfmulti.keras_compat.hooks import before_variables as before_variables
from tfmulti.keras_compat.hooks import follow_position as follow_position
from tfmulti.keras_compat.hooks import logs_without_steps as logs_without_steps
from tfmulti.keras_compat.hooks import number_of_batches as number_of_batches
from tfmulti.keras_compat.hooks import set_number_of_batches as set_number_of_batches
from tfmulti.keras_compat.hooks import weigh_single_numbers as weigh_single_numbers
from tfmulti.keras_compat.names import AddedElsewhere as AddedElsewhere
from tfmulti.keras_compat.names import LocalCPUs as LocalCPUs
from tfmulti.keras_compat.names import all_layers as all_layers
from tfmulti.keras_compat.names import compiled_losses as compiled_losses
from tfmulti.keras_compat.names import global_seed_state as global_seed_state
from tfmulti.keras_compat.names import is_batched as is_batched
from tfmulti.keras_compat.names import local_statistics as local_statistics
from tfmulti.keras_compat.names import output_loss_trackers as output_loss_trackers
from tfmulti.keras_compat.names import own_losses as own_losses
from tfmulti.keras_compat.names import random_layers as random_layers
from tfmulti.keras_compat.names import set_global_seed_state as set_global_seed_state
from tfmulti.keras_compat.names import set_initial_epoch as set_initial_epoch
from tfmulti.keras_compat.names import step_of as step_of
from tfmulti.keras_compat.names import synchronized_variables as synchronized_variables
from tfmulti.keras_compat.names import update_replicas_alike as update_replicas_alike
from tfmulti.keras_compat.names import variant_tensor as variant_tensor
from tfmulti.keras_compat.patches import count_shares_in_moments as count_shares_in_moments
from tfmulti.keras_compat.patches import end_with_their_reader as end_with_their_reader
from tfmulti.keras_compat.patches import install as install
from tfmulti.keras_compat.patches import reduce_losses_by as reduce_losses_by
from tfmulti.keras_compat.patches import vary_seeds_by_replica as vary_seeds_by_replica
from tfmulti.keras_compat.patches import without_tuning as without_tuning
from tfmulti.keras_compat.versions import check_versions as check_versions
from tfmulti.keras_compat.versions import installed_versions as installed_versions
