"""Whether a step is made of stock parts alone, which the conformance matrix proves."""

from __future__ import annotations

import keras

from tfmulti import keras_compat
from tfmulti.verification import own


def is_stock(model: keras.Model, kind: str) -> bool:
    """Whether every part of a model's step is Keras's own.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if type(model).__module__.split(".")[0] != "keras" or own.own_parts(model, kind):
        return False
    # In float8 layers keep the largest of each replica's own numbers.
    layers = keras_compat.all_layers(model)
    return all(getattr(layer, "quantization_mode", None) is None for layer in layers)
