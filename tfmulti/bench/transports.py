"""Measures the all-reduce over each transport, and the socket copy that is its floor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

from tfmulti.bench import setups
from tfmulti.bench.config import BenchConfig
from tfmulti.bench.jobs import Job, JobFailed
from tfmulti.bench.setups import Setup
from tfmulti.bench.statistics import Summary, summarize
from tfmulti.runtime import processes

SIZES = (1, 32 * 1024, 1024**2, 16 * 1024**2)
"""Numbers of float32 values."""

SOCKET = "socket copy"
GLOO = "gloo"
_FLOAT_BYTES = 4
_ROUNDS = 3
_TIMES = {1: 60, 32 * 1024: 40, 1024**2: 12, 16 * 1024**2: 4}


def measure(config: BenchConfig, folder: Path, print_fn) -> dict:
    """Measures all transports between as many workers as the largest configuration has.

    They take turns, as configurations do; each has its first sums of a size for warm-up.

    Returns:
        `"workers"`; `"floats"`; `"transports"`: by name, for each size the `Summary` of the
        seconds as a dict, or None; `"socket_copy"`: the same for the same bytes, one way;
        `"failures"`: the last words of those that do not run.
    """
    count = config.numbers[-1]
    chosen = [_ours(kind, count, config) for kind in (setups.RING, setups.MPI)]
    chosen = [setup for setup in chosen if setup.kind in config.kinds]
    if config.peers:
        chosen.append(_gloo(count, config))
    chosen.append(_socket(config))
    failures: dict[str, str] = {}
    seconds: dict[str, dict[int, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        jobs = []
        for setup in chosen:
            job = stack.enter_context(Job(setup, folder / setup.kind, config.timeout))
            print_fn(f"all-reduce: starting {setup.kind}")
            try:
                job.start()
                jobs.append(job)
            except JobFailed as error:
                failures[setup.kind] = str(error)
        for number in range(_ROUNDS):
            print_fn(f"all-reduce: round {number + 1} of {_ROUNDS}")
            for job in jobs[:: -1 if number % 2 else 1]:
                _measure_sizes(job, seconds, failures)
            jobs = [job for job in jobs if job.setup.kind not in failures]
        for job in jobs:
            job.end()
    found = {
        name: {str(size): dataclasses.asdict(summarize(values)) for size, values in sizes.items()}
        for name, sizes in seconds.items()
        if name not in failures
    }
    return {
        "workers": count,
        "floats": list(SIZES),
        "socket_copy": found.pop(SOCKET, None),
        "transports": found,
        "failures": failures,
    }


def _measure_sizes(job, seconds, failures):
    name = job.setup.kind
    sizes = seconds.setdefault(name, {size: [] for size in SIZES})
    try:
        for size in SIZES:
            times = _TIMES[size]
            order = {"floats": size} if name != SOCKET else {"size": size * _FLOAT_BYTES}
            job.train(**order, times=max(1, times // 4))
            answers = job.train(**order, times=times)
            sizes[size] += answers[0]["seconds"]
    except JobFailed as error:
        failures[name] = str(error)


def floor_seconds(size: int, workers: int, socket_copy: Summary) -> float:
    """Returns the least time of a ring: S/B x 2(n-1)/n, with B of the socket copy's median.

    Args:
        size: Bytes to reduce.
        workers: Workers that reduce.
        socket_copy: The copy of the largest size.

    >>> round(floor_seconds(SIZES[-1] * 4, 4, Summary(0.1, 0.1, 0.1, 0.1, 5, 0.1)), 3)
    0.15
    """
    bytes_per_second = SIZES[-1] * _FLOAT_BYTES / socket_copy.median
    return size / bytes_per_second * 2 * (workers - 1) / workers


def _ours(kind, count, config) -> Setup:
    task = {
        "kind": kind,
        "allreduce": True,
        "replicas": count,
        "config": dataclasses.asdict(config),
    }
    worker = (sys.executable, "-m", "tfmulti.bench.worker", json.dumps(task))
    return Setup(
        kind, count, 0, (*setups.launcher(count, kind, config, count), *worker), ({},), count
    )


def _gloo(count, config) -> Setup:
    script = str(setups.PEERS_FOLDER / "gloo_all_reduce.py")
    flags = (f"--cores={config.cores_each}", *(() if config.pin else ("--nopin",)))
    environments = setups.torch_environments(count)
    return Setup(GLOO, count, 0, (sys.executable, script, *flags), environments, count)


def _socket(config) -> Setup:
    [port] = processes.free_ports(1)
    cores = config.cores_each if config.pin else 0
    command = (sys.executable, "-m", "tfmulti.bench.socket_copy", str(port), str(cores))
    environments = tuple({setups.INDEX: str(index)} for index in range(2))
    return Setup(SOCKET, 2, 0, command, environments, 2)
