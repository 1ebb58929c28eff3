"""Checks this host: memory, cores, shared memory, open files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, megabytes, plural
from tfmulti.runtime.memory import Limits, read_limits

BYTES_PER_GPU = 16e9
"""Memory of the host for each GPU: the rule of the guides, 32, 64 and 128 GB for 2, 4 and 8."""

_LITTLE_MEMORY = 2e9
_LITTLE_SHARED = 512e6
_FEW_FILES = 1024
_FILES_PER_WORKER = 16
_THREADS = "TF_NUM_INTRAOP_THREADS"


@dataclasses.dataclass(frozen=True)
class Host:
    """The resources of this host; None if unknown.

    Attributes:
        memory: Bytes of memory.
        available: Bytes that programs can have now.
        cores: Cores of the machine.
        allowed: Cores that this process may run on.
        shared: Bytes of /dev/shm.
        shared_free: Bytes of /dev/shm that are free.
        files: Files that a process may have open.
        most_files: How far a user may raise that.
        limits: Limits of the container.
    """

    memory: int | None = None
    available: int | None = None
    cores: int | None = None
    allowed: int | None = None
    shared: int | None = None
    shared_free: int | None = None
    files: int | None = None
    most_files: int | None = None
    limits: Limits = Limits()


def read_host(root: Path = Path("/")) -> Host:
    """Reads the resources of this host from Linux's own files.

    Args:
        root: The root of the file system.
    """
    memory = _meminfo(root)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    shared, shared_free = _size_of(root / "dev/shm")
    files, most_files = _file_limits()
    return Host(
        memory=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        cores=os.cpu_count(),
        allowed=allowed,
        shared=shared,
        shared_free=shared_free,
        files=files,
        most_files=most_files,
        limits=read_limits(root),
    )


def check_host(
    host: Host, num_gpus: int, num_workers: int, environ: Mapping[str, str]
) -> list[Check]:
    """Checks this host.

    Args:
        host: What it has.
        num_gpus: GPUs of this host.
        num_workers: Workers of the cluster.
        environ: The environment.
    """
    return [
        check_memory(host, num_gpus),
        check_cores(host, environ),
        check_container(host.limits),
        check_shared(host, num_gpus),
        check_files(host, num_workers),
    ]


def check_memory(host: Host, num_gpus: int) -> Check:
    """Compares the memory with 16 GB for each GPU."""
    name = "memory"
    if host.memory is None:
        return Check(name, UNKNOWN, "this system has no /proc/meminfo")
    bytes_here = min(host.memory, host.limits.memory or host.memory)
    free = f", {megabytes(host.available)} of the host's are free" if host.available else ""
    text = f"{megabytes(bytes_here)}{free}"
    if num_gpus and bytes_here < num_gpus * BYTES_PER_GPU:
        wanted = megabytes(num_gpus * BYTES_PER_GPU)
        hint = "Use fewer GPUs, more memory, or a smaller shuffle buffer and no cache()."
        return Check(name, WARNING, f"{text}; {plural(num_gpus, 'GPU')} want {wanted}", hint)
    if host.available is not None and host.available < _LITTLE_MEMORY:
        return Check(name, WARNING, text, "End other programs: TensorFlow alone needs 1 GB.")
    rule = f"16 GB for each of {plural(num_gpus, 'GPU')}" if num_gpus else "no GPU to count for"
    return Check(name, OK, f"{text} ({rule})")


def check_cores(host: Host, environ: Mapping[str, str]) -> Check:
    """Compares the cores that TensorFlow will count with those that it may use."""
    name = "cores"
    if host.allowed is None:
        return Check(name, UNKNOWN, f"{host.cores} in the machine; how many are usable is unknown")
    limit = host.limits.cores
    text = f"{host.allowed} of {host.cores}"
    if limit is None or limit >= host.allowed:
        return Check(name, OK, text)
    text = f"{text}, but no more than {limit:g} at a time"
    threads = environ.get(_THREADS, "")
    if threads.isdecimal() and 0 < int(threads) <= max(1, round(limit)):
        return Check(name, OK, f"{text}; {_THREADS}={threads} knows it")
    hint = f"Set {_THREADS}={max(1, int(limit))}: else {host.allowed} threads wait for each other."
    return Check(name, WARNING, text, hint)


def check_container(limits: Limits) -> Check:
    """Reports the limits of the container."""
    told = []
    if limits.cores is not None:
        told.append(f"{limits.cores:g} cores")
    if limits.memory is not None:
        told.append(f"{megabytes(limits.memory)} of memory")
    return Check("container limits", OK, ", ".join(told) or "none on cores or memory")


def check_shared(host: Host, num_gpus: int) -> Check:
    """Checks /dev/shm, through which NCCL and MPI send within a host."""
    name = "shared memory"
    if host.shared is None:
        return Check(name, UNKNOWN, "there is no /dev/shm")
    text = f"/dev/shm has {megabytes(host.shared)}, {megabytes(host.shared_free)} free"
    if host.shared_free < _LITTLE_SHARED:
        hint = "Start the container with --shm-size=2g (Docker gives 64 MB), or empty /dev/shm."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def check_files(host: Host, num_workers: int) -> Check:
    """Checks the limit of open files: connections to all workers, and files of data."""
    name = "open files"
    if host.files is None:
        return Check(name, UNKNOWN, "this system does not tell its limit")
    wanted = _FEW_FILES + _FILES_PER_WORKER * (num_workers - 1)
    text = f"{host.files} at most, {host.most_files} after `ulimit -n`"
    if host.files < wanted:
        hint = f"ulimit -n {wanted} before training, or raise it in limits.conf."
        status = WARNING if host.files >= _FEW_FILES // 4 else FAILURE
        return Check(name, status, f"{text}; {wanted} are wanted", hint)
    return Check(name, OK, text)


def _meminfo(root) -> dict[str, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.split()}


def _size_of(path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _file_limits() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:
        return None, None
    return resource.getrlimit(resource.RLIMIT_NOFILE)
