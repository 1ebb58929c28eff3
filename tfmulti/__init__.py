"""tfmulti trains Keras 3 models on many devices through `model.fit`.

Names are resolved when first used, so that importing the package imports no TensorFlow. If the use
of a name imports it, TensorFlow's log lines are suppressed: TF_CPP_MIN_LOG_LEVEL=0 shows them.
"""

from __future__ import annotations

import importlib
import sys

_HOMES = {
    "create_strategy": "strategies",
    "DistributedOptimizer": "step.optimizer",
    "distribute_train": "data",
    "distribute_eval": "data",
    "gather_batch": "step.gathering",
    "local_rows": "step.gathering",
    "WholeBatchLoss": "step.whole_batch",
    "WholeBatchMetric": "step.whole_batch",
    "scale_learning_rate": "train.learning_rate",
    "Cluster": "cluster",
    "resolve_cluster": "cluster",
    "create_model": "train.models",
    "load_dataset": "data.datasets",
    "TrainConfig": "train.config",
    "train_and_evaluate": "train.loop",
    "train_async": "train.asynchronous",
    "notebook_launch": "notebook",
    "DistributedGradientTape": "step.tape",
    "no_sync": "step.gradients",
    "reduce_gradients": "step.gradients",
    "gather_optimizer_state": "step.sharded_state",
    "average_weights": "step.local_steps",
    "checkpoint_activations": "parallel.activations",
    "pipeline": "parallel.pipeline",
    "sharded_parameters": "parallel.sharded_parameters",
    "tensor_parallel": "parallel.tensor",
    "synchronize_batch_normalization": "step.normalization",
}

_WITHOUT_TENSORFLOW = ("cluster", "notebook")

__all__ = [*_HOMES, "callbacks"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module 'tfmulti' has no attribute {name!r}")
    home = _HOMES.get(name, name)
    if home not in _WITHOUT_TENSORFLOW and "tensorflow" not in sys.modules:
        importlib.import_module("tfmulti.runtime.command_line").import_tensorflow()
    module = importlib.import_module(f"tfmulti.{home}")
    return module if home == name else getattr(module, name)


def __dir__():
    return sorted(__all__)
