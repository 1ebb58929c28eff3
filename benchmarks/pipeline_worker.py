"""A worker of `benchmarks.pipeline`: trains a pipeline, and prints the seconds of its steps.

Its argument is a line of JSON with the fields of `Task`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time

WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """What workers train.

    Attributes:
        stages: The number of stages, one for each worker.
        micro_batches: The numbers of micro-batches, one after the other.
        steps: Steps that are measured of each.
        rows: Rows of a step over all workers.
        sleep_s: Seconds that a stage sleeps in a step, a third of them in the forward pass; 0 for
            stages that compute.
        layers: Dense layers of each stage.
        units: Width of the dense layers.
    """

    stages: int
    micro_batches: tuple[int, ...]
    steps: int
    rows: int
    sleep_s: float = 0.0
    layers: int = 1
    units: int = 8


class _Device:
    """Stands for a stage's device, which sleeps for one micro-batch at a time."""

    def __init__(self):
        self._one_at_a_time, self.busy = threading.Lock(), 0.0

    def sleep(self, seconds):
        with self._one_at_a_time:
            begin = time.perf_counter()
            time.sleep(seconds)
            self.busy += time.perf_counter() - begin

    def take_busy(self) -> float:
        """Returns the seconds that it has slept since the last call."""
        busy, self.busy = self.busy, 0.0
        return busy


def _create_sleeping_layer(device: _Device, forward_s: float, backward_s: float, name: str):
    """Returns a layer that returns what it is given, after so many seconds for each row."""
    import keras
    import tensorflow as tf

    def slept(tensor, seconds):
        def sleep(array):
            device.sleep(seconds * len(array))
            return array

        # As operations that compute, it has no place in an order but by what it takes: a stateful
        # one would be put into the order of the program. It is not left out, since its result is
        # taken, and not made one with another, since no two take the same.
        result = tf.numpy_function(sleep, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(result, tensor.shape)

    @tf.custom_gradient
    def sleeps(tensor):
        return slept(tensor, forward_s), lambda upstream: slept(upstream, backward_s)

    class Sleeping(keras.layers.Layer):
        def call(self, inputs):
            return sleeps(inputs)

    return Sleeping(name=name)


def _create_model(task: Task, micro_batches: int, strategy, device: _Device):
    import keras

    import tfmulti

    a_row = task.sleep_s / task.rows
    layers = []
    with strategy.scope(), tfmulti.sharded_parameters():
        for stage in range(task.stages):
            for place in range(task.layers):
                name = f"stage_{stage}_{place}"
                layers.append(keras.layers.Dense(task.units, activation="tanh", name=name))
            if task.sleep_s:
                # Behind weights, so that the backward pass of the first stage comes through it.
                name = f"sleep_{stage}"
                layers.append(_create_sleeping_layer(device, a_row / 3, a_row * 2 / 3, name))
        model = keras.Sequential([keras.Input((task.units,)), *layers])
        starts = [f"stage_{stage}_0" for stage in range(1, task.stages)]
        model = tfmulti.pipeline(model, starts, micro_batches)
        model.compile(tfmulti.DistributedOptimizer("sgd", shard="parameters"), "mse")
    return model


def _train(task: Task, micro_batches: int, strategy) -> dict:
    """Trains, and returns the seconds of each step, and how many of them this worker slept."""
    import keras
    import numpy as np

    import tfmulti

    device, ends, busy = _Device(), [], []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.perf_counter())
            busy.append(device.take_busy())

    number = WARM_UP_STEPS + task.steps
    rows = np.random.default_rng(0).normal(size=(number * task.rows, task.units)).astype("float32")
    model = _create_model(task, micro_batches, strategy, device)
    data = tfmulti.distribute_train((rows, rows), strategy, task.rows)
    model.fit(data, epochs=1, verbose=0, callbacks=[Clock()])
    seconds = [end - begin for begin, end in zip(ends[:-1], ends[1:])]
    return {"seconds": seconds[WARM_UP_STEPS - 1 :], "busy": busy[WARM_UP_STEPS:]}


def main() -> None:
    """Trains what the command line names, and prints a line of JSON."""
    import tfmulti

    task = Task(**json.loads(sys.argv[1]))
    strategy = tfmulti.create_strategy("multi_worker", verify="never")
    print(json.dumps({each: _train(task, each, strategy) for each in task.micro_batches}))


if __name__ == "__main__":
    main()
