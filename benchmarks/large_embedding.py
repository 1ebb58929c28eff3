"""Prints the memory of parameter servers that train an embedding too large for any one of them.

`python -m benchmarks.large_embedding [--rows 16000000] [--columns 64] [--num_ps 2] [--steps 10]`

Memory is the peak of each process's resident memory, as the kernel counts it. The worker
holds no table: what it needs, a process with TensorFlow needs without one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.launched import create_parser
from tfmulti.runtime import memory, processes

OPTIMIZERS = ("sgd", "adagrad")
_POLL_S = 0.02
_PROGRAM = """
import json, sys
import keras, numpy as np, tensorflow as tf, tfmulti
rows, columns, steps, optimizer = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
print("ready", flush=True)
strategy = tfmulti.create_strategy("parameter_server")
with strategy.scope():
    table = keras.layers.Embedding(rows, columns, name="table")
    layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,), dtype="int64"), *layers])
    optimizer = keras.optimizers.get({"class_name": optimizer, "config": {"learning_rate": 0.5}})
    model.compile(optimizer, "mse")
random = np.random.default_rng(0)
ids = random.integers(0, rows, (32 * steps, 8))
parts = table.embeddings.parts
edges = np.cumsum([0, *(part.shape[0] for part in parts)])
mine = [np.unique(ids[(ids >= a) & (ids < b)]) - a for a, b in zip(edges, edges[1:])]
def look_up():
    return [tf.gather(part.value, rows).numpy() for part, rows in zip(parts, mine)]
before = look_up()
history = tfmulti.train_async(
    model, (ids, np.ones((len(ids), 1), "float32")), batch_size=32, epochs=2, seed=0, verbose=0
)
trained = [float(np.mean((a != b).all(1))) for a, b in zip(before, look_up())]
slots = [v for v in model.optimizer.variables if len(v.shape) and v.shape[0] in np.diff(edges)]
def server(variable):
    return tf.DeviceSpec.from_string(variable.value.device).task
print(json.dumps({
    "parts": [[part.shape[0], server(part)] for part in parts],
    "slots": [[slot.shape[0], server(slot)] for slot in slots],
    "trained": trained,
    "loss": history.history["loss"],
    "table": rows * columns * 4,
}), flush=True)
"""


def measure(rows: int, columns: int, num_ps: int, steps: int, optimizer: str) -> dict:
    """Trains two epochs with a chief, one worker and several servers of this machine.

    Returns:
        What the chief has seen: `table`, the table's bytes; `parts` and `slots`, the rows of each
        and its server; `trained`, of the rows that were looked up on each server the part that
        has changed; `loss` of each epoch. And `peak`, the peak of each process's resident memory,
        in bytes, by its name.

    Raises:
        RuntimeError: Where a process fails.
    """
    names = ["chief", "worker 0", *(f"ps {index}" for index in range(num_ps))]
    command = [sys.executable, "-c", _PROGRAM, *map(str, (rows, columns, steps, optimizer))]
    started: dict[str, subprocess.Popen] = {}
    with contextlib.ExitStack() as stack:
        for name, config in zip(names, processes.tf_configs(1, num_ps)):
            env = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
            started[name] = stack.enter_context(process)
            stack.callback(process.kill)
        peak: dict[str, int] = {}
        while any(each.poll() is None for each in started.values()):
            for name, process in started.items():
                peak[name] = max(peak.get(name, 0), memory.peak_of(process.pid))
            failed = [name for name, each in started.items() if each.poll()]
            if failed:
                raise RuntimeError(
                    "All tasks must end with 0. "
                    f"Received: {failed[0]} ended with {started[failed[0]].returncode}. "
                    "Look at what it has written above."
                )
            time.sleep(_POLL_S)
        found = json.loads(started["chief"].stdout.read().splitlines()[-1])
    return {**found, "peak": peak}


def main() -> None:
    """Trains, and prints a table of the processes."""
    parser = create_parser(__doc__, rows=16_000_000, columns=64, num_ps=2, steps=10)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    given = parser.parse_args()
    found = measure(given.rows, given.columns, given.num_ps, given.steps, given.optimizer)
    title = (
        f"A table of {found['table'] / 1e6:,.0f} MB, {given.optimizer}; "
        f"loss {found['loss'][0]:.2g}, then {found['loss'][-1]:.2g}"
    )
    columns = ("process", "rows of the table", "rows of slots", "changed, of those looked up")
    table = Table(*columns, "peak, MB", "peak / table", title=title)
    for name, peak in found["peak"].items():
        cells = ["", "", ""]
        if name.startswith("ps"):
            number = int(name.split()[1])
            cells = [
                f"{sum(rows for rows, server in found[kind] if server == number):,}"
                for kind in ("parts", "slots")
            ]
            cells.append(f"{found['trained'][number]:.1%}")
        table.add_row(name, *cells, f"{peak / 1e6:,.0f}", f"{peak / found['table']:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
