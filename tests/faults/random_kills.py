"""Runs killed at random moments under the launcher: each must end as one that was not."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from faults.workers import TIMEOUT_S, expect, one_process, two_workers
from tfmulti import checkpoint

COUNT = 20
TRAIN = (
    *("--dataset", "faulty:healthy", "--model", "faulty:dense", "--epochs", "12"),
    *("--optimizer", "adam", "--checkpoint_steps", "3"),
)
VICTIMS = {
    "worker 1": ([1], False),
    "the chief": ([0], False),
    "all": ([0, 1], False),
    "the chief, during a save": ([0], True),
}


def find_worker(workdir, index: int, kind: str = "worker") -> int:
    """The process of a worker, or a task of another kind, that trains into a folder."""
    task = f'"task": {{"type": "{kind}", "index": {index}}}'
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().decode().split("\0")
            environment = (path / "environ").read_bytes().decode()
        except OSError:
            continue
        training = command[1:3] == ["-m", "tfmulti.train"] and str(workdir) in command
        if training and task in environment:
            return int(path.name)
    raise AssertionError(f"{kind} {index} is not running")


def train_under_launcher(folder: Path, max_restarts: int):
    """Starts the launcher with two workers."""
    train = (sys.executable, "-m", "tfmulti.train", "--strategy", "multi_worker", *TRAIN)
    flags = ("--num_workers", "2", "--max_restarts", str(max_restarts))
    command = ("tfmulti.launch", *flags, "--log_dir", folder / "logs", "--", *train)
    return one_process(folder, *command, "--workdir", folder / "run")


def wait_for_save(folder: Path) -> None:
    """Waits until a checkpoint is being written."""
    until = time.monotonic() + TIMEOUT_S
    while not list((folder / "run" / checkpoint.FOLDER).glob(".*")):
        assert time.monotonic() < until, "no checkpoint was begun"


def kill_once(folder: Path, number: int) -> str:
    """Kills at a moment that the number decides; returns the digest of what it ends with."""
    chance = random.Random(number)
    name = list(VICTIMS)[number % len(VICTIMS)]
    victims, during_save = VICTIMS[name]
    with train_under_launcher(folder, 1) as launcher:
        launcher.wait_for(f"Epoch {chance.randint(1, 10)}/")
        pids = [find_worker(folder / "run", victim) for victim in victims]
        time.sleep(chance.uniform(0, 0.3))
        if during_save:
            wait_for_save(folder)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        code = launcher.wait()
        expect(code == 0, name, code, launcher.text)
        return launcher.digest


def kill_many(folder: Path):
    """Runs under the launcher, each killed at a random moment and started again."""
    with two_workers(folder / "whole", *TRAIN, "--workdir", folder / "whole") as workers:
        expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
        expected = workers[0].digest
    found = [kill_once(folder / str(number), number) for number in range(COUNT)]
    right = sum(digest == expected for digest in found)
    expect(right == COUNT, right)
    return 0.0, f"{right} of {COUNT} started again and ended with the same weights, bit for bit"
