"""Trains a guarantee's model at a place."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from conformance import feeds
from conformance.compare import LATE


def train(guarantee, place) -> dict[str, np.ndarray]:
    """Trains, and returns arrays by name.

    Returns:
        `weight/NUMBER` and `optimizer/NUMBER` with one row for each local replica,
        `history/METRIC`, and, where it validates, `evaluate/METRIC` and `predict/OUTPUT`.
    """
    keras.utils.clear_session()
    if place.strategy is not None and not place.stock:
        place.strategy.on_difference = guarantee.on_difference
    with dtype_policy(guarantee.policy):
        if guarantee.run is not None:
            return guarantee.run(guarantee, place)
        model = create(guarantee, place)
        if guarantee.own_seeds:
            keras.utils.set_random_seed(100 + place.worker)
        history = fit(model, guarantee, place)
        return results(model, place, history) | (
            evaluate(model, guarantee, place) if guarantee.validate else {}
        )


def attempt(guarantee, place) -> dict[str, np.ndarray] | str:
    """Does the same; returns the text of an error that is raised."""
    try:
        return train(guarantee, place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def dtype_policy(name):
    """Makes models under a dtype policy of Keras."""
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def create(guarantee, place):
    """Makes and compiles the model, with the same first weights everywhere."""
    keras.utils.set_random_seed(1)
    with place.scope():
        return guarantee.create(place.wrap)


def fit(model, guarantee, place, **settings) -> dict:
    """Trains the model; returns its history."""
    arguments = feeds.fit_arguments(guarantee, place)
    settings = {"epochs": guarantee.epochs, "verbose": 0, **guarantee.fit, **settings}
    with told_in_time(model, place):
        return model.fit(**arguments, **settings).history


class Late(Exception):
    """An error that came when something was changed already."""

    def __str__(self):
        return LATE + super().__str__()


@contextlib.contextmanager
def told_in_time(model, place):
    """Marks an error that leaves other weights, state or counts of steps than it found."""
    before = _state(model, place)
    try:
        yield
    except (ValueError, RuntimeError) as error:
        after = _state(model, place)
        if all(np.array_equal(after.get(key), values) for key, values in before.items()):
            raise
        raise Late(f"{type(error).__name__}: {error}") from error


def _state(model, place) -> dict:
    # A callback may set the rate before the first step.
    variables = [
        each
        for optimizer in optimizers_of(model)
        for each in optimizer.variables
        if each.name != "learning_rate"
    ]
    return {id(each): _values(each, place) for each in [*model.variables, *variables]}


def _values(variable, place) -> list:
    """The values of a variable on this worker; none of what another worker holds."""
    if hasattr(variable, "is_here"):
        # Not above: where tfmulti must have no part, it is not imported.
        from tfmulti import keras_compat

        with keras_compat.held_values():
            return [np.array(variable.value)] if variable.is_here else []
    return place.local_values(variable)


def optimizers_of(model) -> list:
    """Returns the optimizers that a model holds: itself, in containers, in objects within."""
    found, seen = [], set()

    def look(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
            return
        if isinstance(value, dict):
            parts = value.values()
        elif isinstance(value, list | tuple):
            parts = value
        elif isinstance(value, keras.Model) or getattr(value, "holds_optimizers", False):
            parts = [each for name, each in vars(value).items() if not name.startswith("_")]
        else:
            return
        for part in parts:
            look(part)

    look(model)
    # A model with optimizers of its own may leave idle the one that `compile()` gives it.
    compiled = getattr(model, "optimizer", None)
    others = [each for each in found if each is not compiled]
    idle = compiled is None or (others and not int(compiled.iterations.numpy()))
    return others if idle else [*others, compiled]


def evaluate(model, guarantee, place) -> dict[str, np.ndarray]:
    """Evaluates, and predicts the rows in their order."""
    rows = feeds.evaluation_rows(guarantee, place)
    sizes = {"batch_size": guarantee.batch_size} if isinstance(rows, tuple) else {}
    names = ("x", "y", "sample_weight")
    rows = dict(zip(names, rows)) if isinstance(rows, tuple) else {"x": rows}
    metrics = model.evaluate(**rows, **sizes, return_dict=True, verbose=0)
    predictions = model.predict(rows["x"], **sizes, verbose=0)
    arrays = {f"evaluate/{name}": np.array(value) for name, value in metrics.items()}
    outputs = keras.tree.flatten(predictions)
    return arrays | {f"predict/{number}": output for number, output in enumerate(outputs)}


def results(model, place, history) -> dict[str, np.ndarray]:
    """Returns the weights and optimizers' variables of every local replica, and the history."""
    arrays = {f"history/{name}": np.array(values) for name, values in history.items()}
    for number, weight in enumerate(model.weights):
        arrays[f"weight/{number}"] = np.stack(_values_of(weight, place))
    variables = [each for optimizer in optimizers_of(model) for each in optimizer.variables]
    for number, variable in enumerate(variables):
        arrays[f"optimizer/{number}"] = np.stack(_values_of(variable, place))
    return arrays


def _values_of(variable, place):
    # What is sharded is gathered when `fit` ends.
    sharded = hasattr(variable, "is_here")
    return [np.array(variable)] if sharded else place.local_values(variable)
