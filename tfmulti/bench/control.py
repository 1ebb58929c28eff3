"""The protocol between the driver of a benchmark and the processes that it measures.

A process connects to the driver, says that it is ready, and does one order after the other: a
dict of arguments, mostly `{"steps": 30}`. It is told where the driver listens by two variables of
the environment; without them it trains once and prints what it saw.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client

ADDRESS = "TFMULTI_BENCH_CONTROL"
"""Host and port of the driver, as `127.0.0.1:4000`."""

KEY = "TFMULTI_BENCH_KEY"
"""The secret of one job, in hexadecimal digits."""

_STEPS_ALONE = 50


def serve(
    name: str,
    index: int,
    train: Callable[..., Mapping[str, list[float]]],
    *,
    environ: Mapping[str, str] = os.environ,
    **facts,
) -> None:
    """Executes the driver's orders until the driver is done or has gone.

    Args:
        name: What is measured, for people.
        index: The number of this process in its job, from 0.
        train: Function that does an order. `train(steps=30)` does 30 steps and returns a dict of
            lists; `"ends"` has the time of `time.perf_counter()` at the end of each step (or
            of each call, where one call does several steps).
        environ: The variables of the environment.
        **facts: What else the driver should know, such as `gradient_bytes=67_000_000`.
    """
    if ADDRESS not in environ:
        _train_alone(name, index, train)
        return
    host, _, port = environ[ADDRESS].rpartition(":")
    with Client((host, int(port)), authkey=bytes.fromhex(environ[KEY])) as driver:
        driver.send({"name": name, "index": index, "pid": os.getpid(), **facts})
        idle_since = time.process_time()
        # The driver that has gone closes the connection: there is nothing left to do.
        with contextlib.suppress(EOFError, ConnectionError):
            while (order := driver.recv()) is not None:
                driver.send(_obey(order, train, idle_since))
                idle_since = time.process_time()


def _obey(order, train, idle_since) -> dict:
    idle = time.process_time() - idle_since
    cpu, began = time.process_time(), time.perf_counter()
    answer = dict(train(**order))
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **answer,
        "began": [began],
        "ended": [ended],
        "cpu_seconds": [time.process_time() - cpu],
        "idle_cpu_seconds": [idle],
        "peak_bytes": [peak],
    }


def _train_alone(name, index, train):
    train(steps=5)
    ends = train(steps=_STEPS_ALONE)["ends"]
    steps = [after - before for before, after in zip(ends, ends[1:])]
    milliseconds = statistics.median(steps) * 1e3
    print(f"{name}, process {index}: {milliseconds:.2f} ms a step (median of {len(steps)})")
