"""Faults of workers whose gradients go through MPI, under the launcher."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

from faults.random_kills import find_worker
from faults.workers import HEALTHY, NOTICE_S, expect, one_process


def _launch(folder: Path):
    return ("tfmulti.launch", "--num_workers", "2", "--mpi", "--log_dir", folder / "logs", "--")


def _started(folder: Path, *flags):
    train = (sys.executable, "-m", "tfmulti.train", "--strategy", "multi_worker", *flags)
    return one_process(folder, *_launch(folder), *train, "--workdir", folder / "run")


def _error_of(folder: Path, index: int) -> str:
    [log] = (folder / "logs").rglob(f"worker_{index}*")
    found = re.findall(r"^error: (.*)", log.read_text(errors="replace"), re.M)
    return found[-1] if found else ""


def _line_of(launcher, words: str) -> str:
    lines = [line for line in launcher.text.splitlines() if words in line]
    expect(lines, launcher.text)
    return lines[0].partition(" (log:")[0]


SHARDED = ("--shard", "parameters")
STAGES = ("--pipeline_stages", "2")
SPLIT = ("--tensor_parallel", "kernel=column")


def lost(number, victim, flags=()):
    """A worker is killed or frozen; the other names it, or the launcher, which then ends both."""

    def scenario(folder: Path):
        with _started(folder, *HEALTHY, *flags) as launcher:
            launcher.wait_for("Epoch 3/")
            expect("mpi (MPI has started the job)" in launcher.text, launcher.text)
            pids = [find_worker(folder / "run", index) for index in range(2)]
            began = time.monotonic()
            os.kill(pids[victim], number)
            _wait_until_gone(pids[1 - victim])
            seconds = time.monotonic() - began
            error = _error_of(folder, 1 - victim)
            code = launcher.wait()
        expect(seconds < NOTICE_S and code != 0, seconds, code, error, launcher.text)
        if not error:
            # Between epochs workers wait in TensorFlow's ring, which is slower than the launcher.
            error = _line_of(launcher, f"worker {victim} was ended by")
            return seconds, f"the launcher ends the other: {error}"
        expect(f"worker {victim} at" in error, error, launcher.text)
        return seconds, f"the other ends: {error}"

    return scenario


def _wait_until_gone(pid):
    until = time.monotonic() + 2 * NOTICE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)


def bad_record(folder: Path):
    """One worker's pipeline fails; both say why."""
    began = time.monotonic()
    with _started(folder, "--dataset", "faulty:bad_record", "--model", "faulty:dense") as launcher:
        code = launcher.wait()
        errors = [_error_of(folder, index) for index in range(2)]
    expect(code != 0 and all("bad record 300" in error for error in errors), code, *errors)
    return time.monotonic() - began, f"both end: {errors[0]}"


def ends_early(folder: Path):
    """A worker's own script ends within `fit` by `sys.exit(0)`; the other names it."""
    began = time.monotonic()
    script = (sys.executable, "-m", "own_script", "leaves early", folder)
    with one_process(folder, *_launch(folder), *script) as launcher:
        code = launcher.wait()
        text = (folder / "logs" / "worker_0.log").read_text(errors="replace")
    seconds = time.monotonic() - began
    words = [line for line in text.splitlines() if "worker 1 at" in line]
    expect(code == 144 and words and "exited early with code 0" in launcher.text, code, text)
    return seconds, f"exit 144: {words[-1]}"


SCENARIOS = {
    "a worker is killed, over MPI": lost(signal.SIGKILL, 1),
    "the chief is killed, over MPI": lost(signal.SIGKILL, 0),
    "a worker is killed, sharded parameters": lost(signal.SIGKILL, 1, SHARDED),
    "a worker is frozen, sharded parameters": lost(signal.SIGSTOP, 1, SHARDED),
    "a worker is killed, in a pipeline": lost(signal.SIGKILL, 1, STAGES),
    "the chief is killed, in a pipeline": lost(signal.SIGKILL, 0, STAGES),
    "a worker is frozen, in a pipeline": lost(signal.SIGSTOP, 1, STAGES),
    "a worker is killed, tensor parallelism": lost(signal.SIGKILL, 1, SPLIT),
    "a worker is frozen, tensor parallelism": lost(signal.SIGSTOP, 1, SPLIT),
    "a worker ends early, over MPI": ends_early,
    "a worker is frozen, over MPI": lost(signal.SIGSTOP, 1),
    "the chief is frozen, over MPI": lost(signal.SIGSTOP, 0),
    "an exception in one pipeline, over MPI": bad_record,
}
