"""Warns of states of layers that come apart in loops of the user's own around `strategy.run`."""

from __future__ import annotations

import warnings

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks

_MOST_NAMES = 3


@tf.autograph.experimental.do_not_convert
def warn_of_states(strategy: tf.distribute.Strategy) -> None:
    """Warns once of each state that replicas assign in the graph that is being built.

    `fit` averages what replicas change; a loop's function may do more after a layer's call, and
    does not tell the rows of each replica, by which the mean would have to be weighted.

    Args:
        strategy: The strategy.
    """
    pairs = keras_compat.states_assigned()
    for _, variable in pairs:
        marks.OF_LAYER.set(variable, None)
    if not pairs:
        return
    names = list(dict.fromkeys(v.name.split(":")[0] for _, v in pairs))
    more = " ..." if names[_MOST_NAMES:] else ""
    advice = [
        (keras.layers.BatchNormalization, "call tfmulti.synchronize_batch_normalization(model)"),
        (keras.Layer, "create the weights of your own layers by add_weight(aggregation='mean')"),
    ]
    kinds = [isinstance(layer, keras.layers.BatchNormalization) for layer, _ in pairs]
    wanted = [text for (_, text), used in zip(advice, (any(kinds), not all(kinds))) if used]
    warnings.warn(
        "States of layers must be the same on all replicas; `fit` averages them, and a loop around "
        "`strategy.run` does not: each replica goes on with its own, and a saved model has those "
        f"of the first. Received: {', '.join(names[:_MOST_NAMES])}{more}, assigned on "
        f"{strategy.num_replicas_in_sync} replicas. Before the first step, {'; '.join(wanted)}.",
        stacklevel=3,
    )
