"""Finds models that were created outside the strategy's scope: they would use one device."""

from __future__ import annotations

import warnings
import weakref

import keras
import tensorflow as tf

_latest: weakref.ref | None = None


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Records the latest strategy of a script, in whose scope its models should be created."""
    global _latest
    _latest = weakref.ref(strategy)


def look_for_scope(model: keras.Model, name: str, data) -> None:
    """Warns if `fit` trains a model on one device although the script has a larger strategy.

    Args:
        model: The model whose method was called.
        name: The name of the method. Only `"fit"` is checked.
        data: The method's first argument.

    Raises:
        ValueError: If the data were distributed for the replicas of a strategy, or if a part of
            a model in the scope was created outside it.
    """
    strategy = _latest() if _latest is not None else None
    if name != "fit":
        return
    if getattr(model.distribute_strategy, "repairs_keras", False):
        refuse_made_outside(model)
        refuse_keras_distribution()
        return
    made_for = getattr(data, "strategy", None)
    if made_for is not None and made_for.num_replicas_in_sync > 1:
        raise ValueError(
            "A model must be created in the scope of the strategy that distributes its data. "
            f"Received: data for {made_for.num_replicas_in_sync} replicas, and a model created "
            "outside any scope, which would train on one device only. "
            "Create and compile it within `with strategy.scope():`."
        )
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        warnings.warn(
            f"{model.name} was created outside `with strategy.scope():`, so it trains on one "
            f"device only, not on {strategy.num_replicas_in_sync} replicas. Unless you intend "
            "this, create and compile it within the scope.",
            stacklevel=5,
        )


def refuse_keras_distribution() -> None:
    """Raises ValueError if a `keras.distribution` is set, which TensorFlow's backend ignores."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ValueError(
            "`keras.distribution` has no effect with TensorFlow: every device holds the whole "
            f"model. Received: {type(distribution).__name__}. Call "
            "keras.distribution.set_distribution(None); tfmulti's strategy distributes the data, "
            "and tfmulti.checkpoint_activations saves memory."
        )


def refuse_made_outside(model: keras.Model) -> None:
    """Raises ValueError for a variable without a copy for each replica: all would update it.

    It also finds variables that are created later than their layer, by building or LoRA.
    """
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    optimizer = getattr(model, "optimizer", None)
    owned = [*model.trainable_variables, *model.metrics_variables]
    owned += optimizer.variables if optimizer is not None else []
    strange = [v for v in owned if not isinstance(v.value, tf.distribute.DistributedValues)]
    if strange:
        raise ValueError(
            "Layers, optimizers and metrics must be created in the strategy's scope. "
            f"Received: the variable {strange[0].path}, created outside it. "
            "Create them within `with strategy.scope():`, or pass them to compile by name; "
            "build the model, enable LoRA and compile within the scope too."
        )
