"""Prints memory, seconds and bytes sent of a step, by what is sharded over workers.

`python -m benchmarks.sharded_state [--layers 12] [--units 2048] [--num_workers 2] [--rounds 3]`

Where PyTorch is installed, its DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2 train the
same model on gloo, in the same rounds.

"of copies'" is a worker's peak in proportion to that of workers with a copy each, and "beyond the
process" the same of what they hold beyond the process before the model; "of slots x (1-1/N)" is the
memory that is saved in proportion to the slots that N workers need not repeat.

Bytes are those that the loopback device counts, in runs of their own in which MPI uses TCP; other
programs that use it meanwhile are counted too.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence

from benchmarks.launched import create_parser, median, run_on_workers, sent_bytes, spread
from tfmulti.runtime.memory import peak_of

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

_TORCH_WORKER = "from benchmarks import sharded_state; sharded_state.train_with_torch()"
# Intel's MPI, which the extra `mpi` installs, without shared memory.
_TCP = {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp"}

SHARDS = (None, "state", "parameters")
TORCH = "gloo"
"""Communication of PyTorch's workers."""
TORCH_WAYS = {None: "ddp", "state": "zero", "parameters": "fsdp"}
"""PyTorch's name of what is sharded: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2."""


COLUMNS = (
    "by",
    "sharded",
    "peak of a worker, MB",
    "before the model",
    "of copies'",
    "beyond the process",
    "less, MB",
    "of slots x (1-1/N)",
    "step, s",
    "times",
    "sent, MB",
    "predicted",
)


def predicted_bytes(slots: int, num_workers: int, shard: str | None, communication: str) -> float:
    """Returns the bytes that all workers together send in a step, for Adam's float32 slots.

    An all-reduce sends each gradient twice to every worker but one. With sharded state gradients
    are added for their owners, which send new weights; PyTorch all-reduces, and gathers. With
    sharded parameters weights are sent twice, and gradients once; on gloo as an all-reduce.

    >>> predicted_bytes(800, 2, "state", TORCH)
    1200.0
    >>> predicted_bytes(800, 2, "parameters", "mpi")
    1200.0
    """
    own = {None: 2, "state": 2, "parameters": 3}
    times = {None: 2, "state": 3, "parameters": 4} if communication == TORCH else own
    return times[shard] * (num_workers - 1) * slots / 2


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
        program = ["-c", _TORCH_WORKER, *size, TORCH_WAYS[shard]]
    seen = run_on_workers(
        program,
        num_workers,
        ["--mpi"] if communication == "mpi" else [],
        _TCP if by_tcp else None,
    )
    return {name: max(each[name] for each in seen) for name in seen[0]}


def _join_torch():
    import torch.distributed as dist

    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    rank = config["task"]["index"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{workers[0]}", world_size=len(workers), rank=rank
    )
    return len(workers)


def _create_torch_model(layers, units, way, num_workers):
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    # The sharded model is created on no device: no worker has the whole.
    with torch.device("meta" if way == "fsdp" else "cpu"):
        hidden = [part for _ in range(layers) for part in (nn.Linear(units, units), nn.Tanh())]
        model = nn.Sequential(*hidden, nn.Linear(units, 1))
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (num_workers,))
        linear = [part for part in model if isinstance(part, nn.Linear)]
        for part in [*linear, model]:
            fully_shard(part, mesh=mesh)
        model.to_empty(device="cpu")
        for part in linear:
            part.reset_parameters()
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "zero":
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train_with_torch() -> None:
    """Trains ten steps as a worker of PyTorch, as its command line says; prints what others do.

    It is started by tfmulti's launcher, whose TF_CONFIG tells the ranks.
    """
    import torch

    torch.set_num_threads(1)
    layers, units, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    num_workers = _join_torch()
    before = peak_of()
    model, optimizer = _create_torch_model(layers, units, way, num_workers)
    x = torch.zeros(16 // num_workers, units)
    seconds, sent = [], []
    for _ in range(10):
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        sent.append(sent_bytes())
    slots = 2 * 4 * (layers * (units * units + units) + units + 1)
    found = {"bytes": peak_of(), "before": before, "slots": slots}
    found |= {"seconds": sorted(seconds)[4], "sent": (sent[8] - sent[2]) / 6}
    print(json.dumps(found), flush=True)
    torch.distributed.barrier()
    # Now and then a thread of gloo aborts a process that ends as usual.
    os._exit(0)


def main() -> None:
    """Measures both in turn, and prints a table."""
    # The workers of PyTorch import this module too, and their memory is measured.
    from rich.console import Console
    from rich.table import Table

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
    table = Table(*COLUMNS, title=title)
    for way in ways:
        table.add_row(*describe_way(way, runs, sent[way], given.num_workers))
    Console(width=150).print(table)


def describe_way(way: tuple, runs: Sequence[Mapping], sent: float, num_workers: int) -> list[str]:
    """Returns a row; differences and ratios are to copies of the same program, in each round."""
    communication, shard = way
    copies = communication, None
    peaks = [run[way]["bytes"] / run[copies]["bytes"] for run in runs]
    models = [{each: run[each]["bytes"] - run[each]["before"] for each in run} for run in runs]
    beyond = [run[way] / run[copies] for run in models]
    less = [(run[copies]["bytes"] - run[way]["bytes"]) / 1e6 for run in runs]
    ratios = [run[way]["seconds"] / run[copies]["seconds"] for run in runs]
    slots = median(runs, way, "slots")
    saved = slots * (1 - 1 / num_workers) / 1e6
    name = TORCH_WAYS[shard].upper() if communication == TORCH else shard or "nothing"
    return [
        f"PyTorch, {TORCH}" if communication == TORCH else f"tfmulti, {communication}",
        name,
        f"{median(runs, way, 'bytes') / 1e6:.0f}",
        f"{median(runs, way, 'before') / 1e6:.0f}",
        spread(peaks, ".0%"),
        spread(beyond, ".0%"),
        spread(less, ".0f"),
        spread([each / saved for each in less], ".0%"),
        f"{median(runs, way, 'seconds'):.2f}",
        spread(ratios),
        f"{sent / 1e6:.0f}",
        f"{predicted_bytes(slots, num_workers, shard, communication) / 1e6:.0f}",
    ]


if __name__ == "__main__":
    main()
