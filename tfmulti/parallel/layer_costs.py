"""What each layer of a model costs to compute: estimated from its weights, or timed."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import owners

# A size of an input that is not known before training, such as the length of a text.
_UNKNOWN_SIZE = 32
_RUNS = 5


def numbers_of(tensor) -> int:
    """Returns how many numbers a row of a tensor has; a size that is not known counts as one."""
    return math.prod(size or 1 for size in tensor.shape[1:])


def estimated_costs(model: keras.Model) -> list[float]:
    """Returns an estimate of what each call of a model costs, in multiplications for one row.

    A layer is taken to multiply each of its weights once for each position of its output, as
    dense layers and convolutions do; a table is looked up.

    Args:
        model: A built Functional or Sequential model.
    """
    layers, nodes = keras_compat.layers_of_nodes(model), keras_compat.nodes_of(model)
    return [_estimated(layer, outputs) for layer, (_, outputs) in zip(layers, nodes)]


def _estimated(layer, outputs) -> float:
    positions = math.prod(size or 1 for size in outputs[0].shape[1:-1])
    # `keras.ops` have no weights, and a table's are looked up.
    is_used = isinstance(layer, keras.Layer) and not isinstance(layer, keras.layers.Embedding)
    weights = layer.count_params() if is_used else 0
    return float(weights * positions + sum(map(numbers_of, outputs)))


def measured_costs(model: keras.Model, rows: int) -> list[float]:
    """Returns how long each call of a model takes, forward and backward; a collective.

    Worker 0 times them for all. It makes each layer anew, by itself, and drops it, so that it
    never has the whole model.

    Args:
        model: A built Functional or Sequential model.
        rows: The rows of zeros that each layer is timed on.

    Returns:
        Seconds for each call; the same on every worker.
    """
    strategy, seconds = model.distribute_strategy, np.zeros(len(keras_compat.nodes_of(model)))
    if topology.worker_index(strategy) == 0:
        # In this thread the strategy would create the layers on all workers.
        thread = threading.Thread(target=lambda: _time_all(model, rows, seconds))
        thread.start()
        thread.join()
    seconds = tf.constant(seconds)

    @tf.function(autograph=False)
    def add():
        return strategy.run(lambda: owners.all_reduce(strategy, seconds))

    return strategy.experimental_local_results(add())[0].numpy().tolist()


def _time_all(model, rows, seconds):
    known: dict[str, float] = {}
    layers = keras_compat.layers_of_nodes(model)
    for place, (inputs, outputs) in enumerate(keras_compat.nodes_of(model)):
        try:
            part = keras_compat.part_of_calls(model, place, place + 1, inputs, outputs)
            key = _form(layers[place], inputs)
            if key not in known:
                again = keras.models.clone_model(part, clone_function=_made_anew)
                known[key] = _time(again, rows)
            seconds[place] = known[key]
        except Exception as error:
            warnings.warn(
                f"A layer could not be made anew to be timed. Received: {layers[place].name}: "
                f"{error} It counts as free; choose `stages` by name if it is not.",
                stacklevel=2,
            )


def _made_anew(layer):
    """Returns an equal layer with variables of its own; the layer if it has none, as a `Lambda`."""
    return type(layer).from_config(layer.get_config()) if layer.variables else layer


def _form(layer, inputs) -> str:
    """Returns a key that is the same for equal layers with equal inputs."""
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
        found = tape.gradient(results, [*floats, *weights]) if results else []
        kept = [x for x in tf.nest.flatten(found, expand_composites=True) if x is not None]
        # All is needed, and nothing is copied.
        with tf.control_dependencies([*kept, *results]):
            return tf.constant(0)

    taken = []
    for _ in range(1 + _RUNS):
        begin = time.perf_counter()
        run().numpy()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
