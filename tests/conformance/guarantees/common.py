"""Small models and data that many guarantees share."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from conformance.guarantee import TOLD, Guarantee

NUM_CLASSES = 3
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
# Before, Keras adds what an activity regularizer gives, a sum over rows, without dividing it.
OF_ACTIVITY = {} if KERAS >= (3, 14) else {"must": TOLD}


def random(num_rows, salt=0):
    """Returns a generator whose numbers depend on nothing else."""
    return np.random.RandomState(num_rows + 1000 * salt)


def features(num_rows, width=5, salt=0):
    """Returns normal numbers."""
    return random(num_rows, salt).normal(size=(num_rows, width)).astype("float32")


def labels(num_rows):
    """Returns classes."""
    return random(num_rows, 1).randint(0, NUM_CLASSES, num_rows)


def weights(num_rows):
    """Returns sample weights that differ, some of them 0."""
    values = random(num_rows, 2).uniform(0.2, 2.0, num_rows).astype("float32")
    values[::5] = 0
    return values


def plain(num_rows):
    """Returns features and classes."""
    return features(num_rows), labels(num_rows)


def weighted(num_rows):
    """Returns features, classes and weights."""
    return features(num_rows), labels(num_rows), weights(num_rows)


def numbers(num_rows):
    """Returns features and one number to predict."""
    return features(num_rows), features(num_rows, 1, salt=3)


def guarantee(name, create, data=numbers, **settings):
    """Returns a guarantee with numbers to predict, and a last batch that is short."""
    return Guarantee(name, create, data=data, **{"num_rows": 43, **settings})


def images(num_rows):
    """Returns small images and classes."""
    values = random(num_rows, 4).normal(size=(num_rows, 6, 6, 2)).astype("float32")
    return values, labels(num_rows)


def tokens(num_rows):
    """Returns sequences that end in zeros, and classes."""
    values = random(num_rows, 5).randint(1, 9, (num_rows, 6))
    values[np.arange(6) >= random(num_rows, 6).randint(1, 7, num_rows)[:, None]] = 0
    return values, labels(num_rows)


def tagged(num_rows):
    """Returns sequences that end in zeros, and a class for each of their tokens."""
    return tokens(num_rows)[0], random(num_rows, 7).randint(0, NUM_CLASSES, (num_rows, 6))


def sgd():
    """The optimizer where a guarantee is not about optimizers."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def hidden():
    """A smooth layer, which does not magnify rounding as a kink would."""
    return layers.Dense(6, "tanh")


def entropy(**settings):
    """The loss of `labels`."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def classifier(optimizer=sgd, body=(hidden,), shape=(5,), loss=entropy, **compiled):
    """Returns a function of `wrap` that makes a compiled classifier with an L2 penalty.

    Args:
        optimizer: Function that makes the optimizer.
        body: Functions that make the layers before the last.
        shape: The shape of a row.
        loss: Function that makes the loss.
        **compiled: More arguments of `compile`.
    """

    def create(wrap):
        last = layers.Dense(NUM_CLASSES, kernel_regularizer=keras.regularizers.L2(0.01))
        model = keras.Sequential([keras.Input(shape), *(make() for make in body), last])
        settings = {"weighted_metrics": ["accuracy"], **compiled}
        model.compile(wrap(optimizer()), loss(), **settings)
        return model

    return create


def regressor(optimizer=sgd, loss="mse", **compiled):
    """Returns a function of `wrap` that makes a compiled model of one number."""

    def create(wrap):
        last = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01))
        model = keras.Sequential([keras.Input((5,)), hidden(), last])
        model.compile(wrap(optimizer()), loss, **compiled)
        return model

    return create
