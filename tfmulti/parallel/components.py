"""The dense tensors that sparse and ragged tensors consist of; only dense ones have gradients."""

from __future__ import annotations

import keras
import tensorflow as tf


def tensors_of(structure) -> list:
    """Returns the tensors of a structure, in order, without Keras's variables and other values.

    A variable of TensorFlow has its value.
    """
    flat = [value for value in keras.tree.flatten(structure) if _is_tensor(value)]
    return [
        x if isinstance(x, tf.Tensor) or _is_composite(x) else tf.convert_to_tensor(x) for x in flat
    ]


def variables_of(structure) -> list[keras.Variable]:
    """Returns the variables of a structure, in order."""
    return [value for value in keras.tree.flatten(structure) if isinstance(value, keras.Variable)]


def without_variables(structure):
    """Returns a structure with the values of its variables."""
    return keras.tree.map_structure(
        lambda x: tf.convert_to_tensor(x) if isinstance(x, keras.Variable) else x, structure
    )


def parts_of(tensors) -> list[tf.Tensor]:
    """Returns the dense tensors that tensors consist of: a dense one is its only part."""
    return [part for tensor in tensors for part in _parts(tensor)]


def take(like, parts: list[tf.Tensor]) -> list:
    """Returns tensors of the kinds of others.

    Args:
        like: The others.
        parts: A list that begins with the parts of the new ones, which are removed from it.
    """
    taken = [[parts.pop(0) for _ in _parts(tensor)] for tensor in like]
    return [
        tf.nest.pack_sequence_as(tensor, own, expand_composites=True)
        if _is_composite(tensor)
        else own[0]
        for tensor, own in zip(like, taken)
    ]


def filled(structure, tensors: list):
    """Returns a structure with its tensors replaced by others, in order."""
    remaining = list(tensors)
    return keras.tree.map_structure(
        lambda value: remaining.pop(0) if _is_tensor(value) else value, structure
    )


def _is_tensor(value):
    # Keras's variables are tensors to TensorFlow.
    return tf.is_tensor(value) and not isinstance(value, keras.Variable)


def _parts(tensor):
    return tf.nest.flatten(tensor, expand_composites=True) if _is_composite(tensor) else [tensor]


def _is_composite(tensor):
    return isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor))
