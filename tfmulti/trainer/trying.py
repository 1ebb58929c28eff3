"""Starts `trial` in a process of its own, and watches how much memory that takes."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tfmulti import devices, memory
from tfmulti.cluster import environment
from tfmulti.config import TrainConfig

_LOOK_S = 0.02
_LAST_LINES = 5


@dataclasses.dataclass(frozen=True)
class Tried:
    """What came of some sizes.

    Attributes:
        size: The largest that fitted; 0 for none.
        peak: Bytes held at most with it.
        too_large: The one that did not fit, or None.
        cap: The largest size that leaves an epoch steps enough.
    """

    size: int
    peak: int
    too_large: int | None
    cap: int


def try_in_child(
    config: TrainConfig, sizes: list[int], num_replicas: int, num_local: int, limit: int | None
) -> Tried:
    """Trains a few steps at each size in a fresh process, up to the first that does not fit.

    Args:
        config: The run.
        sizes: Examples of one replica, ascending.
        num_replicas: Replicas of the job.
        num_local: Replicas of this worker.
        limit: Bytes that the process, or its fullest GPU, may hold; None for no other limit than
            the device's.

    Raises:
        RuntimeError: Where a step fails for another reason than memory.
    """
    request = {"sizes": sizes, "num_replicas": num_replicas, "num_local": num_local}
    settings = dataclasses.asdict(config)
    settings |= {"per_replica_batch_size": None, "memory_limit": None, "tf_config": None}
    request["config"] = {**settings, "strategy": "auto", "communication": "auto"}
    size = peak = cap = 0
    begun = None
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # A GPU's memory is none of the process's own.
        for message in _messages(request, None if devices.has_gpu() else limit, log):
            if "error" in message:
                raise _error(message["error"])
            begun = message.get("begins", begun)
            if "size" in message:
                cap = message["cap"]
                if limit is not None and message["peak"] > limit:
                    break
                size, peak, begun = message["size"], message["peak"], None
            elif "no_memory" in message:
                begun = begun or sizes[0]
        log.seek(0)
        words = " ".join(log.read().splitlines()[-_LAST_LINES:])
    if begun is None and not size:
        raise _error(words or "the process ended without a word")
    return Tried(size, peak, begun, cap)


def _messages(request, limit, log) -> Iterator[dict]:
    """Starts the process, and yields what it says; it has ended when this returns."""
    reading, writing = os.pipe()
    environ = {k: v for k, v in os.environ.items() if k != environment.PROGRESS}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tfmulti.trainer.trial",
                json.dumps({**request, "pipe": writing}),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
            pass_fds=[writing],
        )
    finally:
        os.close(writing)
    try:
        yield from _read(reading, process, limit)
    finally:
        os.close(reading)
        process.kill()
        process.stdin.close()
        process.wait()


def _read(reading, process, limit):
    rest = b""
    while True:
        if select.select([reading], [], [], _LOOK_S)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from map(json.loads, lines)
        if limit is not None and memory.peak_of(process.pid) > limit:
            # Before this host ends something else for want of memory.
            yield {"no_memory": "more than the limit"}
            return


def _error(words) -> RuntimeError:
    return RuntimeError(
        "`per_replica_batch_size=auto` trains some steps, which must not fail. "
        f"Received: {words.rstrip('.')}. Give a number, and see what fails then."
    )
