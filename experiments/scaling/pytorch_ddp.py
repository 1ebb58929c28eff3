"""PyTorch's DistributedDataParallel, gloo on CPU; one process without torchrun's variables."""

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--workload", choices=["compute", "communication"], default="compute")
parser.add_argument("--batch_size", type=int, default=100, help="examples of each process")
parser.add_argument("--cores", type=int, default=1, help="cores of each process")
parser.add_argument("--nopin", action="store_true", help="leave the process on all cores")
flags = parser.parse_args()

rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if not flags.nopin:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank * flags.cores : (rank + 1) * flags.cores])

import torch  # noqa: E402 - it counts the cores that it may use when it is imported
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tfmulti.bench import control  # noqa: E402

torch.set_num_threads(flags.cores)
torch.manual_seed(0)


def create_model():
    """Creates the network of the workload, as tfmulti.bench has it."""
    if flags.workload == "communication":
        hidden = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(2048, 10))
    blocks = []
    for before, after in ((1, 16), (16, 32)):
        blocks += [nn.Conv2d(before, after, 5, padding=2), nn.BatchNorm2d(after)]
        blocks += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


def create_batches():
    """Creates forty batches in memory, which the steps go round: nothing is loaded or shuffled."""
    shape = (1, 28, 28) if flags.workload == "compute" else (2048,)
    return [
        (torch.rand(flags.batch_size, *shape), torch.randint(0, 10, (flags.batch_size,)))
        for _ in range(40)
    ]


model = create_model().train()
if size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
batches = create_batches()


def train(steps):
    """Does steps of training."""
    ends = []
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return {"ends": ends}


control.serve("pytorch_ddp", rank, train)
if size > 1:
    dist.destroy_process_group()
