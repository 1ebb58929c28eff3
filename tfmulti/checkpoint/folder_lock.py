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


class FolderLock:
    """A lock on a folder, of this process; it ends with the process, however that ends.

    Locks of `fcntl` belong to one process: those that it starts do not hold them, and two `fit`s of
    one process may use a folder one after the other.

    Args:
        print_fn: Function of one line of text.
    """

    def __init__(self, print_fn: Callable[[str], None]):
        self._print_fn, self._descriptor = print_fn, None

    def take(self, folder: Path) -> None:
        """Locks a folder, where its file system has locks.

        Raises:
            CheckpointError: If another process of this host holds it.
        """
        self.release()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            # The first checkpoint tells why nothing can be written here.
            return
        if self._try_for_some_seconds():
            # A full disk has no room for the name, which a message would show.
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{socket.gethostname()} {os.getpid()}".encode(), 0)
            return
        host, _, process = os.pread(self._descriptor, 1000, 0).decode().rpartition(" ")
        self.release()
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
        """Lets other processes lock the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try_for_some_seconds(self) -> bool:
        """Returns whether the lock was taken, or cannot be."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in _HELD:
                    return True
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
