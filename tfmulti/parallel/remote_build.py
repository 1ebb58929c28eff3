"""Builds models whose variables are on parameter servers, before their steps are traced."""

from __future__ import annotations

import keras

from tfmulti import keras_compat
from tfmulti.parallel import partitioned


def build(model: keras.Model, batch) -> None:
    """Creates all variables of a compiled model on the servers.

    Raises:
        ValueError: If the model is not compiled with an optimizer, or with one that cannot update
            a table in parts.
    """
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            "A model must be compiled with an optimizer before it is trained. "
            f"Received: {model.name!r}, which is not. Call model.compile(optimizer, loss) in the "
            "strategy's scope."
        )
    with model.distribute_strategy.scope():
        keras_compat.build_model(model, batch)
        partitioned.prepare_optimizer(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
