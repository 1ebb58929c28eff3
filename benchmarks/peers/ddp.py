"""PyTorch's DistributedDataParallel with its defaults: buckets of 25 MB, gloo on CPU."""

import time

from benchmarks.peers import peer, torch_environments

KIND = peer(
    "ddp",
    "PyTorch DistributedDataParallel, gloo",
    {"create": f"{__name__}:create", "tensorflow": False},
    replicas="any",
    is_distributed=True,
    environments=torch_environments,
    long_order=None,
    baseline="ddp",
)


def create(task):
    """Returns a function that does steps of training. One process has no DDP around the model."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(task["cores"])
    torch.manual_seed(0)
    shape, model = _create_model(nn, task["workload"])
    model.train()
    if task["replicas"] > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    # Batches in memory, which the steps go round: nothing is loaded or shuffled.
    count = task["batch_size"]
    batches = [(torch.rand(count, *shape), torch.randint(0, 10, (count,))) for _ in range(40)]

    def train(steps):
        ends = []
        for step in range(steps):
            x, y = batches[step % len(batches)]
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            ends.append(time.perf_counter())
        return {"ends": ends}

    return train


def _create_model(nn, workload):
    """Returns the shape of an example, and the network of the workload, as in tfmulti.bench."""
    if workload == "communication":
        hidden = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return (2048,), nn.Sequential(*hidden, nn.Linear(2048, 10))
    if workload != "compute":
        raise ValueError(
            f"PyTorch's peer has the networks of compute and communication. Received: {workload}. "
            "Add it to benchmarks/peers/ddp.py."
        )
    blocks = []
    for before, after in ((1, 16), (16, 32)):
        blocks += [nn.Conv2d(before, after, 5, padding=2), nn.BatchNorm2d(after)]
        blocks += [nn.ReLU(), nn.MaxPool2d(2)]
    return (1, 28, 28), nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 7 * 7, 10))
