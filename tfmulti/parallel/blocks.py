"""Which layers of a model are blocks whose activations are checkpointed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import keras

from tfmulti import keras_compat


def layers_with_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns the outermost layers of a model that contain layers and have weights."""
    return [layer for layer in model.layers if layer.weights and keras_compat.all_layers(layer)]


def find_layers(
    model: keras.Model, layers: str | Iterable[str | keras.layers.Layer]
) -> list[keras.layers.Layer]:
    """Returns the layers that are named, once each, and not those within another named one."""
    every = keras_compat.all_layers(model)
    wanted = [layers] if isinstance(layers, (str, keras.layers.Layer)) else layers
    wanted = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    blocks = []
    # An empty list fits no layer.
    for each in wanted or [layers]:
        matches = [layer for layer in every if layer is each or _matches(layer, each)]
        if not matches:
            raise ValueError(
                "`layers` must be names or patterns of layers of the model. Received: "
                f"{each!r}, which fits none of {[layer.name for layer in every]}. Give one of them."
            )
        blocks += matches
    within = {id(inner) for layer in blocks for inner in keras_compat.all_layers(layer)}
    return list({id(layer): layer for layer in blocks if id(layer) not in within}.values())


def _matches(layer, pattern):
    return isinstance(pattern, str) and fnmatch.fnmatchcase(layer.name, pattern)
