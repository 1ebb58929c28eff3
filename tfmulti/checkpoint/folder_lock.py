"""Keeps a second run from a folder of checkpoints in which one is training."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tfmulti.checkpoint import generations

NAME = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
# A scheduler may start a run again while the one that it has ended is still ending.
_PATIENCE_S = 5.0
# How many locks of this process each file has, with its descriptor: the system ends a lock of a
# process as soon as any descriptor of the file is closed.
_held: dict[Path, tuple[int, int]] = {}


class FolderLock:
    """A lock on a folder, of this process; it ends with the process, however that ends.

    Locks of `fcntl` belong to one process: those that it starts do not hold them. Several locks of
    one process on a folder go together, until the last is released.

    Args:
        print_fn: Function of one line of text.
    """

    def __init__(self, print_fn: Callable[[str], None]):
        self._print_fn, self._path = print_fn, None

    def take(self, folder: Path) -> None:
        """Locks a folder, where its file system has locks.

        Raises:
            CheckpointError: If another process of this host holds it.
        """
        self._take(folder, tries=3)

    def _take(self, folder, tries):
        self.release()
        path = Path(os.path.realpath(folder / NAME))
        descriptor, count = _held.get(path, (None, 0))
        try:
            if descriptor is None:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            # The first checkpoint tells why nothing can be written here.
            return
        if count or _try_for_some_seconds(descriptor):
            # Some file systems number an open file otherwise: the last try takes it as it is.
            if not count and tries > 1 and not _is_at(path, descriptor):
                # The run that held it has ended, and removed the file.
                os.close(descriptor)
                return self._take(folder, tries - 1)
            _held[path], self._path = (descriptor, count + 1), path
            # A full disk has no room for the name, which a message would show.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}".encode(), 0)
            return
        host, _, process = os.pread(descriptor, 1000, 0).decode().rpartition(" ")
        os.close(descriptor)
        if host not in ("", socket.gethostname()):
            # A file system may keep the lock of a host that was lost for minutes, or longer.
            self._print_fn(f"process {process} of {host} may be training with {folder}, too")
            return
        raise generations.CheckpointError(
            "A folder of checkpoints must be used by one run at a time. "
            f"Received: {folder}, with which process {process or 'of another run'} is training. "
            "Wait until that run has ended, or give another folder."
        )

    def release(self) -> None:
        """Lets other processes lock the folder, unless this one has another lock on it."""
        if self._path is not None:
            descriptor, count = _held.pop(self._path)
            if count > 1:
                _held[self._path] = descriptor, count - 1
            else:
                os.close(descriptor)
            self._path = None


def _try_for_some_seconds(descriptor) -> bool:
    """Returns whether the lock was taken, or cannot be."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


def _is_at(path, descriptor) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
