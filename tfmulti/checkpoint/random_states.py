"""Random states: Python's, NumPy's, Keras's, and those of a model's TensorFlow generators."""

from __future__ import annotations

import random

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.verification.python_values import walk


def take(model: keras.Model) -> dict:
    """Returns this worker's random states, as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    generators = _generators_of(model).items()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "keras": keras_compat.global_seed_state(),
        "generators": {path: list(map(_read, _copies_of(each))) for path, each in generators},
    }


def put_back(states: dict, model: keras.Model) -> None:
    """Restores what `take` has returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    keras_compat.set_global_seed_state(states["keras"])
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
