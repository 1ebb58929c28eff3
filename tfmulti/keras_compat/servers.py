"""Functions for parameter servers that use private names."""

from __future__ import annotations

import types
from collections.abc import Callable

import keras
import tensorflow as tf


def place_variables(
    strategy: tf.distribute.Strategy,
    bytes_on_servers: list[int],
    fill: Callable[[tf.Variable], None],
) -> None:
    """Makes a strategy create each variable on the server that has the fewest bytes so far.

    TensorFlow takes the servers in turn: with a large table and many small variables, one server
    would hold nearly everything.

    Args:
        strategy: A `tf.distribute.ParameterServerStrategy`.
        bytes_on_servers: The bytes on each server, which this updates.
        fill: Function of each new variable that may assign its initial values.
    """
    extended = strategy.extended

    def create(self, next_creator, **kwargs):
        server = bytes_on_servers.index(min(bytes_on_servers))
        self._variable_count = server
        variable = type(self)._create_variable_round_robin(self, next_creator, **kwargs)
        size = (variable.shape.num_elements() or 1) * (variable.dtype.size or 8)
        bytes_on_servers[server] += size
        fill(variable)
        return variable

    extended._create_variable_round_robin = types.MethodType(create, extended)


def build_model(model: keras.Model, batch) -> None:
    """Creates the variables of a model, its metrics and its optimizer, as `fit` does.

    Args:
        model: A compiled model.
        batch: A batch `(x, y)` or `(x, y, sample_weight)`.
    """
    model._symbolic_build(data_batch=batch)


def take_initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback has set when training began, and resets it."""
    epoch, model._initial_epoch = model._initial_epoch, None
    return epoch


def build_tables(original, build):
    """Creates large embeddings in parts, and makes servers look up their rows.

    Args:
        original: `Embedding.build`.
        build: Function of `original`, a layer and the shape of its inputs.
    """

    def build_layer(self, input_shape=None):
        return build(original, self, input_shape)

    return build_layer


def in_scope_of_servers(*_, **__) -> bool:
    """In the scope of our strategy for parameter servers."""
    return getattr(tf.distribute.get_strategy(), "has_parameter_servers", False)
