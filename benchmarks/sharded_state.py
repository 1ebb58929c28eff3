"""Prints memory, seconds and bytes sent of a step, by what is sharded over workers.

`python -m benchmarks.sharded_state [--layers 12] [--units 2048] [--num_workers 2] [--rounds 3]`

Bytes are those that the loopback device counts, in runs of their own in which MPI uses TCP; other
programs that use it meanwhile are counted too.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.launched import run_on_workers

_WORKER = """
import contextlib, json, sys, time
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
sharded = tfmulti.sharded_parameters() if shard == "parameters" else contextlib.nullcontext()
with strategy.scope(), sharded:
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


SHARDS = (None, "state", "parameters")


def predicted_bytes(slots: int, num_workers: int, shard: str | None, communication: str) -> float:
    """Returns the bytes that all workers together send in a step, for Adam's float32 slots.

    An all-reduce sends each gradient twice to every worker but one. With sharded state MPI reduces
    to the owners and broadcasts from them; the ring all-reduces, and gathers. With sharded
    parameters weights are sent twice, and gradients once; over the ring each time as an all-reduce.

    >>> predicted_bytes(800, 2, "state", "ring")
    1200.0
    >>> predicted_bytes(800, 2, "parameters", "mpi")
    1200.0
    """
    times = {None: 2, "state": 2, "parameters": 3}[shard]
    if communication == "ring":
        times = {None: 2, "state": 3, "parameters": 6}[shard]
    return times * (num_workers - 1) * slots / 2


def measure(
    layers: int,
    units: int,
    num_workers: int,
    shard: str | None,
    communication: str,
    by_tcp: bool = False,
) -> dict:
    """Trains ten steps on several workers of this machine.

    Returns:
        `bytes`, the largest peak of a worker's resident memory as the kernel counts it; `seconds`
        of the step in the middle, of the slowest worker; `slots`, the bytes of all of Adam's;
        `sent`, the bytes that went over loopback in a step, all of them where `by_tcp` is set.
    """
    seen = run_on_workers(
        ["-c", _WORKER, str(layers), str(units), *([shard] if shard else [])],
        num_workers,
        ["--mpi"] if communication == "mpi" else [],
        _TCP if by_tcp else None,
    )
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
        {shard: measure(*size, shard, given.communication) for shard in SHARDS}
        for _ in range(given.rounds)
    ]
    slots = runs[0][None]["slots"]
    title = f"Adam, {slots / 8e6:.0f}M weights, {given.num_workers} workers, {given.communication}"
    columns = ("sharded", "peak of a worker, MB", "less, MB", "step, s", "times")
    table = Table(*columns, "sent, MB", "predicted", title=title)
    for shard in SHARDS:
        less = [(run[None]["bytes"] - run[shard]["bytes"]) / 1e6 for run in runs]
        ratios = [run[shard]["seconds"] / run[None]["seconds"] for run in runs]
        peak = statistics.median(run[shard]["bytes"] for run in runs) / 1e6
        seconds = statistics.median(run[shard]["seconds"] for run in runs)
        sent = measure(*size, shard, given.communication, by_tcp=True)["sent"] / 1e6
        predicted = predicted_bytes(slots, given.num_workers, shard, given.communication) / 1e6
        table.add_row(
            shard or "nothing",
            f"{peak:.0f}",
            f"{min(less):.0f} to {max(less):.0f}",
            f"{seconds:.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            f"{sent:.0f}",
            f"{predicted:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
