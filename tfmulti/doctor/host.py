"""Checks this host: memory, cores, shared memory, open files, and the work folder."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.runtime import console, processes
from tfmulti.runtime.memory import Limits, read_limits, show_size

BYTES_PER_GPU = 16e9
"""Memory of the host for each GPU: the rule of the guides, 32, 64 and 128 GB for 2, 4 and 8."""

_LITTLE_MEMORY = 2e9
_LITTLE_SHARED = 512e6
_FEW_FILES = 1024
_FILES_PER_WORKER = 16
_THREADS = "TF_NUM_INTRAOP_THREADS"
_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Host:
    """The resources of this host; None if unknown.

    Attributes:
        memory: Bytes of memory.
        available: Bytes that are available to programs.
        cores: Cores of the machine.
        allowed: Cores that this process may run on.
        shared: Bytes of /dev/shm.
        shared_free: Bytes of /dev/shm that are free.
        files: Files that a process may have open.
        most_files: The limit to which a user may raise `files`.
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


def read_host() -> Host:
    """Reads the resources of this host from Linux's own files."""
    meminfo, shared = Path("/proc/meminfo"), Path("/dev/shm")
    text = meminfo.read_text() if meminfo.exists() else ""
    memory = {name: int(kib) * 1024 for name, kib in _MEMORY.findall(text)}
    usage = shutil.disk_usage(shared) if shared.exists() else None
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Host(
        memory=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        cores=os.cpu_count(),
        allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        shared=usage and usage.total,
        shared_free=usage and usage.free,
        files=files,
        most_files=most_files,
        limits=read_limits(),
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
        check_shared(host),
        check_files(host, num_workers),
    ]


def check_memory(host: Host, num_gpus: int) -> Check:
    """Compares the memory with 16 GB for each GPU."""
    name = "memory"
    if host.memory is None:
        return Check(name, UNKNOWN, "this system has no /proc/meminfo")
    bytes_here = min(host.memory, host.limits.memory or host.memory)
    free = f", {show_size(host.available)} of the host's are free" if host.available else ""
    text = f"{show_size(bytes_here)}{free}"
    if num_gpus and bytes_here < num_gpus * BYTES_PER_GPU:
        wanted = show_size(num_gpus * BYTES_PER_GPU)
        hint = "Use fewer GPUs, more memory, or a smaller shuffle buffer and no cache()."
        return Check(name, WARNING, f"{text}; {console.count(num_gpus, 'GPU')} want {wanted}", hint)
    if host.available is not None and min(host.available, bytes_here) < _LITTLE_MEMORY:
        hint = (
            "End other programs: TensorFlow alone needs 1 GB. python -m tfmulti.train "
            "--estimate_memory N prints what each of N workers needs."
        )
        return Check(name, WARNING, text, hint)
    rule = (
        f"16 GB for each of {console.count(num_gpus, 'GPU')}" if num_gpus else "no GPU to count for"
    )
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
    shown = []
    if limits.cores is not None:
        shown.append(f"{limits.cores:g} cores")
    if limits.memory is not None:
        shown.append(f"{show_size(limits.memory)} of memory")
    return Check("container limits", OK, ", ".join(shown) or "none on cores or memory")


def check_shared(host: Host) -> Check:
    """Checks /dev/shm, through which NCCL and MPI send within a host."""
    name = "shared memory"
    if host.shared is None:
        return Check(name, UNKNOWN, "there is no /dev/shm")
    text = f"/dev/shm has {show_size(host.shared)}, {show_size(host.shared_free)} free"
    if host.shared_free < _LITTLE_SHARED:
        hint = "Start the container with --shm-size=2g (Docker gives 64 MB), or empty /dev/shm."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def check_files(host: Host, num_workers: int) -> Check:
    """Checks the limit of open files, for connections to all workers and data files."""
    name = "open files"
    wanted = _FEW_FILES + _FILES_PER_WORKER * (num_workers - 1)
    text = f"{host.files} at most, {host.most_files} after `ulimit -n`"
    if host.files < wanted:
        hint = f"ulimit -n {wanted} before training, or raise it in limits.conf."
        status = WARNING if host.files >= _FEW_FILES // 4 else FAILURE
        return Check(name, status, f"{text}; {wanted} are wanted", hint)
    return Check(name, OK, text)


TEST_BYTES = 64_000_000
"""The number of bytes written and read to measure the speed."""

_DISK_S = 60.0
_BLOCK = 4_000_000
_LITTLE_SPACE, _NO_SPACE = 10e9, 1e9
_SLOW_BYTES_PER_S = 30e6
_NO_ANSWER = "See whether the file system answers; use a local one."


def check_workdir(
    workdir: str | os.PathLike[str] | None,
    timeout_s: float = _DISK_S,
    num_bytes: int = TEST_BYTES,
    measure: Callable[[Path, int], tuple[float, float]] | None = None,
) -> list[Check]:
    """Checks the free space and the speed of the folder that training writes to.

    Args:
        workdir: The folder; if it does not exist yet, its nearest existing parent is checked.
        timeout_s: Seconds that writing and reading may take.
        num_bytes: Bytes to write and read.
        measure: Returns the seconds of writing and of reading.
    """
    name, wanted = "work folder", Path(workdir or ".").absolute()
    hint = "Give another --workdir, or write permission there."
    try:
        # A network file system may never answer.
        folder, fault, free = processes.in_thread(lambda: _find_folder(wanted), timeout_s)
    except TimeoutError:
        text = f"{wanted} has not been found in {timeout_s:g} s"
        return [Check(name, FAILURE, text, _NO_ANSWER)]
    except OSError as error:
        return [Check(name, FAILURE, f"{wanted}: {error.strerror or error}", hint)]
    if fault:
        return [Check(name, FAILURE, f"{folder} {fault}", hint)]
    place = str(wanted) if folder == wanted else f"{wanted} (not there yet; {folder})"
    space = _judge_space(place, free)
    if free < 2 * num_bytes:
        return [space, Check("work folder's speed", UNKNOWN, "too little space to try")]
    return [space, _judge_speed(folder, timeout_s, num_bytes, measure or write_and_read)]


def _find_folder(wanted) -> tuple[Path, str, int]:
    """Returns the nearest path that exists, what is wrong with it, and its free bytes."""
    folder = next(each for each in (wanted, *wanted.parents) if each.exists())
    if not folder.is_dir():
        return folder, "is no folder", 0
    if not os.access(folder, os.W_OK | os.X_OK):
        return folder, "may not be written to", 0
    return folder, "", shutil.disk_usage(folder).free


def _judge_space(place, free) -> Check:
    name, text = "work folder", f"{place}: {show_size(free)} free"
    if free < _NO_SPACE:
        return Check(name, FAILURE, text, "Free some space, or give another --workdir.")
    if free < _LITTLE_SPACE:
        hint = "A checkpoint holds the weights and the optimizer's state: 3 times the model."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def _judge_speed(folder, timeout_s, num_bytes, measure) -> Check:
    name = "work folder's speed"
    try:
        # A network file system may never answer.
        seconds = processes.in_thread(lambda: measure(folder, num_bytes), timeout_s)
    except TimeoutError:
        text = f"writing {show_size(num_bytes)} to {folder} has not ended in {timeout_s:g} s"
        return Check(name, FAILURE, text, _NO_ANSWER)
    except OSError as error:
        text = f"{folder}: {error.strerror or error}"
        return Check(name, FAILURE, text, "Give another --workdir.")
    written, read = (num_bytes / duration for duration in seconds)
    text = f"{show_size(written)}/s written to the disk, {show_size(read)}/s read"
    if written < _SLOW_BYTES_PER_S:
        hint = "Checkpoints will hold training up: use a faster disk, or save less often."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, f"{text} ({show_size(num_bytes)})")


def write_and_read(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Returns the seconds to write a file to the disk, and to read it again.

    The file is on the disk (fsync) when writing counts as done; for reading, the system is asked
    to forget it, which not every file system does.
    """
    path = folder / f".tfmulti_doctor_{uuid.uuid4().hex}"
    block = memoryview(os.urandom(min(_BLOCK, num_bytes)))
    try:
        with open(path, "wb", buffering=0) as file:
            began = time.perf_counter()
            left = num_bytes
            while left > 0:
                left -= file.write(block[:left])
            os.fsync(file.fileno())
            written = time.perf_counter() - began
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(_BLOCK):
                pass
            return written, time.perf_counter() - began
    finally:
        path.unlink(missing_ok=True)
