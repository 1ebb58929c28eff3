"""A worker whose second call of `fit` fails on one worker alone, in a program that catches errors.

Its argument says how: one of `HOW`, or `"ends"`, where the program of worker 1 ends instead.
"""

import functools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tfmulti
from tfmulti import topology
from tfmulti.strategies import failed_calls

failed_calls.GRACE_S = 1.0


def fail_with(error, *_, **__):
    raise error


# The worker that fails, and the callback with which it does.
HOW = {
    "amid an epoch": (1, {"on_train_batch_begin": ValueError("a callback")}),
    "as an epoch ends": (0, {"on_epoch_end": ValueError("a callback")}),
    "interrupted": (1, {"on_train_batch_begin": KeyboardInterrupt()}),
}


def main(how):
    strategy = tfmulti.create_strategy("auto")
    worker = topology.worker_index(strategy)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((64, 4), "float32")
    for number in range(3):
        callbacks = []
        if number == 1 and how == "ends" and worker == 1:
            break
        if number == 1 and how in HOW and worker == HOW[how][0]:
            [(method, error)] = HOW[how][1].items()
            method_of_callback = {method: functools.partial(fail_with, error)}
            callbacks = [keras.callbacks.LambdaCallback(**method_of_callback)]
        try:
            model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
            print(f"{number}: ended")
        except (Exception, KeyboardInterrupt) as error:
            if how == "ends":
                raise
            print(f"{number}: {type(error).__name__}: {error}".splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1])
