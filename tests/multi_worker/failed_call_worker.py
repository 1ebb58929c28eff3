"""A worker whose second call of `fit` fails on worker 1 alone, in a program that catches errors."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmulti
from tfmulti import topology
from tfmulti.strategies import failed_calls

failed_calls.GRACE_S = 1.0


class Failing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            raise ValueError("a callback of worker 1")


strategy = tfmulti.create_strategy("auto")
worker = topology.worker_index(strategy)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((64, 4), "float32")
for number in range(3):
    callbacks = [Failing()] if number == 1 and worker == 1 else []
    try:
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
        print(f"{number}: ended")
    except Exception as error:
        print(f"{number}: {type(error).__name__}: {error}".splitlines()[0])
