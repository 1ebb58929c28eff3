"""Checkpointed activations: less memory for a second forward pass."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

import keras

from tfmulti import keras_compat
from tfmulti.parallel.cutting import Cut, balanced_starts
from tfmulti.parallel.recompute import recomputed


def checkpoint_activations(
    model: keras.Model, layers: str | Iterable[str | keras.layers.Layer] | None = None
) -> keras.Model:
    """Lets blocks of a model keep their inputs only, and compute the rest again for gradients.

    A stack of n equal blocks then holds the activations of one block and n inputs in place of
    those of all. Each block's forward pass runs twice in a training step, from the same weights,
    statistics and seeds, so that the result is that of the model without it; layers' state
    changes once. It works under every strategy and on one device. Saved files do not have it.

    Args:
        model: A built model.
        layers: Which layers are blocks: a name, a pattern such as `"block_*"`, a layer, or several
            of them. None for every layer of the model that holds layers of its own; a Functional
            or Sequential model that has none is cut into about as many parts as the square root
            of its layers.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has not been built, or nothing is found.
        RuntimeError: When it trains, if a block would not do the same the second time.

    Example:
        >>> hidden = [keras.layers.Dense(4, activation="gelu") for _ in range(9)]
        >>> model = keras.Sequential([keras.Input((4,)), *hidden])
        >>> model = checkpoint_activations(model)

    Sources: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if not model.built or not all(layer.built for layer in keras_compat.all_layers(model)):
        raise ValueError(
            "`checkpoint_activations` needs a model that has been built. Received: "
            f"{model.name!r}, which has not. Give it an `Input`, or call it on a batch first."
        )
    chosen = _blocks(model) if layers is None else _named(model, layers)
    for layer in chosen:
        layer.call = recomputed(layer, layer.call)
    if not chosen:
        _checkpoint_parts(model)
    return model


def _blocks(model):
    """The layers of a model that hold layers; not what is within them."""
    return [each for each in model.layers if each.weights and keras_compat.all_layers(each)]


def _named(model, layers):
    wanted = [layers] if isinstance(layers, (str, keras.layers.Layer)) else list(layers)
    every = keras_compat.all_layers(model)
    found = []
    for each in wanted:
        matches = [layer for layer in every if layer is each or _matches(layer, each)]
        if not matches:
            raise ValueError(
                "`layers` must be names or patterns of layers of the model. Received: "
                f"{each!r}, which fits none of {[layer.name for layer in every]}. Give one of them."
            )
        found += matches
    within = {id(inner) for layer in found for inner in keras_compat.all_layers(layer)}
    return list({id(layer): layer for layer in found if id(layer) not in within}.values())


def _matches(layer, pattern):
    return isinstance(pattern, str) and fnmatch.fnmatchcase(layer.name, pattern)


def _checkpoint_parts(model):
    nodes = keras_compat.nodes_of(model)
    if nodes is None or len(nodes) < 4:
        raise ValueError(
            "`checkpoint_activations` needs blocks: layers that hold other layers, or a Functional "
            f"model of at least four layers. Received: {model.name!r} with layers "
            f"{[layer.name for layer in model.layers]}. Name the layers in `layers`."
        )
    cut = Cut(model, balanced_starts(model))
    # The last part's activations are needed at once, so that it gains nothing from a second run.
    for part in cut.parts[:-1]:
        part.model.call = recomputed(part.model, part.model.call, model)
    model.call = cut.call
