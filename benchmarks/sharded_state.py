"""Prints memory, seconds and bytes sent of a step, by what is sharded over workers.

`python -m benchmarks.sharded_state [--layers 12] [--units 2048] [--num_workers 2] [--rounds 3]`

Where PyTorch is installed, its DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2 train the
same model on gloo, in the same rounds.

Bytes are those that the loopback device counts, in runs of their own in which MPI uses TCP; other
programs that use it meanwhile are counted too.
"""

from __future__ import annotations

import importlib.util
import itertools

from rich.console import Console
from rich.table import Table

from benchmarks import sharded_torch
from benchmarks.launched import create_parser, median, run_on_workers, spread

_WORKER = """
import contextlib, json, sys
import keras, numpy as np, tfmulti
from benchmarks.launched import create_clock, sent_bytes
from tfmulti.runtime.memory import peak_of
layers, units, shard = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if sys.argv[3:] else None
strategy = tfmulti.create_strategy("multi_worker", verify="never")
before = peak_of()
sharded = tfmulti.sharded_parameters() if shard == "parameters" else contextlib.nullcontext()
with strategy.scope(), sharded:
    hidden = [keras.layers.Dense(units, activation="tanh") for _ in range(layers)]
    model = keras.Sequential([keras.Input((units,)), *hidden, keras.layers.Dense(1)])
    model.compile(tfmulti.DistributedOptimizer("adam", shard=shard), "mse")
x = np.zeros((160, units), "float32")
clock = create_clock(sent_bytes)
data = tfmulti.distribute_train((x, x[:, :1]), strategy, 16)
model.fit(data, epochs=1, verbose=0, callbacks=[clock])
peak = peak_of()
slots = 2 * 4 * model.count_params()
sent = (clock.after[8] - clock.after[2]) / 6
print(json.dumps(
    {"bytes": peak, "before": before, "seconds": sorted(clock.seconds)[4], "slots": slots,
     "sent": sent}
))
"""


# Intel's MPI, which the extra `mpi` installs, without shared memory.
_TCP = {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"}


SHARDS = (None, "state", "parameters")
TORCH = "gloo"
"""Communication of PyTorch's workers."""


def predicted_bytes(slots: int, num_workers: int, shard: str | None, communication: str) -> float:
    """Returns the bytes that all workers together send in a step, for Adam's float32 slots.

    An all-reduce sends each gradient twice to every worker but one. With sharded state MPI reduces
    to the owners and broadcasts from them; the ring and PyTorch all-reduce, and gather. With
    sharded parameters weights are sent twice, and gradients once; over the ring each time as an
    all-reduce, and so are gradients on gloo.

    >>> predicted_bytes(800, 2, "state", "ring")
    1200.0
    >>> predicted_bytes(800, 2, "parameters", "mpi")
    1200.0
    """
    times = {
        "mpi": {None: 2, "state": 2, "parameters": 3},
        "ring": {None: 2, "state": 3, "parameters": 6},
        TORCH: {None: 2, "state": 3, "parameters": 4},
    }[communication][shard]
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
        `bytes`, the largest peak of a worker's resident memory as the kernel counts it; `before`,
        that before the model was created; `seconds`
        of the step in the middle, of the slowest worker; `slots`, the bytes of all of Adam's;
        `sent`, the bytes that went over loopback in a step, all of them where `by_tcp` is set.
    """
    size = [str(layers), str(units)]
    program = ["-c", _WORKER, *size, *([shard] if shard else [])]
    if communication == TORCH:
        program = ["-m", "benchmarks.sharded_torch", *size, sharded_torch.WAYS[shard]]
    seen = run_on_workers(
        program,
        num_workers,
        ["--mpi"] if communication == "mpi" else [],
        _TCP if by_tcp else None,
    )
    return {name: max(each[name] for each in seen) for name in seen[0]}


def main() -> None:
    """Measures both in turn, and prints a table."""
    parser = create_parser(__doc__, layers=12, units=2048, num_workers=2, rounds=3)
    parser.add_argument("--communication", choices=("mpi", "ring"), default="mpi")
    given = parser.parse_args()
    size = (given.layers, given.units, given.num_workers)
    by = [given.communication, *([TORCH] if importlib.util.find_spec("torch") else [])]
    ways = list(itertools.product(by, SHARDS))
    runs = [{way: measure(*size, way[1], way[0]) for way in ways} for _ in range(given.rounds)]
    sent = {way: measure(*size, way[1], way[0], by_tcp=True)["sent"] for way in ways}
    slots = runs[0][given.communication, None]["slots"]
    title = f"Adam, {slots / 8e6:.0f}M weights, {given.num_workers} workers"
    columns = ("by", "sharded", "peak of a worker, MB", "before the model", "less, MB", "step, s")
    table = Table(*columns, "times", "sent, MB", "predicted", title=title)
    for way in ways:
        table.add_row(*_row(way, runs, sent[way], given.num_workers))
    Console(width=120).print(table)


def _row(way, runs, sent, num_workers) -> list[str]:
    """Returns a row: differences and ratios are to copies of the same program, in each round."""
    communication, shard = way
    copies = communication, None
    less = [(run[copies]["bytes"] - run[way]["bytes"]) / 1e6 for run in runs]
    ratios = [run[way]["seconds"] / run[copies]["seconds"] for run in runs]
    slots = median(runs, way, "slots")
    name = sharded_torch.WAYS[shard].upper() if communication == TORCH else shard or "nothing"
    return [
        f"PyTorch, {TORCH}" if communication == TORCH else f"tfmulti, {communication}",
        name,
        f"{median(runs, way, 'bytes') / 1e6:.0f}",
        f"{median(runs, way, 'before') / 1e6:.0f}",
        spread(less, ".0f"),
        f"{median(runs, way, 'seconds'):.2f}",
        spread(ratios),
        f"{sent / 1e6:.0f}",
        f"{predicted_bytes(slots, num_workers, shard, communication) / 1e6:.0f}",
    ]


if __name__ == "__main__":
    main()
