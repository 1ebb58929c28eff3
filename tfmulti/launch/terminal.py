"""The launcher's standard output and standard error, for which it never waits while it works.

A reader may stop reading: a pager that waits for a key, a frozen ssh, the log driver of a
container. A launcher that waited for it would not see a worker fail, and would forward no signal.
So a thread writes to each of the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
import threading
import time
from collections import deque

STALLED_S = 3.0
"""Seconds without a byte read after which a reader is no longer waited for."""

# Bytes that wait for a reader; the rest of the workers' output waits in their log files.
_LARGEST = 1 << 20
# Linux takes as much at once when it calls a pipe writable, so that a slow reader is seen to read.
_PAGE = 4096
_POLL_S = 0.1


@dataclasses.dataclass
class _Stream:
    """What waits to be written to one file descriptor, each with its place in the order."""

    file: int
    waiting: deque[tuple[int, bytes]] = dataclasses.field(default_factory=deque)
    size: int = 0
    # Of the first that waits, what has been written; and when the call that now writes began.
    written: int = 0
    began: float | None = None
    left_out: int = 0
    is_gone: bool = False

    def is_stalled(self) -> bool:
        began = self.began
        return began is not None and time.monotonic() - began >= STALLED_S

    def write_first(self) -> None:
        data = memoryview(self.waiting[0][1])
        while self.written < len(data):
            self.began = time.monotonic()
            try:
                self.written += os.write(self.file, data[self.written : self.written + _PAGE])
            except BlockingIOError:  # Another program has made what both write to non-blocking.
                select.select([], [self.file], [])

    def lines_left(self) -> int:
        waiting = sum(data.count(b"\n") for _, data in self.waiting)
        return waiting - (self.waiting[0][1].count(b"\n", 0, self.written) if waiting else 0)


class Output:
    """Standard output, for the lines of the workers, and standard error, for the launcher's.

    Lines appear in the order of the calls; standard output and standard error wait for one another,
    unless one of them is stalled.
    """

    def __init__(self):
        self._changed, self._number = threading.Condition(), 0
        self._out, self._err = _open(sys.stdout), _open(sys.stderr)
        for stream, other in ((self._out, self._err), (self._err, self._out)):
            threading.Thread(target=self._pass_on, args=(stream, other), daemon=True).start()

    def write(self, data: bytes) -> None:
        """Writes lines to standard output.

        Raises:
            BrokenPipeError: Where its reader has gone.
        """
        if self._out.is_gone:
            raise BrokenPipeError
        self._put(self._out, data)

    def flush(self) -> None:
        """Does nothing: what was written is passed on at once."""

    def print_error(self, text: str) -> None:
        """Prints to standard error; nothing where its reader has gone."""
        self._put(self._err, f"{text}\n".encode(errors="backslashreplace"))

    def has_room(self, limit_s: float = 0.0) -> bool:
        """Returns whether `write` leaves no line out.

        Args:
            limit_s: Seconds to wait for that, at most; a stalled reader is not waited for.
        """
        until = time.monotonic() + limit_s
        with self._changed:
            while self._out.size >= _LARGEST:
                if time.monotonic() >= until or self._out.is_stalled():
                    return False
                self._changed.wait(_POLL_S)
        return True

    def drain(self) -> int:
        """Waits until all is written, or the reader is stalled.

        Returns:
            How many lines of standard output still wait.
        """
        with self._changed:
            while any(each.waiting and not each.is_stalled() for each in (self._out, self._err)):
                self._changed.wait(_POLL_S)
            return self._out.lines_left()

    def _put(self, stream, data):
        with self._changed:
            if stream.is_gone:
                return
            if stream.size >= _LARGEST:
                stream.left_out += data.count(b"\n")
                return
            if stream.left_out:
                data = f"({stream.left_out} lines are left out here)\n".encode() + data
                stream.left_out = 0
            self._number += 1
            stream.waiting.append((self._number, data))
            stream.size += len(data)
            self._changed.notify_all()

    def _pass_on(self, stream, other):
        while True:
            with self._changed:
                while not _is_due(stream, other):
                    self._changed.wait(_POLL_S if stream.waiting else None)
            try:
                stream.write_first()
            except OSError:  # The terminal, or the reader of the pipe, has gone.
                stream.is_gone = True
            with self._changed:
                stream.size -= len(stream.waiting.popleft()[1])
                if stream.is_gone:
                    stream.waiting.clear()
                    stream.size = 0
                stream.written, stream.began = 0, None
                self._changed.notify_all()


def _open(file) -> _Stream:
    """Python's own object would be locked while a thread waits in it, also when Python ends."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        file.flush()
        return _Stream(file.fileno())
    return _Stream(-1, is_gone=True)


def _is_due(stream, other) -> bool:
    if not stream.waiting:
        return False
    return not other.waiting or stream.waiting[0] < other.waiting[0] or other.is_stalled()
