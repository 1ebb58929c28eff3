"""Faults of jobs with parameter servers, under the launcher: tasks killed at random moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

from faults.random_kills import find_worker
from faults.workers import HEALTHY, NOTICE_S, expect, one_process

COUNT = 10
KILLS = 3
# With synchronous steps a run has one result, bit for bit, whoever computes them.
TRAIN = (
    *("--dataset", "faulty:healthy", "--model", "faulty:dense", "--epochs", "12"),
    *("--optimizer", "adam", "--checkpoint_steps", "3", "--max_staleness", "0"),
)
TASKS = (("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1), ("chief", 0))


def started(folder: Path, flags, max_restarts: int):
    """Starts the launcher with a chief, two workers and two servers."""
    train = (sys.executable, "-m", "tfmulti.train", "--strategy", "parameter_server", *flags)
    launch = ("--num_workers", "2", "--num_ps", "2", "--max_restarts", str(max_restarts))
    command = ("tfmulti.launch", *launch, "--log_dir", folder / "logs", "--", *train)
    return one_process(folder, *command, "--workdir", folder / "run")


def uninterrupted(folder: Path) -> str:
    """The digest of a run that nothing happens to."""
    with started(folder, TRAIN, 0) as launcher:
        expect(launcher.wait() == 0, launcher.text)
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    """The digest of the weights that a run has ended with."""
    return json.loads((folder / "run" / "result.json").read_text())["weights_sha256"]


def kill(folder: Path, kind: str, index: int) -> None:
    """Kills a task."""
    os.kill(find_worker(folder / "run", index, kind), signal.SIGKILL)


def workers_rejoin(folder: Path):
    """Workers are killed one after the other; each joins again, and the job never stops."""
    chance = random.Random(0)
    with started(folder, HEALTHY, KILLS) as launcher:
        launcher.wait_for("Epoch 3/")
        began = time.monotonic()
        for number in range(1, KILLS + 1):
            time.sleep(chance.uniform(0, 0.5))
            index = chance.randrange(2)
            told = launcher.text.count(f"worker {index} is back")
            kill(folder, "worker", index)
            launcher.wait_for(f"Restart {number} (of {KILLS}) of worker {index}")
            launcher.wait_for(f"worker {index} is back", times=told + 1)
        seconds = (time.monotonic() - began) / KILLS
        launcher.signal(signal.SIGTERM)
        code = launcher.wait()
    expect("resumed at step" not in launcher.text, launcher.text)
    expect("SIGTERM: saved step" in launcher.text, launcher.text)
    expect(code == 128 + signal.SIGTERM, code, launcher.text)
    return seconds, f"{KILLS} of {KILLS} were started again alone, and computed steps again"


def server_is_lost(folder: Path):
    """A server is killed, and the job may not start again: it ends with the server's name."""
    with started(folder, HEALTHY, 0) as launcher:
        launcher.wait_for("Epoch 3/")
        began = time.monotonic()
        kill(folder, "ps", 1)
        code = launcher.wait()
        seconds = time.monotonic() - began
    lines = re.findall("^ps 1 was ended by SIGKILL", launcher.text, re.M)
    expect(code == 128 + signal.SIGKILL and lines, code, launcher.text)
    return seconds, f"exit {code}: {lines[0]}"


def frozen(kind: str, index: int):
    """A task is frozen: the others end with its name, and so the job."""

    def scenario(folder: Path):
        with started(folder, (*HEALTHY, "--heartbeat_timeout", "4"), 0) as launcher:
            launcher.wait_for("Epoch 3/")
            began = time.monotonic()
            victim = find_worker(folder / "run", index, kind)
            os.kill(victim, signal.SIGSTOP)
            code = launcher.wait()
            seconds = time.monotonic() - began
        words = "no chief at .*frozen" if kind == "chief" else f"{kind} {index} .*frozen.* is lost"
        logs = "".join(log.read_text(errors="replace") for log in (folder / "logs").rglob("*.log"))
        errors = [each for each in re.findall("^error: (.*)", logs, re.M) if re.search(words, each)]
        expect(code == 144 and errors, code, launcher.text, logs)
        expect(seconds < 3 * NOTICE_S, seconds)
        return seconds, f"exit {code}: {errors[0]}"

    return scenario


def kill_once(folder: Path, number: int, task) -> str:
    """Kills a task at a moment that the number decides; returns the digest of what it ends with."""
    chance = random.Random(number)
    kind, index = task
    with started(folder, TRAIN, 1) as launcher:
        launcher.wait_for(f"Epoch {chance.randint(1, 8)}/")
        time.sleep(chance.uniform(0, 0.3))
        kill(folder, kind, index)
        code = launcher.wait()
    name = "chief" if kind == "chief" else f"{kind} {index}"
    expect(f"{name} was ended by SIGKILL" in launcher.text, launcher.text)
    # Only a worker can be lost without all starting again.
    resumed = "resumed at step" in launcher.text
    expect(code == 0 and resumed == (kind != "worker"), code, launcher.text)
    return digest_of(folder)


def killed(*tasks):
    """A task is killed; the run ends as one that was not."""

    def scenario(folder: Path):
        expected = uninterrupted(folder / "whole")
        found = [kill_once(folder / str(number), number, task) for number, task in enumerate(tasks)]
        right = sum(digest == expected for digest in found)
        expect(right == len(tasks), right, expected, *found)
        return 0.0, f"{right} of {len(tasks)} ended with the same weights, bit for bit"

    return scenario


SCENARIOS = {
    "workers are killed, with servers": workers_rejoin,
    "a worker is frozen, with servers": frozen("worker", 1),
    "a server is killed": server_is_lost,
    "a server is frozen": frozen("ps", 1),
    "the chief is frozen, with servers": frozen("chief", 0),
    "ten kills at random moments, with servers": killed(*(TASKS * 2)[:COUNT]),
}
