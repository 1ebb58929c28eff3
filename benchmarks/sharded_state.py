"""Prints memory, seconds and bytes sent of a step with and without sharded optimizer state.

`python -m benchmarks.sharded_state [--layers 12] [--units 2048] [--num_workers 2] [--rounds 3]`

Bytes are those that the loopback device counts, in runs of their own in which MPI uses TCP; other
programs that use it meanwhile are counted too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

_WORKER = """
import json, sys, time
import keras, numpy as np, tfmulti
layers, units, shard = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if sys.argv[3:] else None
strategy = tfmulti.create_strategy("multi_worker", verify="never")
class Clock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds, self.sent = [], []
    def on_train_batch_begin(self, batch, logs=None):
        self.begin = time.perf_counter()
    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self.begin)
        with open("/sys/class/net/lo/statistics/tx_bytes") as count:
            self.sent.append(int(count.read()))
with strategy.scope():
    hidden = [keras.layers.Dense(units, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((units,)), *hidden, keras.layers.Dense(1)])
    model.compile(tfmulti.DistributedOptimizer("adam", shard=shard), "mse")
x = np.zeros((160, units), "float32")
clock = Clock()
data = tfmulti.distribute_train((x, x[:, :1]), strategy, 16)
model.fit(data, epochs=1, verbose=0, callbacks=[clock])
with open("/proc/self/status") as status:
    [peak] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
slots = 2 * 4 * model.count_params()
sent = (clock.sent[8] - clock.sent[2]) / 6
print(json.dumps(
    {"bytes": peak, "seconds": sorted(clock.seconds)[4], "slots": slots, "sent": sent}
))
"""


# Intel's MPI, which the extra `mpi` installs, without shared memory.
_TCP = {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"}


def predicted_bytes(slots: int, num_workers: int, sharded: bool, communication: str) -> float:
    """Returns the bytes that all workers together send in a step, for Adam's float32 slots.

    An all-reduce sends each gradient twice to every worker but one. With sharded state MPI reduces
    to the owners and broadcasts from them; the ring all-reduces, and gathers.

    >>> predicted_bytes(800, 2, True, "ring")
    1200.0
    """
    times = 3 if sharded and communication == "ring" else 2
    return times * (num_workers - 1) * slots / 2


def measure(
    layers: int,
    units: int,
    num_workers: int,
    sharded: bool,
    communication: str,
    by_tcp: bool = False,
) -> dict:
    """Trains ten steps on several workers of this machine.

    Returns:
        `bytes`, the largest peak of a worker's resident memory as the kernel counts it; `seconds`
        of the step in the middle, of the slowest worker; `slots`, the bytes of all of Adam's;
        `sent`, the bytes that went over loopback in a step, all of them where `by_tcp` is set.
    """
    mpi = ["--mpi"] if communication == "mpi" else []
    launch = [sys.executable, "-m", "tfmulti.launch", f"--num_workers={num_workers}", *mpi]
    launch += ["--all_output", "--allocator=default", "--", sys.executable, "-c", _WORKER]
    done = subprocess.run(
        [*launch, str(layers), str(units), *(["state"] if sharded else [])],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(_TCP if by_tcp else {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    seen = [json.loads(line) for line in lines if line.startswith("{")]
    return {name: max(each[name] for each in seen) for name in seen[0]}


def main() -> None:
    """Measures both in turn, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = {"layers": 12, "units": 2048, "num_workers": 2, "rounds": 3}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--communication", choices=("mpi", "ring"), default="mpi")
    given = parser.parse_args()
    size = (given.layers, given.units, given.num_workers)
    runs = [
        [measure(*size, sharded, given.communication) for sharded in (False, True)]
        for _ in range(given.rounds)
    ]
    slots, others = runs[0][0]["slots"], 1 - 1 / given.num_workers
    title = f"Adam, {slots / 8e6:.0f}M weights, {given.num_workers} workers, {given.communication}"
    columns = ("state", "peak of a worker, MB", "step, s", "sent, MB", "predicted")
    table = Table(*columns, title=title)
    for sharded, name in enumerate(("copies", "sharded")):
        peak = statistics.median(run[sharded]["bytes"] for run in runs) / 1e6
        seconds = statistics.median(run[sharded]["seconds"] for run in runs)
        sent = measure(*size, bool(sharded), given.communication, by_tcp=True)["sent"] / 1e6
        predicted = predicted_bytes(slots, given.num_workers, bool(sharded), given.communication)
        table.add_row(
            name, f"{peak:.0f}", f"{seconds:.2f}", f"{sent:.0f}", f"{predicted / 1e6:.0f}"
        )
    saved = [(run[0]["bytes"] - run[1]["bytes"]) / (slots * others) for run in runs]
    ratios = [run[1]["seconds"] / run[0]["seconds"] for run in runs]
    table.add_row(
        "least to most",
        f"{min(saved):.0%} to {max(saved):.0%} of {slots * others / 1e6:.0f} saved",
        f"{min(ratios):.2f} to {max(ratios):.2f} times",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
