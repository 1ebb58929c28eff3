"""Readers of devices that are not there, and a model to monitor."""

import keras
import numpy as np

import tfmulti


class Reader:
    """Tells what it was given; then the last of it for ever."""

    def __init__(self, *readings):
        self.readings, self.closed = list(readings), False

    def read(self):
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def close(self):
        self.closed = True


class Broken(Reader):
    def read(self):
        raise OSError("the device has gone")


def create_model(strategy, **settings):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, "mse", **settings)
    return model


def create_data(strategy, steps=4):
    data = np.zeros((4 * steps, 4), "float32"), np.zeros((4 * steps, 1), "float32")
    return tfmulti.distribute_train(data, strategy, 4, seed=0)
