"""Writes files atomically, and checks folders."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

# Enough for a small model, its checkpoint and its logs; the size of the model is unknown here.
_LEAST_FREE_BYTES = 1_000_000
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_REASONS = {
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EROFS: "its file system is read-only",
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "the quota of this user is used up",
    errno.ENOTDIR: "a part of it is a file",
    errno.EEXIST: "it is a file",
}


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name in the same folder, and renames it when it is whole.

    Args:
        path: The file.
        write: Function that writes to a given path, which has the same suffix.

    Raises:
        OSError: If it cannot be written, with the path and the reason.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(f"{folder}/a.txt", lambda path: path.write_text("whole"))
        ...     print([file.name for file in Path(folder).iterdir()])
        ['a.txt']
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = _REASONS.get(error.errno, error.strerror)
        raise OSError(
            f"A result must be written to disk. Received: {os.fspath(path)!r}: {reason}. "
            "Free disk space or change its permissions, and start the same command again."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_local(name: str, path: str | os.PathLike[str]) -> None:
    """Raises ValueError for the address of a store, which would become a folder of that name.

    Args:
        name: The argument.
        path: Its value.

    >>> check_local("folder", "gs://bucket/run")
    Traceback (most recent call last):
    ValueError: `folder` must be a folder of a file system. Received: folder='gs://bucket/run'. \
Mount the store, or give a local folder and copy it.
    """
    if _ADDRESS.match(os.fspath(path)):
        raise ValueError(
            f"`{name}` must be a folder of a file system. Received: {name}={os.fspath(path)!r}. "
            "Mount the store, or give a local folder and copy it."
        )


def check_folder(name: str, path: str | os.PathLike[str]) -> None:
    """Creates a folder and writes into it, so that an error is raised before training.

    Args:
        name: The argument.
        path: Its value.

    Raises:
        ValueError: If it is a file, read-only or full, or in a store.
    """
    check_local(name, path)
    try:
        _write_into(Path(path))
    except OSError as error:
        reason = _REASONS.get(error.errno, error.strerror)
        raise ValueError(
            f"`{name}` must be a folder that can be written to. "
            f"Received: {name}={os.fspath(path)!r}: {reason}. "
            "Name another folder, free disk space, or change its permissions."
        ) from error


def _write_into(folder):
    """Does what a checkpoint does: writes a file into a new folder, and renames that."""
    probe = folder / f".{os.getpid()}.probe"
    renamed = probe.with_suffix(".renamed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        (probe / "file").write_bytes(b"written")
        os.replace(probe, renamed)
        left = os.statvfs(folder)
        if left.f_bavail * left.f_frsize < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        for path in (probe, renamed):
            shutil.rmtree(path, ignore_errors=True)
