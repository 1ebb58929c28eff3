"""Prints the peak memory and the step's seconds with and without checkpointed activations.

`python -m benchmarks.memory [--blocks 8] [--units 512] [--rows 4096] [--rounds 3]`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.launched import create_parser, median, spread

_PROCESS = """
import json, sys, time
import keras, numpy as np, tfmulti
from keras import layers
from tfmulti.runtime.memory import peak_of
blocks, units, rows, checkpointed, xla = map(int, sys.argv[1:])
def block():
    inner = [layers.Dense(units, activation="gelu") for _ in range(4)]
    return keras.Sequential([keras.Input((units,)), *inner])
model = keras.Sequential(
    [keras.Input((units,)), *[block() for _ in range(blocks)], layers.Dense(1)]
)
if checkpointed:
    tfmulti.checkpoint_activations(model)
model.compile("sgd", "mse", jit_compile=bool(xla))
x = np.zeros((rows, units), "float32")
model.train_on_batch(x[:32], x[:32, :1])
before, seconds = peak_of(), []
for _ in range(4):
    begin = time.perf_counter()
    model.train_on_batch(x, x[:, :1])
    seconds.append(time.perf_counter() - begin)
print(json.dumps({"bytes": peak_of() - before, "seconds": min(seconds[1:])}))
"""


def measure(blocks: int, units: int, rows: int, checkpointed: bool, xla: bool = False) -> dict:
    """Trains a few steps in a process of its own.

    Returns:
        `bytes`, by which the peak of its resident memory is above that of a small batch, and
        `seconds` of the quickest step.
    """
    arguments = [str(int(value)) for value in (blocks, units, rows, checkpointed, xla)]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures both in turn, and prints a table with their ratios."""
    given = create_parser(__doc__, blocks=8, units=512, rows=4096, rounds=3).parse_args()
    runs = [
        [measure(given.blocks, given.units, given.rows, on) for on in (False, True)]
        for _ in range(given.rounds)
    ]
    title = f"{given.blocks} blocks of four Dense({given.units}), {given.rows} rows"
    table = Table("activations", "peak, MB", "step, s", title=title)
    for on, name in enumerate(("kept", "checkpointed")):
        peak, seconds = median(runs, on, "bytes"), median(runs, on, "seconds")
        table.add_row(name, f"{peak / 1e6:.0f}", f"{seconds:.2f}")
    ratios = ([run[1][name] / run[0][name] for run in runs] for name in ("bytes", "seconds"))
    table.add_row("ratio, least to most", *map(spread, ratios))
    Console().print(table)


if __name__ == "__main__":
    main()
