"""Models and data that fail on one worker: named on the command line as faulty:FUNCTION."""

import json
import os

import keras
import numpy as np
import tensorflow as tf


def worker():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def rows(count=640):
    rng = np.random.RandomState(0)
    return rng.randn(count, 8).astype("float32"), rng.randint(0, 3, count)


def healthy():
    return rows(), rows(64)


def bad_record():
    """Raises in the data pipeline of worker 1."""
    x, y = rows()

    def examples():
        for number, pair in enumerate(zip(x, y)):
            if worker() == 1 and number == 300:
                raise ValueError("bad record 300")
            yield pair

    spec = (tf.TensorSpec([8], tf.float32), tf.TensorSpec([], tf.int64))
    data = tf.data.Dataset.from_generator(examples, output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(x))), rows(64)


def not_a_number():
    """One row is bad, in whichever replica batch it is."""
    x, y = rows()
    x[321] = np.nan
    return (x, y), rows(64)


def dense(train):
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(6, "relu"), keras.layers.Dense(3)]
    )


def wider_on_one(train):
    """Worker 1 builds another model."""
    layers = [keras.layers.Dense(6 + worker(), "relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])


def deeper_on_one(train):
    """Worker 1 has one more layer."""
    return deeper_where(worker() == 1)


def deeper_on_the_first(train):
    """Worker 0 has one more layer."""
    return deeper_where(worker() == 0)


def deeper_where(here):
    sizes = [6, 3, 3] if here else [6, 3]
    return keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(size) for size in sizes)])


class FailsInTheMidst(keras.layers.Layer):
    """Raises in the step of worker 1."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, x):
        def check(values):
            self.calls += 1
            if worker() == 1 and self.calls > 20:
                raise ValueError("this layer has had enough")
            return values

        y = tf.numpy_function(check, [x], tf.float32)
        return tf.ensure_shape(y, x.shape)


def failing(train):
    layers = [FailsInTheMidst(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])
