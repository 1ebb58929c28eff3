"""Prints what it brings, and costs, that the next layer's weights are gathered ahead.

`python -m benchmarks.gathering_ahead [--layers 6] [--units 1024] [--rounds 3] [--seconds 0.05]`

Two workers train layers with sharded parameters over MPI: once as ever, and once so that a call
gathers when it begins, in pairs of runs. In the first table layers and MPI's calls sleep, each for
`--seconds`, in place of computing and of sending over a network, so that a machine with few cores
shows the order of things. In the second one they do neither.
"""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.launched import create_parser, median, run_on_workers, spread

_WORKER = """
import json, sys, time
import keras, numpy as np, tensorflow as tf, tfmulti
from benchmarks.launched import create_clock
from tfmulti.mpi.all_reduce import MpiAllReduce
from tfmulti.runtime.memory import peak_of
layers, units, seconds, is_ahead = json.loads(sys.argv[1])

def slowed(method):
    def run(*args):
        time.sleep(seconds)
        return method(*args)
    return run
if seconds:
    for name in ("_receive_shaped", "_reduce_to"):
        setattr(MpiAllReduce, name, slowed(getattr(MpiAllReduce, name)))

def sleep(x):
    y = tf.numpy_function(
        lambda value: (time.sleep(seconds), value)[1], [x], x.dtype, stateful=False
    )
    return tf.ensure_shape(y, x.shape)
@tf.custom_gradient
def wait(x):
    return sleep(x), sleep
class Sleeping(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], units))
    def call(self, x):
        return tf.tanh(wait(x @ self.kernel))
class Mean(keras.layers.Layer):
    def call(self, x):
        return tf.reduce_mean(x, axis=1, keepdims=True)

strategy = tfmulti.create_strategy("multi_worker", verify="never")
strategy.extended.gathers_ahead = is_ahead
with strategy.scope(), tfmulti.sharded_parameters():
    hidden = [
        Sleeping() if seconds else keras.layers.Dense(units, activation="tanh", use_bias=False)
        for _ in range(layers)
    ]
    model = keras.Sequential([keras.Input((units,)), *hidden, Mean()])
    model.compile(tfmulti.DistributedOptimizer("adam", shard="parameters"), "mse")
x = np.zeros((8 * 256, units), "float32")
clock = create_clock()
data = tfmulti.distribute_train((x, x[:, :1]), strategy, 256)
model.fit(data, epochs=1, verbose=0, callbacks=[clock])
print(json.dumps({"seconds": clock.seconds[2:], "bytes": peak_of()}))
"""


def predicted(layers: int, seconds: float, is_ahead: bool) -> float:
    """Returns the seconds of a step, where a layer and a call of MPI take the same time.

    A layer's call takes it once in the forward pass, and twice in the backward pass. It gathers
    before each, and has its gradient added behind the second.

    >>> predicted(8, 1.0, False), predicted(8, 1.0, True)
    (48.0, 28.0)
    """
    if not is_ahead:
        return 6 * layers * seconds
    # The first of each pass gathers for itself, and nothing computes beside the last sum.
    return ((1 + layers) + (1 + 2 * layers + 1) + 1) * seconds


def measure(layers: int, units: int, seconds: float, is_ahead: bool) -> dict:
    """Trains some steps on two workers.

    Returns:
        `seconds` of the step in the middle, of the slowest worker, and the largest peak of a
        worker's memory in `bytes`.
    """
    given = f"[{layers}, {units}, {seconds}, {str(is_ahead).lower()}]"
    seen = run_on_workers(["-c", _WORKER, given], 2, ["--mpi"])
    return {
        "seconds": max(statistics.median(each["seconds"]) for each in seen),
        "bytes": max(each["bytes"] for each in seen),
    }


def main() -> None:
    """Measures pairs of runs, and prints both tables."""
    parser = create_parser(__doc__, layers=6, units=1024, rounds=3, seconds=0.05)
    given = parser.parse_args()
    for seconds in (given.seconds, 0.0):
        runs = [
            {way: measure(given.layers, given.units, seconds, way) for way in ways}
            for ways in [(False, True), (True, False)] * given.rounds
        ][: given.rounds]
        Console(width=110).print(_table(given, seconds, runs))


def _table(given, seconds, runs) -> Table:
    does = f"layers and MPI sleep {seconds} s each" if seconds else "layers compute"
    title = f"{given.layers} layers of {given.units} x {given.units}; {does}"
    table = Table("gathered", "step, s", "predicted, s", "times", "peak, MB", title=title)
    for way in (False, True):
        ratios = [run[way]["seconds"] / run[False]["seconds"] for run in runs]
        more = [(run[way]["bytes"] - run[False]["bytes"]) / 1e6 for run in runs]
        table.add_row(
            "ahead" if way else "as needed",
            f"{median(runs, way, 'seconds'):.3f}",
            f"{predicted(given.layers, seconds, way):.3f}" if seconds else "",
            spread(ratios),
            f"{median(runs, way, 'bytes') / 1e6:.0f}"
            + (f" ({spread(more, '+.0f')})" if way else ""),
        )
    return table


if __name__ == "__main__":
    main()
