"""Trains a promise's model at a place."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from conformance import feeds


def train(promise, place) -> dict[str, np.ndarray]:
    """Trains, and returns arrays by name.

    Returns:
        `weight/NUMBER` and `optimizer/NUMBER` with one row for each local replica,
        `history/METRIC`, and, where the promise validates, `evaluate/METRIC` and `predict`.
    """
    keras.utils.clear_session()
    with dtype_policy(promise.policy):
        if promise.run is not None:
            return promise.run(promise, place)
        model = create(promise, place)
        if promise.own_seeds:
            keras.utils.set_random_seed(100 + place.worker)
        history = fit(model, promise, place)
        return results(model, place, history) | (
            evaluate(model, promise, place) if promise.validate else {}
        )


@contextlib.contextmanager
def dtype_policy(name):
    """Makes models under a dtype policy of Keras."""
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def create(promise, place):
    """Makes and compiles the model, with the same first weights everywhere."""
    keras.utils.set_random_seed(1)
    with place.scope():
        return promise.create(place.wrap)


def fit(model, promise, place, **settings) -> dict:
    """Trains the model; returns its history."""
    arguments = feeds.fit_arguments(promise, place)
    settings = {"epochs": promise.epochs, "verbose": 0, **promise.fit, **settings}
    return model.fit(**arguments, **settings).history


def evaluate(model, promise, place) -> dict[str, np.ndarray]:
    """Evaluates, and predicts the rows in their order."""
    rows = feeds.evaluation_rows(promise, place)
    sizes = {"batch_size": promise.batch_size} if isinstance(rows, tuple) else {}
    rows = {"x": rows[0], "y": rows[1]} if isinstance(rows, tuple) else {"x": rows}
    metrics = model.evaluate(**rows, **sizes, return_dict=True, verbose=0)
    predictions = model.predict(rows["x"], **sizes, verbose=0)
    arrays = {f"evaluate/{name}": np.array(value) for name, value in metrics.items()}
    return arrays | {"predict": predictions}


def results(model, place, history) -> dict[str, np.ndarray]:
    """Returns the weights and optimizers' variables of every local replica, and the history."""
    arrays = {f"history/{name}": np.array(values) for name, values in history.items()}
    for number, weight in enumerate(model.weights):
        arrays[f"weight/{number}"] = np.stack(place.local_values(weight))
    own = {n: v for n, v in vars(model).items() if isinstance(v, keras.optimizers.Optimizer)}
    # A model with optimizers of its own leaves idle the one that `compile()` gives it.
    compiled = own.pop("optimizer", None)
    optimizers = list(own.values()) or [compiled]
    for number, variable in enumerate(v for o in optimizers for v in o.variables):
        arrays[f"optimizer/{number}"] = np.stack(place.local_values(variable))
    return arrays
