"""What type checkers and editors see of names that are resolved when first used."""

from tfmulti import callbacks as callbacks
from tfmulti.cluster import Cluster as Cluster
from tfmulti.cluster import resolve_cluster as resolve_cluster
from tfmulti.data import distribute_eval as distribute_eval
from tfmulti.data import distribute_train as distribute_train
from tfmulti.data.datasets import load_dataset as load_dataset
from tfmulti.notebook import notebook_launch as notebook_launch
from tfmulti.parallel.activations import checkpoint_activations as checkpoint_activations
from tfmulti.parallel.pipeline import pipeline as pipeline
from tfmulti.parallel.sharded_parameters import sharded_parameters as sharded_parameters
from tfmulti.parallel.tensor import tensor_parallel as tensor_parallel
from tfmulti.step.gathering import gather_batch as gather_batch
from tfmulti.step.gathering import local_rows as local_rows
from tfmulti.step.gradients import no_sync as no_sync
from tfmulti.step.gradients import reduce_gradients as reduce_gradients
from tfmulti.step.local_steps import average_weights as average_weights
from tfmulti.step.normalization import (
    synchronize_batch_normalization as synchronize_batch_normalization,
)
from tfmulti.step.optimizer import DistributedOptimizer as DistributedOptimizer
from tfmulti.step.sharded_state import gather_optimizer_state as gather_optimizer_state
from tfmulti.step.tape import DistributedGradientTape as DistributedGradientTape
from tfmulti.step.whole_batch import WholeBatchLoss as WholeBatchLoss
from tfmulti.step.whole_batch import WholeBatchMetric as WholeBatchMetric
from tfmulti.strategies import create_strategy as create_strategy
from tfmulti.train.asynchronous import train_async as train_async
from tfmulti.train.config import TrainConfig as TrainConfig
from tfmulti.train.learning_rate import scale_learning_rate as scale_learning_rate
from tfmulti.train.loop import train_and_evaluate as train_and_evaluate
from tfmulti.train.models import create_model as create_model
