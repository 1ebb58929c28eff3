"""The all-reduce of gloo alone, as PyTorch calls it."""

import time

from benchmarks.peers import peer, torch_environments

REDUCES = peer(
    "gloo",
    "PyTorch's all-reduce over gloo",
    {"create": f"{__name__}:create", "tensorflow": False},
    is_distributed=True,
    environments=torch_environments,
)


def create(task):
    """Returns a function that measures sums of float32 values."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(task["cores"])
    dist.init_process_group("gloo")

    def reduce(floats, times):
        values = torch.ones(floats)
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            dist.all_reduce(values)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    return reduce
