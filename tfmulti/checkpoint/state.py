"""What a training run is, at one moment: copied to the host, and put back."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.checkpoint.generations import CheckpointError, Generation, load

# What callbacks that stop training, lower the rate or keep the best remember.
_REMEMBERED = ("best", "best_epoch", "wait", "stopped_epoch", "cooldown_counter")
_BEST_WEIGHTS = "best_weights"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state in host memory.

    Attributes:
        tensors: Values of variables and arrays, by name.
        state: All else, as JSON.
    """

    tensors: dict[str, np.ndarray]
    state: dict


def take_snapshot(model: keras.Model, callbacks: Sequence, *, metrics: bool) -> Snapshot:
    """Copies weights, optimizers, random states and what callbacks remember.

    Every worker must call it: reading a metric that is summed over replicas is a collective.

    Args:
        model: The model.
        callbacks: The callbacks of this `fit`.
        metrics: Whether to copy the metrics' states, which matter within an epoch only.
    """
    variables = named_variables(model)
    if metrics:
        variables |= metric_variables(model)
    tensors = {name: np.asarray(keras.ops.convert_to_numpy(v)) for name, v in variables.items()}
    remembered = []
    for number, callback in enumerate(callbacks):
        values = {n: getattr(callback, n) for n in _REMEMBERED if hasattr(callback, n)}
        values = {n: None if v is None else float(v) for n, v in values.items()}
        remembered.append([type(callback).__name__, values])
        for index, weights in enumerate(getattr(callback, _BEST_WEIGHTS, None) or []):
            tensors[f"callback/{number}/{index:06d}"] = np.asarray(weights)
    return Snapshot(tensors, {"callbacks": remembered, "random": _random_states()})


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns a model's and its optimizers' variables by names that do not change."""
    named = {f"model/{i:06d}": v for i, v in enumerate(model.variables)}
    skip = {id(v) for v in model.metrics_variables}
    named = {name: v for name, v in named.items() if id(v) not in skip}
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    optimizers += [model.optimizer] if model.optimizer not in optimizers else []
    for number, optimizer in enumerate(o for o in optimizers if o is not None):
        for index, variable in enumerate(optimizer.variables):
            named[f"optimizer/{number}/{index:06d}"] = variable
    return named


def metric_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns the states of a model's metrics by names that do not change."""
    return {f"metric/{i:06d}": v for i, v in enumerate(model.metrics_variables)}


def _random_states() -> dict:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "keras": keras_compat.global_seed_state(),
    }


def restore(generation: Generation, model: keras.Model, callbacks: Sequence) -> dict:
    """Puts a run's state back; metrics' states are returned, since Keras resets them.

    Args:
        generation: What `latest_good` returned.
        model: A model of the same layers, built, with its optimizers.
        callbacks: The callbacks of this `fit`, in the same order.

    Returns:
        Values of metrics' states by name.

    Raises:
        CheckpointError: For a model or an optimizer that differs.
    """
    tensors, variables = load(generation), named_variables(model)
    _compare(generation, variables)
    for name, variable in variables.items():
        variable.assign(tensors[name])
    _restore_callbacks(generation.state["callbacks"], tensors, callbacks)
    states = generation.state["random"]
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    keras_compat.set_global_seed_state(states["keras"])
    return {name: value for name, value in tensors.items() if name.startswith("metric/")}


def _compare(generation, variables):
    kept = {n: v for n, v in generation.tensors.items() if n.startswith(("model/", "optimizer/"))}
    mine = {n: [tf.as_dtype(v.dtype).name, list(v.shape)] for n, v in variables.items()}
    differing = sorted(n for n in kept.keys() | mine.keys() if kept.get(n) != mine.get(n))
    if differing:
        name = differing[0]
        path = variables[name].path if name in variables else name
        raise CheckpointError(
            "A checkpoint must be of the same model and optimizer. "
            f"Received: {path} is {kept.get(name, 'not there')} in {generation.path}, "
            f"{mine.get(name, 'not there')} in this run. "
            "Train the same model, or give another folder."
        )


def _restore_callbacks(remembered, tensors, callbacks):
    for number, ((kind, values), callback) in enumerate(zip(remembered, callbacks)):
        if type(callback).__name__ != kind:
            continue
        for name, value in values.items():
            whole = isinstance(getattr(callback, name, None), int) and value is not None
            setattr(callback, name, int(value) if whole else value)
        start = f"callback/{number}/"
        weights = [tensors[n].numpy() for n in sorted(tensors) if n.startswith(start)]
        if weights:
            setattr(callback, _BEST_WEIGHTS, weights)
