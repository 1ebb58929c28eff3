"""Finds models that were made outside of the strategy's scope: they would train alone."""

from __future__ import annotations

import warnings
import weakref

import keras
import tensorflow as tf

_latest: weakref.ref | None = None


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Takes note of a strategy that a script has made, in whose scope its models belong."""
    global _latest
    _latest = weakref.ref(strategy)


def look_for_scope(model: keras.Model, name: str, data) -> None:
    """Tells of a model that is going to be trained on one device, though a script has more.

    Args:
        model: The model whose method was called.
        name: `"fit"`, or another method, which may be called on one device as well.
        data: The method's first argument.

    Raises:
        ValueError: Where the data were made for the replicas of a strategy, or a part of a model
            that was made in its scope was made outside of it.
    """
    strategy = _latest() if _latest is not None else None
    if name != "fit":
        return
    if getattr(model.distribute_strategy, "repairs_keras", False):
        refuse_made_outside(model)
        return
    made_for = getattr(data, "strategy", None)
    if made_for is not None and made_for.num_replicas_in_sync > 1:
        raise ValueError(
            "A model must be made in the scope of the strategy that its data were made for. "
            f"Received: data for {made_for.num_replicas_in_sync} replicas, and a model that was "
            "made in no scope, and would train on one device alone. "
            "Create and compile it within `with strategy.scope():`."
        )
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        warnings.warn(
            f"{model.name} was made outside of `with strategy.scope():`, and so it trains on one "
            f"device alone, not on {strategy.num_replicas_in_sync} replicas. If that is not "
            "meant, create and compile it within the scope.",
            stacklevel=5,
        )


def refuse_made_outside(model: keras.Model) -> None:
    """Raises ValueError for a variable of which several replicas would all update the only one.

    What creates variables later than a layer or an optimizer itself counts too: building, LoRA.
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
            f"Received: the variable {strange[0].path}, created outside of it. "
            "Create them within `with strategy.scope():`, or name them by strings in compile; "
            "build a model, enable LoRA and compile within it too."
        )
