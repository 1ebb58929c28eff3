"""Environment variables, and exit codes, by which a launcher and its workers communicate.

`python -m tfmulti.launch` sets them; another launcher, or a manifest, may do the same.
"""

from __future__ import annotations

from collections.abc import Mapping

TOKEN = "TFMULTI_TOKEN"
"""The secret of one job: only processes that know it may join the rendezvous of its workers."""

START_TIMEOUT = "TFMULTI_START_TIMEOUT"
"""Seconds that workers wait for one another before TensorFlow starts."""

RESTARTS = "TFMULTI_RESTARTS"
"""How often the workers of this job have been restarted, from "0"."""

BASE_PORT = "TFMULTI_BASE_PORT"
"""The first port of a job's workers on each host, the same for all; where a scheduler starts it."""

NUM_WORKERS = "TFMULTI_NUM_WORKERS"
"""How many pods of a Kubernetes Job train together; its manifest sets it."""

NUM_PS = "TFMULTI_NUM_PS"
"""How many of a scheduler's tasks, the last ones, are parameter servers; none without."""

SERVICE = "TFMULTI_SERVICE"
"""The headless Service that gives the pods of a Kubernetes Job their names."""

JOB = "TFMULTI_JOB"
"""A name of this run of the launcher, the same after each restart of its workers."""

PROGRESS = "TFMULTI_PROGRESS"
"""A file of this worker's own, to be made once a training step is done.

A program that fails with exit code 1 or 2 before any worker has made its file is not restarted.
"""

PREEMPTED = 143
"""Exit code of a worker that received SIGTERM and exited cleanly."""

PEER_LOST = 144
"""Exit code of a worker that ends because it has lost a peer."""


# Whatever restarts a job counts the restarts: the launcher, or a scheduler that restarts jobs.
_RESTART_COUNTS = (RESTARTS, "SLURM_RESTART_COUNT")
_JOBS = (JOB, "SLURM_JOB_ID")


def count_restarts(environ: Mapping[str, str]) -> int:
    """Returns how often this job has been started again, by the launcher or by Slurm.

    Example:
        >>> count_restarts({"SLURM_RESTART_COUNT": "2"}), count_restarts({})
        (2, 0)
    """
    return sum(_count(name, environ.get(name) or "0") for name in _RESTART_COUNTS)


def jobs_of(environ: Mapping[str, str]) -> list[str]:
    """Returns what identifies this job, and stays the same when it is started again.

    Example:
        >>> jobs_of({"SLURM_JOB_ID": "71", "TFMULTI_JOB": "8f3a"}), jobs_of({})
        (['TFMULTI_JOB=8f3a', 'SLURM_JOB_ID=71'], [])
    """
    return [f"{name}={environ[name]}" for name in _JOBS if environ.get(name)]


def _count(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(
            f"{name} must be a whole number of restarts. Received: {name}={text!r}. Unset it, or "
            "leave it to what restarts the job."
        )
    return int(text)
