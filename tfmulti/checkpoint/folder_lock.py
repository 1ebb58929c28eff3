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

    def take(self, folder: Path, *, removes: bool = False) -> None:
        """Locks a folder, where its file system has locks.

        Args:
            folder: The folder.
            removes: Whether the run will remove what earlier runs have left there.

        Raises:
            CheckpointError: If another process of this machine holds it, in whatever container; or
                one of another machine, if `removes`.
        """
        self._take(folder, removes, tries=3)

    def _take(self, folder, removes, tries):
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
            # Some network file systems report another inode for an open file: the last try
            # does not compare.
            if not count and tries > 1 and not _is_at(path, descriptor):
                # The run that held it has ended, and removed the file.
                os.close(descriptor)
                return self._take(folder, removes, tries - 1)
            _held[path], self._path = (descriptor, count + 1), path
            # A full disk has no room for the name, which a message would show.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, " ".join(_describe_process()).encode(), 0)
            return
        held_by = os.pread(descriptor, 1000, 0).decode().split()
        os.close(descriptor)
        who = f"process {held_by[1]} of host {held_by[0]}" if held_by[1:] else "another run"
        # A file system may keep the lock of a machine that was lost for minutes, or longer.
        is_elsewhere = bool(held_by) and held_by[-1] != _describe_process()[-1]
        if is_elsewhere and not removes:
            self._print_fn(
                f"{folder} is locked by {who}, which may still be training there. If that host is "
                "down, ignore this"
            )
            return
        raise generations.CheckpointError(
            "A folder of checkpoints must be used by one run at a time. "
            f"Received: {folder}, with which {who} is training. "
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


def _describe_process() -> tuple[str, str, str]:
    """Returns this process's host, number and machine.

    Containers of one machine have host names of their own; and a pod that replaces one on a lost
    machine has its host name.
    """
    machine = socket.gethostname()
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), str(os.getpid()), machine


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
