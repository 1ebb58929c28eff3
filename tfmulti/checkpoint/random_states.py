"""Random states: Python's, NumPy's, Keras's, and those of a model's TensorFlow generators."""

from __future__ import annotations

import hashlib
import json
import random

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.strategies import coordination
from tfmulti.verification.python_values import walk


def take(model: keras.Model) -> dict:
    """Returns the random states, as JSON; every worker must call it.

    It has those of this worker; and those of each worker, by its index, if they differ.
    """
    strategy, own = model.distribute_strategy, _of_this_worker(model)
    text = json.dumps(own).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:3], "big")
    least, most = coordination.min_and_max(strategy, number)
    if least == most:
        return {"random": own}
    mine, workers = topology.worker_index(strategy), range(topology.num_workers(strategy))
    texts = [coordination.broadcast(strategy, text if n == mine else None) for n in workers]
    return {"random": own, "random_of_workers": list(map(json.loads, texts))}


def put_back(state: dict, model: keras.Model) -> None:
    """Restores what `take` has returned; on another number of workers, all get the chief's."""
    strategy = model.distribute_strategy
    of_workers = state.get("random_of_workers", [])
    if len(of_workers) == topology.num_workers(strategy):
        _put_back(of_workers[topology.worker_index(strategy)], model)
    else:
        _put_back(state["random"], model)


def _of_this_worker(model) -> dict:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    generators = _generators_of(model).items()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "keras": keras_compat.global_seed_state(),
        "keras_is_seeded": keras_compat.has_seeded(model.distribute_strategy),
        "generators": {path: list(map(_read, _copies_of(each))) for path, each in generators},
    }


def _put_back(states, model):
    # First: Keras seeds its generator, where there is none yet, from Python's random numbers.
    keras_compat.set_global_seed_state(states["keras"])
    if states.get("keras_is_seeded", False):
        keras_compat.note_seeding(model.distribute_strategy)
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    # Earlier versions did not save them.
    saved = states.get("generators", {})
    for path, generator in _generators_of(model).items():
        values, copies = saved.get(path, []), _copies_of(generator)
        if values and len(values) != len(copies):
            # Of another number of replicas.
            values = values[:1] * len(copies)
        for copy, value in zip(copies, values):
            keras_compat.write_handle(copy.handle, np.array(value, np.int64))


def _generators_of(model) -> dict[str, tf.random.Generator]:
    """Returns the TensorFlow generators that a model and its objects hold, by their paths."""
    return {path: each for path, each in walk(model) if isinstance(each, tf.random.Generator)}


def _copies_of(generator) -> list[tf.Variable]:
    """Returns each local replica's state: it advances by the numbers that its rows need."""
    state = generator.state
    return list(getattr(state, "values", None) or (state,))


def _read(copy) -> list[int]:
    return keras_compat.read_handle(copy.handle).tolist()
