"""The cost of computing each layer of a model, estimated from its weights or measured."""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
import warnings
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import owners

# Stands for an axis of an input that is not known before training, such as the length of a text.
_UNKNOWN_SIZE = 32
_RUNS = 5


def values_per_row(tensor) -> int:
    """Returns how many numbers a row of a tensor has; an unknown axis counts as one."""
    return math.prod(size or 1 for size in tensor.shape[1:])


def estimated_costs(model: keras.Model) -> list[float]:
    """Estimates the cost of each layer call of a model, in multiplications for one row.

    It assumes that a layer multiplies each of its weights once for each position of its output, as
    dense layers and convolutions do, or of its input, as recurrent layers do. An embedding's table
    costs nothing: it is looked up.

    Args:
        model: A built Functional or Sequential model.
    """
    layers, nodes = keras_compat.layers_of_nodes(model), keras_compat.nodes_of(model)
    return [_estimated(layer, *node) for layer, node in zip(layers, nodes)]


def _estimated(layer, inputs, outputs) -> float:
    is_recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    over = inputs[0] if is_recurrent else outputs[0]
    positions = math.prod(size or 1 for size in over.shape[1:-1])
    # A function of `keras.ops` is no layer, and has no weights.
    multiplies = isinstance(layer, keras.Layer) and not isinstance(layer, keras.layers.Embedding)
    weights = layer.count_params() if multiplies else 0
    return float(weights * positions + sum(map(values_per_row, outputs)))


def measured_costs(model: keras.Model, rows: int) -> list[float]:
    """Times each layer call of a model, forward and backward; a collective.

    Worker 0 times them for all workers. It creates one copy of a layer after another and drops each
    again, so it never holds the whole model.

    Args:
        model: A built Functional or Sequential model.
        rows: How many rows of zeros to time each layer on.

    Returns:
        Seconds for each layer call; the same on every worker.
    """
    strategy, seconds = model.distribute_strategy, np.zeros(len(keras_compat.nodes_of(model)))
    if topology.worker_index(strategy) == 0:
        # In the strategy's scope, all workers would create the layers.
        with _same_numbers_after():
            keras_compat.call_outside_scope(lambda: _time_all(model, rows, seconds))
    seconds = tf.constant(seconds)

    @tf.function(autograph=False)
    def add():
        return strategy.run(lambda: owners.all_reduce(strategy, seconds))

    return strategy.experimental_local_results(add())[0].numpy().tolist()


@contextlib.contextmanager
def _same_numbers_after() -> Iterator[None]:
    """Restores the states of random numbers: to create copies of layers draws their seeds."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with keras_compat.same_eager_numbers():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _time_all(model, rows, seconds):
    known: dict[str, float] = {}
    layers = keras_compat.layers_of_nodes(model)
    for place, (inputs, outputs) in enumerate(keras_compat.nodes_of(model)):
        try:
            part = keras_compat.part_of_calls(model, place, place + 1, inputs, outputs)
            key = _key_of(layers[place], inputs)
            if key not in known:
                copy = keras.models.clone_model(part, clone_function=_copy_of)
                known[key] = _time(copy, rows)
            seconds[place] = known[key]
        except Exception as error:
            warnings.warn(
                f"A layer could not be copied to time it. Received: {layers[place].name}: "
                f"{error} It counts as free; choose `stages` by name if it is not.",
                stacklevel=2,
            )


def _copy_of(layer):
    """Returns a copy with its own variables; a layer without any, as a `Lambda`, unchanged."""
    return type(layer).from_config(layer.get_config()) if layer.variables else layer


def _key_of(layer, inputs) -> str:
    """Returns a key that is the same for equal layers with inputs of equal shapes and dtypes."""
    config = layer.get_config() if isinstance(layer, keras.Layer) else {}
    config.pop("name", None)
    form = [type(layer).__name__, config, [(x.shape, x.dtype) for x in inputs]]
    return json.dumps(form, default=str)


def _time(part, rows) -> float:
    given = [
        tf.zeros([rows, *(size or _UNKNOWN_SIZE for size in x.shape[1:])], x.dtype)
        for x in part.inputs
    ]
    floats = [x for x in given if x.dtype.is_floating]

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            tape.watch(floats)
            results = part(given if len(given) > 1 else given[0], training=True)
            results = [x for x in keras.tree.flatten(results) if x.dtype.is_floating]
        weights = [v.value for v in part.trainable_variables]
        gradients = tape.gradient(results, [*floats, *weights]) if results else []
        gradients = tf.nest.flatten(gradients, expand_composites=True)
        # Computes everything, and copies nothing to the host.
        with tf.control_dependencies([x for x in [*gradients, *results] if x is not None]):
            return tf.constant(0)

    seconds = []
    for _ in range(1 + _RUNS):
        begin = time.perf_counter()
        run().numpy()
        # On a GPU that has only started the kernels.
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - begin)
    # The first run traces.
    return min(seconds[1:])
