"""Prints how long the stages of a pipeline wait for each other, beside the theory.

`python -m benchmarks.pipeline [--stages 2 4] [--micro_batches 1 2 4 8] [--seconds 2] [--steps 8]`

Stages sleep in place of computing, so that a machine with few cores can have many; the time of a
step that they do not sleep is idle. Of s stages and m micro-batches it is (s - 1) / (m + s - 1).
`--rounds` pairs of runs follow, of a model that computes: in two stages, and in one process that
has the cores of both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.launched import create_parser, run_on_workers

_WORKER = ["-c", "from benchmarks import pipeline; pipeline.train()"]
_ROWS = 64
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


def predicted_idle(stages: int, micro_batches: int) -> float:
    """Returns what part of a step the stages of a pipeline wait for each other.

    >>> predicted_idle(2, 4)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)


def measured_idle(seen: Sequence[dict]) -> dict[str, float]:
    """Returns what part of a step the stages did not sleep.

    Args:
        seen: Of each stage `seconds` of its steps, and `busy`, how many of them it slept.

    Returns:
        `seconds` of a step, the median; and what part of it stages were idle on average: `fraction`
        of the median step, the `least` and the `most` of a step.

    >>> stage = {"seconds": [4.0, 2.0, 1.0], "busy": [1.0, 1.0, 1.0]}
    >>> measured_idle([stage, stage])
    {'seconds': 2.0, 'fraction': 0.5, 'least': 0.0, 'most': 0.75}
    """
    seconds = [max(each) for each in zip(*(stage["seconds"] for stage in seen))]
    busy = [statistics.fmean(each) for each in zip(*(stage["busy"] for stage in seen))]
    fractions = [1.0 - part / whole for part, whole in zip(busy, seconds)]
    median = statistics.median(seconds)
    fraction = 1.0 - statistics.median(busy) / median
    return dict(seconds=median, fraction=fraction, least=min(fractions), most=max(fractions))


def run(task: Task) -> dict[int, list[dict]]:
    """Returns by the number of micro-batches what each stage saw of its steps."""
    # With one worker there is no MPI.
    flags = ["--mpi"] if task.stages > 1 else []
    workers = run_on_workers([*_WORKER, json.dumps(dataclasses.asdict(task))], task.stages, flags)
    return {m: [worker[str(m)] for worker in workers] for m in task.micro_batches}


def idle_table(measured: dict[tuple[int, int], dict], seconds: float) -> Table:
    """Returns the table of stages that sleep.

    More is what a step takes beyond that of stages which wait for each other alone.

    Args:
        measured: What was measured, by stages and micro-batches.
        seconds: How long a stage sleeps in a step.
    """
    columns = ("stages", "parts", "step, s", "more, ms", "idle", "least to most", "theory")
    title = f"stages that sleep for {seconds:g} s of a step, by the number of micro-batches"
    table = Table(*columns, "off by", title=title)
    for (stages, micro_batches), idle in measured.items():
        theory = predicted_idle(stages, micro_batches)
        table.add_row(
            str(stages),
            str(micro_batches),
            f"{idle['seconds']:.3f}",
            f"{1e3 * (idle['seconds'] - seconds / (1.0 - theory)):.0f}",
            f"{idle['fraction']:.3f}",
            f"{idle['least']:.2f} to {idle['most']:.2f}",
            f"{theory:.3f}",
            f"{idle['fraction'] / theory - 1.0:+.1%}",
        )
    return table


def describe_ratios(ratios: Sequence[float]) -> str:
    """Returns the median of ratios, the least and the most, and the standard error of their mean.

    >>> describe_ratios([1.0, 1.2, 1.1, 1.3])
    '1.15 (1.00 to 1.30 in 4 pairs, standard error 0.06)'
    """
    text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} "
    text += f"in {len(ratios)} pair{'s' if len(ratios) > 1 else ''}"
    if len(ratios) > 1:
        text += f", standard error {statistics.stdev(ratios) / math.sqrt(len(ratios)):.2f}"
    return f"{text})"


def computing_ratios(task: Task, rounds: int) -> list[float]:
    """Returns, of pairs of runs, the seconds of a step of a pipeline over those of one process."""
    [micro_batches] = task.micro_batches
    alone = dataclasses.replace(task, stages=1, layers=task.layers * task.stages)
    ratios = []
    for number in range(rounds):
        # Each is the first as often as the other.
        pair = (task, alone) if number % 2 else (alone, task)
        seconds = {each.stages: measured_idle(run(each)[micro_batches])["seconds"] for each in pair}
        ratios.append(seconds[task.stages] / seconds[1])
    return ratios


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


def _measure_steps(task: Task, micro_batches: int, strategy) -> dict:
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


def train() -> None:
    """Trains, as a worker, the task that the command line has; prints a line of JSON."""
    import tfmulti

    task = Task(**json.loads(sys.argv[1]))
    strategy = tfmulti.create_strategy("multi_worker", verify="never")
    print(json.dumps({each: _measure_steps(task, each, strategy) for each in task.micro_batches}))


def main() -> None:
    """Measures, and prints."""
    parser = create_parser(__doc__, steps=8, rounds=4, layers=4, units=1024, rows=1024, seconds=2.0)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro_batches", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    measured, sleeping = {}, (tuple(given.micro_batches), given.steps, _ROWS, given.seconds)
    for stages in given.stages:
        for micro_batches, seen in run(Task(stages, *sleeping)).items():
            measured[stages, micro_batches] = measured_idle(seen)
    Console().print(idle_table(measured, given.seconds))
    if given.rounds:
        task = Task(2, (4,), given.steps, given.rows, 0.0, given.layers, given.units)
        ratios = describe_ratios(computing_ratios(task, given.rounds))
        print(f"step of 2 stages that compute, over that of one process on all cores: {ratios}")


if __name__ == "__main__":
    main()
