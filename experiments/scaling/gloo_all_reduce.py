"""The all-reduce of gloo alone, as PyTorch calls it; started with torchrun's variables."""

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--cores", type=int, default=1, help="cores of each process")
parser.add_argument("--nopin", action="store_true", help="leave the process on all cores")
flags = parser.parse_args()

rank = int(os.environ["RANK"])
if not flags.nopin:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[rank * flags.cores : (rank + 1) * flags.cores])

import torch  # noqa: E402 - it counts the cores that it may use when it is imported
import torch.distributed as dist  # noqa: E402

from tfmulti.bench import control  # noqa: E402

torch.set_num_threads(flags.cores)
dist.init_process_group("gloo")


def reduce(floats=2**20, times=50, steps=None):
    """Returns the seconds of each sum of so many float32 values."""
    values = torch.ones(floats)
    seconds, ends = [], []
    for _ in range(steps or times):
        began = time.perf_counter()
        dist.all_reduce(values)
        ends.append(time.perf_counter())
        seconds.append(ends[-1] - began)
    return {"seconds": seconds, "ends": ends}


control.serve("gloo", rank, reduce)
dist.destroy_process_group()
