"""One worker of PyTorch that trains with copies, sharded state or sharded parameters, on gloo.

`python -m benchmarks.sharded_torch LAYERS UNITS WAY`, started by tfmulti's launcher, whose
TF_CONFIG tells the ranks. It prints what the workers of `benchmarks.sharded_state` print, for the
same model.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks.launched import sent_bytes
from tfmulti.runtime.memory import peak_of

WAYS = {None: "ddp", "state": "zero", "parameters": "fsdp"}
"""PyTorch's name of what is sharded: DistributedDataParallel, ZeroRedundancyOptimizer, FSDP2."""


def _join():
    import torch.distributed as dist

    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    rank = config["task"]["index"]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{workers[0]}", world_size=len(workers), rank=rank
    )
    return len(workers)


def _create(layers, units, way, num_workers):
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


def main() -> None:
    """Trains ten steps."""
    import torch

    torch.set_num_threads(1)
    layers, units, way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    num_workers = _join()
    before = peak_of()
    model, optimizer = _create(layers, units, way, num_workers)
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
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
