"""tfmulti trains Keras 3 models on many devices through `model.fit`.

Names are resolved when first used, so that importing the package imports no TensorFlow.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "create_strategy": "strategies",
    "DistributedOptimizer": "optimizers",
    "distribute_train": "data",
    "distribute_eval": "data",
    "scale_learning_rate": "learning_rate",
    "Cluster": "cluster",
    "resolve_cluster": "cluster",
    "create_model": "models",
    "load_dataset": "datasets",
    "TrainConfig": "trainer",
    "train_and_evaluate": "trainer",
    "notebook_launch": "notebook",
}

__all__ = [*_HOMES, "callbacks"]


def __getattr__(name):
    if name == "callbacks":
        return importlib.import_module("tfmulti.callbacks")
    if name not in _HOMES:
        raise AttributeError(f"module 'tfmulti' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tfmulti.{_HOMES[name]}"), name)


def __dir__():
    return sorted(__all__)
