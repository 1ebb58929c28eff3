"""Two real workers that can be killed, frozen and told to end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tfmulti.runtime import processes

HERE = Path(__file__).parent
TIMEOUT_S = 120
HEALTHY = ("--dataset", "faulty:healthy", "--model", "faulty:dense", "--epochs", "3000")
RUN = ("--dataset", "faulty:healthy", "--model", "faulty:dense", "--epochs", "6")
SAVING = (*RUN, "--optimizer", "sgd", "--checkpoint_steps", "4")
BY_THE_CLOCK = (*RUN, "--optimizer", "sgd", "--checkpoint_minutes", "0.001")
NOTICE_S = 30.0


def expect(condition, *seen):
    """Raises AssertionError with what was seen, unless a condition holds."""
    if not condition:
        raise AssertionError(" | ".join(map(str, seen)))


class Worker:
    """A process whose output goes to a file, and is read while it runs."""

    def __init__(self, arguments, log: Path, prefix=(), **variables):
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(HERE), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.pop("TF_CONFIG", None)
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *map(str, arguments)],
                env={**environment, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        """All that it has written."""
        return self.log.read_text(errors="replace")

    @property
    def error(self) -> str:
        """The error that it has ended with."""
        found = re.findall(r"^error: (.*)", self.text, re.M)
        return found[-1] if found else ""

    @property
    def digest(self) -> str:
        """The digest of its weights."""
        return re.findall(r"weights_sha256=(\w+)", self.text)[-1]

    def wait_for(self, words: str, times: int = 1) -> None:
        """Waits until it has written something so many times."""
        until = time.monotonic() + TIMEOUT_S
        while self.text.count(words) < times:
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(f"no {words!r} in:\n{self.text}")
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Sends a signal to it."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Waits for its end; returns the exit code."""
        return self.process.wait(timeout=TIMEOUT_S)


@contextlib.contextmanager
def two_workers(folder, *arguments, each=((), ()), count=2, configs=None, prefixes=((), ())):
    """Starts two workers of `tfmulti.train`; none is left at the end.

    Args:
        folder: Where their output goes.
        *arguments: Flags of both.
        each: Flags of each.
        count: How many of them come.
        configs: Their TF_CONFIGs, where they are not two on loopback.
        prefixes: What comes before the command of each.
    """
    flags = ["tfmulti.train", "--strategy", "multi_worker", *arguments]
    commands = [[*flags, *each[index]] for index in range(count)]
    with started(commands, folder, configs or processes.tf_configs(2), prefixes) as workers:
        yield workers


@contextlib.contextmanager
def started(commands, folder: Path, configs, prefixes):
    """Starts a module of Python for each command; none is left at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    workers = [
        Worker(command, folder / f"worker_{i}.txt", prefixes[i], TF_CONFIG=configs[i])
        for i, command in enumerate(commands)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.signal(signal.SIGKILL)
                worker.process.wait()


@contextlib.contextmanager
def one_process(folder: Path, *arguments, prefix=()):
    """Starts one process of a module of tfmulti; it is not left at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = Worker(arguments, folder / "process.txt", prefix)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.signal(signal.SIGTERM)
            try:
                worker.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                worker.signal(signal.SIGKILL)
                worker.process.wait()


def weights(folder) -> list[np.ndarray]:
    """The weights that a run has left."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    return keras.models.load_model(Path(folder) / "model.keras").get_weights()
