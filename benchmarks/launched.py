"""Programs that the launcher starts on several workers of this machine, and what these print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


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
    launch = [sys.executable, "-m", "tfmulti.launch", f"--num_workers={num_workers}", *flags]
    done = subprocess.run(
        [*launch, "--all_output", "--allocator=default", "--", sys.executable, *program],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environ or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]
