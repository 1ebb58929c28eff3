"""The machine that a bench runs on, and the versions of what it measures."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from tfmulti.bench.config import count_cores

_PACKAGES = ("tensorflow", "keras", "numpy", "torch", "mpi4py", "impi-rt", "mpich", "openmpi")


def describe() -> dict:
    """Returns cores, processor, memory, and versions, for `bench.json`."""
    return {
        "cores": count_cores(),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()


def _gpus() -> list[str]:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
