"""Copies the state of a training run to host memory, and restores it."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.checkpoint.generations import CheckpointError, Generation, load
from tfmulti.step import accumulation, local_steps, model_contents, slots

# The state of callbacks that stop training, lower the rate or keep the best weights.
_REMEMBERED = ("best", "best_epoch", "wait", "stopped_epoch", "cooldown_counter")
_BEST_WEIGHTS = "best_weights"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A copy of a run's state in host memory.

    Attributes:
        tensors: Values of variables and arrays, by name.
        state: Everything else, as JSON.
    """

    tensors: dict[str, np.ndarray]
    state: dict


def take_snapshot(model: keras.Model, callbacks: Sequence, *, metrics: bool) -> Snapshot:
    """Copies weights, optimizers, random states and the state of callbacks.

    Every worker must call it: reading a metric that is summed over replicas is a collective.

    Args:
        model: The model.
        callbacks: The callbacks of this `fit`.
        metrics: Whether to copy the metrics' states, which matter only within an epoch.
    """
    local_steps.average_weights(model)
    accumulation.settle(model, model_contents.optimizers_of(model, nested=True))
    variables = named_variables(model)
    if metrics:
        variables |= metric_variables(model)
    tensors, writes = {}, topology.is_chief(model.distribute_strategy)
    for name, variable in variables.items():
        value = _value_of(variable)
        # What other workers keep a part of needs memory on the chief alone, which writes it.
        if writes or getattr(variable, "has_whole", True):
            tensors[name] = value
    remembered = []
    for number, callback in enumerate(callbacks):
        values = {n: getattr(callback, n) for n in _REMEMBERED if hasattr(callback, n)}
        values = {n: _plain(v) for n, v in values.items() if _is_json(_plain(v))}
        remembered.append([type(callback).__name__, values])
        for index, weights in enumerate(_best_weights(callback)):
            tensors[f"callback/{number}/{index:06d}"] = weights
    state = {"callbacks": remembered, "random": _random_states()}
    return Snapshot(tensors, state | {"optimizers": _what_optimizers_update(model)})


def _is_here(variable) -> bool:
    """Whether a variable's value is on this worker; a slot of sharded state is on one alone."""
    return getattr(variable, "is_here", True)


def _value_of(variable) -> np.ndarray:
    if hasattr(variable, "is_here"):
        with slots.gathering():
            return variable.numpy()
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _plain(value):
    """Returns a scalar as a Python number, a copy of a collection, anything else unchanged."""
    if isinstance(value, dict | list):
        return copy.deepcopy(value)
    if isinstance(value, bool | str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _is_json(value) -> bool:
    """Whether a checkpoint preserves a value; a callback's value can be anything."""
    try:
        return value != value or json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        return False


def _best_weights(callback) -> list[np.ndarray]:
    weights = getattr(callback, _BEST_WEIGHTS, None)
    arrays = [np.asarray(each) for each in weights] if isinstance(weights, list | tuple) else []
    # Not of what is no number.
    return arrays if all(array.dtype.kind not in "OSU" for array in arrays) else []


def named_variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Returns a model's and its optimizers' variables by names that do not change."""
    named = {f"model/{i:06d}": v for i, v in enumerate(model.variables)}
    skip = {id(v) for v in model.metrics_variables}
    named = {name: v for name, v in named.items() if id(v) not in skip}
    seen: set[int] = set()
    for number, optimizer in enumerate(model_contents.optimizers_of(model, nested=True)):
        for index, variable in enumerate(optimizer.variables):
            if id(variable) not in seen:
                named[f"optimizer/{number}/{index:06d}"] = variable
        # An outer optimizer may also list the variables of its inner optimizer.
        seen |= {id(variable) for variable in optimizer.variables}
    return named


def _what_optimizers_update(model) -> list:
    """Returns for each optimizer the indices in `model.variables` of its variables."""
    indices = {id(variable): index for index, variable in enumerate(model.variables)}
    built = []
    for optimizer in model_contents.optimizers_of(model, nested=True):
        updated = [indices.get(id(v)) for v in keras_compat.updated_variables(optimizer)]
        built.append(updated if optimizer.built and None not in updated else None)
    return built


def _build_optimizers(state, model) -> None:
    """Builds optimizers that Keras would build at their first update, to restore their state."""
    found = model_contents.optimizers_of(model, nested=True)
    for optimizer, updated in zip(found, state.get("optimizers", ())):
        if updated and not optimizer.built and max(updated) < len(model.variables):
            with model.distribute_strategy.scope():
                optimizer.build([model.variables[index] for index in updated])


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
    """Restores a run's state, except metrics' states, since Keras resets them.

    Args:
        generation: The result of `latest_good`.
        model: A model of the same layers, built, with its optimizers.
        callbacks: The callbacks of this `fit`, in the same order.

    Returns:
        The values in the checkpoint, by name.

    Raises:
        CheckpointError: If the model or an optimizer differs.
    """
    _build_optimizers(generation.state, model)
    variables = named_variables(model)
    _compare(generation, variables)
    tensors = load(generation, {n for n, variable in variables.items() if not _is_here(variable)})
    put_back(generation.state, tensors, model, callbacks)
    return tensors


def put_back(state: dict, tensors: dict, model: keras.Model, callbacks: Sequence) -> None:
    """Restores again the state that `restore` has read."""
    for name, variable in named_variables(model).items():
        if _is_here(variable):
            variable.assign(tensors[name])
    _restore_callbacks(state["callbacks"], tensors, callbacks)
    states = state["random"]
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    keras_compat.set_global_seed_state(states["keras"])


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
            whole = type(getattr(callback, name, None)) is int and isinstance(value, float)
            setattr(callback, name, int(value) if whole else value)
        start = f"callback/{number}/"
        weights = [tensors[n].numpy() for n in sorted(tensors) if n.startswith(start)]
        if weights:
            setattr(callback, _BEST_WEIGHTS, weights)
