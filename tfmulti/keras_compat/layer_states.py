"""Tells which states of layers a function that replicas run assigns."""

from __future__ import annotations

import weakref

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from tfmulti import marks
from tfmulti.keras_compat import calls, reference
from tfmulti.keras_compat.stock import is_stock

# Keras's name for the open name scopes among its global attributes.
_SCOPES = "name_scope_stack"


def states_assigned() -> list[tuple[keras.layers.Layer, tf.Variable]]:
    """Returns the states of layers that the graph being built assigns on each replica by itself.

    Each with its layer: one of the user's own, or batch normalization that is not synchronized.
    """
    found = {}
    for op in calls.operations_within(tf.compat.v1.get_default_graph()):
        if calls.assigns(op.type):
            variable = reference.container_of(calls.given_from_outside(op.inputs[0]))
            if variable is not None:
                found[id(variable)] = variable
    of_each = tf.VariableAggregation.NONE
    apart = [v for v in found.values() if v.aggregation == of_each and v.dtype.is_floating]
    known = [(marks.OF_LAYER.get(v), v) for v in apart]
    pairs = [(layer(), v) for layer, v in known if layer is not None]
    return [(layer, v) for layer, v in pairs if layer is not None and _counts_rows(layer)]


def _counts_rows(layer) -> bool:
    if isinstance(layer, keras.layers.BatchNormalization):
        return not layer.synchronized
    return not is_stock(layer)


def note_layer(variable: keras.Variable) -> None:
    """Notes on the value of a layer's state, which is not trained, whose it is."""
    scopes = global_state.get_global_attribute(_SCOPES) or [None]
    layer = getattr(scopes[-1], "caller", None)
    value = getattr(variable, "_value", None)
    if isinstance(layer, keras.Layer) and not variable.trainable:
        if isinstance(value, tf.distribute.DistributedValues):
            marks.OF_LAYER.set(value, weakref.ref(layer))
