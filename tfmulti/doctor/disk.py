"""Checks the work folder: permission to write, free space, speed."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, megabytes
from tfmulti.doctor.tensorflow_process import in_time

TEST_BYTES = 64_000_000
"""The number of bytes written and read to measure the speed."""

TIMEOUT_S = 60.0
_BLOCK = 4_000_000
_LITTLE_SPACE, _NO_SPACE = 10e9, 1e9
_SLOW_BYTES_PER_S = 30e6


def check_workdir(
    workdir: str | os.PathLike[str] | None,
    timeout_s: float = TIMEOUT_S,
    num_bytes: int = TEST_BYTES,
    measure: Callable[[Path, int], tuple[float, float]] | None = None,
) -> list[Check]:
    """Checks the free space and the speed of the folder that training writes to.

    Args:
        workdir: The folder; where it is not there yet, the nearest one above it is looked at.
        timeout_s: Seconds that writing and reading may take.
        num_bytes: Bytes to write and read.
        measure: Returns the seconds of writing and of reading.
    """
    asked = Path(workdir or ".").absolute()
    folder = next(each for each in (asked, *asked.parents) if each.exists())
    place = str(asked) if folder == asked else f"{asked} (not there yet; {folder})"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        fault = "is no folder" if not folder.is_dir() else "may not be written to"
        hint = "Give another --workdir, or write permission there."
        return [Check("work folder", FAILURE, f"{folder} {fault}", hint)]
    free = shutil.disk_usage(folder).free
    space = _judge_space(place, free)
    if free < 2 * num_bytes:
        return [space, Check("work folder's speed", UNKNOWN, "too little space to try")]
    return [space, _judge_speed(folder, timeout_s, num_bytes, measure or write_and_read)]


def _judge_space(place, free) -> Check:
    name, text = "work folder", f"{place}: {megabytes(free)} free"
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
        seconds = in_time(lambda: measure(folder, num_bytes), timeout_s)
    except TimeoutError:
        text = f"writing {megabytes(num_bytes)} to {folder} has not ended in {timeout_s:g} s"
        return Check(name, FAILURE, text, "See whether the file system answers; use a local one.")
    except OSError as error:
        text = f"{folder}: {error.strerror or error}"
        return Check(name, FAILURE, text, "Give another --workdir.")
    written, read = (num_bytes / each for each in seconds)
    text = f"{megabytes(written)}/s written to the disk, {megabytes(read)}/s read"
    if written < _SLOW_BYTES_PER_S:
        hint = "Checkpoints will hold training up: use a faster disk, or save less often."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, f"{text} ({megabytes(num_bytes)})")


def write_and_read(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Returns the seconds that writing a file to the disk, and reading it again, take.

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
