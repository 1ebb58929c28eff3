"""A step that one worker alone cannot trace, or run: `python failing_step_worker.py CASE ...`."""

import itertools
import os
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfmulti
from tfmulti import topology

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import verification_cases as models


class FailingStep(models.CustomStep):
    """Fails on the second worker: in its nth trace, or in steps with so many rows.

    Args:
        fails_in_trace: The number of the trace, from 1; 0 for none.
        number_of_rows: The number of rows; 0 for none.
        fails_from: The trace from which all fail; 0 for none. Such an error is caught.
    """

    def __init__(self, fails_in_trace=0, number_of_rows=0, fails_from=0):
        super().__init__()
        # Not a number of the model: those are restored after verification.
        self.traces, self.fails_in_trace = itertools.count(1), fails_in_trace
        self.number_of_rows, self.fails_from = number_of_rows, fails_from

    def train_step(self, data):
        if topology.worker_index(self.distribute_strategy) == 1:
            trace = next(self.traces)
            if trace == self.fails_in_trace or 0 < self.fails_from <= trace:
                raise ValueError("not traced here")
            if self.number_of_rows:
                rows = tf.shape(data[0])[0]
                tf.debugging.assert_none_equal(rows, self.number_of_rows, message="not run here")
        return super().train_step(data)


def fit(strategy, **attributes):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = FailingStep(**attributes)
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, loss="mse")
    data = tfmulti.distribute_train(models.rows(), strategy, 8, seed=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = model.fit(data, verbose=0).history
    return history["own_loss"], [
        str(each.message) for each in told if "verified" in str(each.message)
    ]


def main(*cases):
    strategy = tfmulti.create_strategy("multi_worker", verify="always")
    for case in cases:
        attribute, _, number = case.partition("=")
        try:
            losses, told = fit(strategy, **{attribute: int(number)})
        except (RuntimeError, ValueError) as error:
            if attribute != "fails_from":
                raise
            losses, told = [], [" ".join(str(error).split())]
        print(case, len(losses), *told, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
