"""Programs that the launcher starts on several workers of this machine, and what these share."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def sent_bytes(device: str = "lo") -> int:
    """Returns the bytes that all programs have sent over a network device, loopback by default."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def create_parser(description: str, **defaults: float) -> argparse.ArgumentParser:
    """Returns a parser of the command line, with a flag for each number and its default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def create_clock(count_sent: Callable[[], float] = lambda: 0):
    """Returns a callback that notes the `seconds` of each step, and what was sent.

    Args:
        count_sent: Function that returns the bytes sent so far: `before` has them at the beginning
            of each step, and `after` at its end.
    """
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seconds, self.before, self.after = [], [], []

        def on_train_batch_begin(self, batch, logs=None):
            self.before.append(count_sent())
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.seconds.append(time.perf_counter() - self.begin)
            self.after.append(count_sent())

    return Clock()


def run_on_workers(
    program: Sequence[str],
    num_workers: int,
    flags: Sequence[str] = ("--mpi",),
    environ: Mapping[str, str] | None = None,
) -> list:
    """Returns what the workers have printed as JSON, a line each.

    Args:
        program: Arguments of Python.
        num_workers: The number of workers.
        flags: More flags of the launcher.
        environ: Environment variables beside those of this process.
    """
    flags = [f"--num_workers={num_workers}", *flags]
    return run_together([launch(flags, [sys.executable, *program])], environ)


def launch(flags: Sequence[str], job: Sequence[str], prefix: Sequence[str] = ()) -> list[str]:
    """Returns the command by which the launcher starts a job, with the output of all workers."""
    own = [sys.executable, "-m", "tfmulti.launch"]
    return [*prefix, *own, *flags, "--all_output", "--", *job]


def run_together(commands: Sequence[Sequence[str]], environ: Mapping[str, str] | None = None):
    """Runs commands of the launcher together, and returns what their workers print as JSON."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environ or {})}
    running = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    texts = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    lines = [line.partition("] ")[2] for text in texts for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def median(runs: Sequence[Mapping], way, name: str) -> float:
    """Returns the median over runs of what was measured in one way.

    >>> median([{"plain": {"bytes": number}} for number in (1, 2, 4)], "plain", "bytes")
    2
    """
    return statistics.median(run[way][name] for run in runs)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Returns the least and the most of values, once where both are the same.

    >>> spread([1.0, 2.5, 2.0]), spread([1.0, 1.001])
    ('1.00 to 2.50', '1.00')
    """
    return " to ".join(dict.fromkeys(f"{end(values):{form}}" for end in (min, max)))
