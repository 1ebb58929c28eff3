"""Programs that the launcher starts on several workers of this machine, and what these print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def sent_bytes(device: str = "lo") -> int:
    """Returns the bytes that all programs have sent over a network device, loopback by default."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


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
    flags = [f"--num_workers={num_workers}", *flags, "--allocator=default"]
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
