"""Models and data as users have them, each trained, evaluated and asked for predictions.

The same cases run in one process under several strategies and in the workers of a cluster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmulti

NUM_CLASSES = 3
WORDS = ("ash", "birch", "cedar", "elm", "fir", "larch", "oak")
PATHS = ("arrays", "distributed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A compiled model that is not yet built, its data, and what is asked of `fit`.

    Attributes:
        create_model: Function of the optimizer that returns the compiled model.
        load: Function of the number of rows that returns `(x, y)`.
        num_rows: Rows to train on.
        batch_size: The global batch size.
        weighted: Whether the rows have sample weights.
        fit: More arguments of `fit`.
    """

    create_model: Callable
    load: Callable
    num_rows: int
    batch_size: int
    weighted: bool = False
    fit: dict = dataclasses.field(default_factory=dict)


def features(num_rows):
    return np.random.default_rng(num_rows).normal(size=(num_rows, 5)).astype("float32")


def labels(num_rows):
    return np.random.default_rng(num_rows + 1).integers(0, NUM_CLASSES, num_rows)


def words(shape):
    return np.random.default_rng(shape[0] + 2).choice(WORDS, shape).astype(object)


def plain(num_rows):
    return features(num_rows), labels(num_rows)


def pair_of_dicts(num_rows):
    x = {"left": features(num_rows), "right": features(num_rows)[:, :2]}
    return x, {"kind": labels(num_rows), "size": features(num_rows)[:, :1]}


def pair_of_tuples(num_rows):
    x = (features(num_rows), features(num_rows)[:, ::-1].copy())
    return x, (labels(num_rows), features(num_rows)[:, :1])


def words_only(num_rows):
    return tf.constant(words((num_rows, 2))), labels(num_rows)


def words_and_numbers(num_rows):
    return {"word": words((num_rows,)), "number": features(num_rows)}, labels(num_rows)


def sequential(optimizer):
    """Not built: its first layer does not know its inputs."""
    model = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(NUM_CLASSES, "softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def functional(optimizer):
    left, right = keras.Input((5,), name="left"), keras.Input((2,), name="right")
    x = layers.concatenate([layers.Dense(4, "relu")(left), layers.Dense(3, "tanh")(right)])
    kind = layers.Dense(NUM_CLASSES, "softmax", name="kind")(x)
    size = layers.Dense(1, kernel_regularizer="l2", name="size")(x)
    model = keras.Model({"left": left, "right": right}, {"kind": kind, "size": size})
    model.compile(
        optimizer,
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


class TwoHeads(keras.Model):
    """Takes a tuple and gives a tuple."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(4, "relu"), layers.Dense(4, "relu")
        self.kind, self.size = layers.Dense(NUM_CLASSES), layers.Dense(1)

    def call(self, inputs, training=False):
        left, right = inputs
        x = self.left(left) + self.right(right)
        return self.kind(x), self.size(x)


def subclassed(optimizer):
    model = TwoHeads()
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=(entropy, "mse"), steps_per_execution=2)
    return model


def string_lookup(optimizer):
    inputs = keras.Input((2,), dtype="string")
    x = layers.StringLookup(vocabulary=list(WORDS[:5]))(inputs)
    x = layers.Flatten()(layers.Embedding(8, 4)(x))
    model = keras.Model(inputs, layers.Dense(NUM_CLASSES, "softmax")(x))
    model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


class HashedWords(keras.Model):
    """Hashes a string by itself."""

    def __init__(self):
        super().__init__()
        self.bucket = layers.Hashing(num_bins=6)
        self.embed = layers.Embedding(6, 4)
        self.head = layers.Dense(NUM_CLASSES, "softmax")

    def call(self, inputs):
        embedded = self.embed(self.bucket(inputs["word"]))
        return self.head(keras.ops.concatenate([embedded, inputs["number"]], axis=-1))


def hashing(optimizer):
    model = HashedWords()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


CASES = {
    "sequential": Case(sequential, plain, 43, 16, fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "functional": Case(functional, pair_of_dicts, 45, 15),
    "subclassed": Case(subclassed, pair_of_tuples, 41, 8),
    "string_lookup": Case(string_lookup, words_only, 15, 15, weighted=True),
    "hashing": Case(hashing, words_and_numbers, 16, 16),
}


def run_case(name: str, strategy, path: str) -> dict[str, np.ndarray]:
    """Trains two epochs with validation, evaluates and predicts.

    Args:
        name: Key of `CASES`.
        strategy: The strategy to make the model in.
        path: `"arrays"` gives arrays to stock Keras, `"distributed"` the datasets of
            `distribute_train` and `distribute_eval`.

    Returns:
        Arrays by name: `weight/NUMBER`, `history/METRIC`, `evaluate/METRIC` and
        `predict/NUMBER`.
    """
    case = CASES[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.create_model(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    train, test = case.load(case.num_rows), case.load(11)
    if case.weighted:
        train = (*train, np.linspace(0.5, 2.0, case.num_rows, dtype="float32"))
    if path == "arrays":
        x, y, weights = (*train, None)[:3]
        sizes = {"batch_size": case.batch_size, "verbose": 0}
        data = {"x": x, "y": y, "sample_weight": weights, "validation_data": test}
        history = model.fit(**data, epochs=2, shuffle=False, **sizes, **case.fit)
        metrics = model.evaluate(*test, return_dict=True, **sizes)
        predictions = model.predict(x, **sizes)
    else:
        size = case.batch_size
        data = tfmulti.distribute_train(train, strategy, size, seed=3)
        test = tfmulti.distribute_eval(test, strategy, size)
        history = model.fit(data, validation_data=test, epochs=2, verbose=0, **case.fit)
        metrics = model.evaluate(test, return_dict=True, verbose=0)
        rows = tfmulti.distribute_eval(train[:2], strategy, size)
        predictions = model.predict(rows, verbose=0)
    arrays = {f"weight/{i}": weight.numpy() for i, weight in enumerate(model.weights)}
    arrays |= {f"history/{key}": np.array(value) for key, value in history.history.items()}
    arrays |= {f"evaluate/{key}": np.array(value) for key, value in metrics.items()}
    leaves = keras.tree.flatten(predictions)
    return arrays | {f"predict/{i}": value for i, value in enumerate(leaves)}


@functools.cache
def on_one_device(name: str, path: str) -> dict[str, np.ndarray]:
    """Returns what `run_case` gives on one device, computed once."""
    return run_case(name, tfmulti.create_strategy("one_device", devices=["CPU:0"]), path)


def assert_same(actual, expected, tolerance=1e-6):
    """Raises AssertionError unless both hold the same names and, nearly, the same numbers."""
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        np.testing.assert_allclose(
            actual[name], value, rtol=tolerance, atol=tolerance, err_msg=name
        )
