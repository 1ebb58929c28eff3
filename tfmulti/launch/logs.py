"""The log of each worker, its tail, and which worker failed first."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tfmulti.cluster import environment
from tfmulti.launch.terminal import Output
from tfmulti.runtime import processes

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"(^|\s)error: ")
# Lines of C++ and absl logs, which follow a traceback without an empty line.
_LOG_LINE = re.compile(r"([IWEF]\d{4} |\d{4}-\d\d-\d\d |\(--traceback)")
# Python's marks below a line of generated code are not indented.
_OF_FRAME = re.compile(r" |[~^]+$")
_MAX_LINES = 40
_MAX_MESSAGE_LINES = 12
_LAST_LINES = 5
_LARGEST_OUTPUT = 1 << 20


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """A worker that has ended.

    Attributes:
        index: Its index.
        returncode: Its exit code; negative where a signal ended it.
        seconds: Seconds from its start to its end.
    """

    index: int
    returncode: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 plus the number of a signal."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def describe(self) -> str:
        """Describes how it ended.

        Example:
        >>> WorkerExit(1, -9, 12.3).describe(), WorkerExit(1, 3, 0.5).describe()
        ('was ended by SIGKILL after 12.3 s', 'failed with exit code 3 after 0.5 s')
        """
        if self.returncode < 0:
            name = processes.signal_name(-self.returncode)
            return f"was ended by {name} after {self.seconds:.1f} s"
        return f"failed with exit code {self.returncode} after {self.seconds:.1f} s"


def first_failure(ended: Sequence[WorkerExit]) -> WorkerExit | None:
    """Returns the first worker that failed; one that lost a peer only if no other failed.

    Example:
    >>> first_failure([WorkerExit(0, 144, 1.0), WorkerExit(2, 0, 1.1), WorkerExit(1, 1, 1.2)]).index
    1
    """
    failed = [exited for exited in ended if exited.returncode]
    causes = [each for each in failed if each.returncode != environment.PEER_LOST]
    return next(iter(causes or failed), None)


def log_tail(text: str) -> str:
    r"""Returns the traceback or the error at the end of a log, else its last lines.

    Example:
    >>> log_tail("Epoch 1\nerror: No data. Received: 0.\n(--traceback shows more)\n")
    'error: No data. Received: 0.'
    """
    lines = text.splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    block = [] if start is None else _read_traceback(lines[start:])
    after = 0 if start is None else start + len(block)
    errors = [i for i in range(after, len(lines)) if _ERROR.search(lines[i].lower())]
    if errors:
        block = _read_message(lines[errors[-1] :])
    elif not block:
        block = lines[-_LAST_LINES:]
    if len(block) > _MAX_LINES:
        block = [block[0], "  ...", *block[-_MAX_LINES:]]
    return "\n".join(block)


def _read_traceback(lines) -> list[str]:
    """Takes the frames, which are indented, and the message after them."""
    frames = 1
    while frames < len(lines) and _OF_FRAME.match(lines[frames]):
        frames += 1
    return lines[:frames] + _read_message(lines[frames:])


def _read_message(lines) -> list[str]:
    """Takes an error's line and those after it: messages of TensorFlow have empty lines too."""
    message = lines[:1]
    for line in lines[1:_MAX_MESSAGE_LINES]:
        if _LOG_LINE.match(line):
            break
        message.append(line)
    while message and not message[-1].strip():
        message.pop()
    return message


_PIECE = 1 << 16
# Pieces shown by one call, so that a worker that writes without end does not hold the caller up.
_MOST_PIECES = 64
# Seconds between two pictures of a progress bar, each of which is a line on the terminal.
_BAR_S = 2.0
# A line of TensorFlow's runtime, such as "E0000 00:00:17 collective.cc:8] ...": kept in the file
# alone, since the launcher says in one sentence what it comes to.
_RUNTIME_LINE = re.compile(rb"[IWEF]\d{4} \d\d:\d\d:\d+|WARNING: All log messages before absl")


# The line before what the second launcher with the same log file has added, and so on.
_START = "--- start {} of the launcher, {} ---"


class Log:
    """The log file of one worker, over all restarts.

    It is a file and not a pipe, so that a worker never waits for a reader. Of a line that is drawn
    over again and again, as Keras's progress bar is, the terminal shows some pictures and the last.

    Args:
        path: The file. One that a launcher has left is continued, after a line with the number and
            the time of this start: it may tell why the launcher was started again.
        name: The worker's name, before each line on the terminal.
        shown: Whether its lines go to the terminal.
        terminal: Where they go.
        has_room: Function that waits for room on the terminal, as `terminal.Output.has_room`:
            without room, output stays in the file until there is.

    Attributes:
        left_out: Lines that the terminal has not shown, once the log is closed.

    Raises:
        ValueError: If another launcher writes to the file.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        shown: bool,
        terminal: BinaryIO | Output | None = None,
        has_room: Callable[[float], bool] = lambda limit_s: True,
    ):
        self.path, self.shown, self.left_out = path, shown, 0
        self._prefix = f"[{name}] ".encode()
        self._terminal, self._has_room = terminal or sys.stdout.buffer, has_room
        self._reader = open(path, "a+b")
        _lock(self._reader)
        self._begin()
        self._rest = self._bar = b""
        self._last_shown = -_BAR_S
        self._start = 0

    def open_for_worker(self, heading: str = "") -> BinaryIO:
        """Returns the file for a worker to write to, at its end; the caller closes it."""
        file = open(self.path, "ab")
        if heading:
            file.write(_as_line(heading, self.path))
            file.flush()
        self._start = self.path.stat().st_size
        return file

    def _begin(self):
        """Writes the line that separates this launcher's output from an earlier one's, if any."""
        self._reader.seek(0)
        begins = _START.partition("{")[0].encode()
        number = 2 + sum(line.startswith(begins) for line in self._reader)
        if self._reader.tell():
            heading = _START.format(number, time.strftime("%Y-%m-%d %H:%M:%S %z"))
            self._reader.write(_as_line(heading, self.path))
        self._reader.seek(0, os.SEEK_END)

    def show_new(self) -> None:
        """Shows new complete lines, and now and then how far a progress bar has come."""
        for _ in range(_MOST_PIECES):
            if not (self.shown and self._has_room(0.0) and self._show_piece()):
                break
        if _last_picture(self._bar).strip() and time.monotonic() >= self._last_shown + _BAR_S:
            self._write([self._bar])
            self._bar = b""

    def _show_piece(self) -> bool:
        """Shows the next piece of the file; returns whether there was one."""
        piece = self._reader.read(_PIECE)
        *lines, rest = (self._rest + piece).split(b"\n")
        if lines:
            self._write(lines)
            self._bar = b""
        # Only the picture that is being drawn is kept: the whole line of an epoch is megabytes.
        before, again, _ = rest.rstrip(b"\r").rpartition(b"\r")
        self._bar = before if again else self._bar
        self._rest = rest[len(before + again) :]
        return bool(piece)

    def show_rest(self, limit_s: float = math.inf) -> None:
        """Shows all new output, including an incomplete last line.

        Args:
            limit_s: Seconds to wait for a slow reader of the terminal; what it has not read then
                is shown later.
        """
        limit = time.monotonic() + limit_s
        while self.shown:
            if not self._has_room(limit - time.monotonic()):
                return
            if not self._show_piece():
                break
        if self._rest:
            self._write([self._rest])
        self._rest = self._bar = b""

    def since_start(self) -> str:
        """Returns the output of the worker since its last start, or the end of a long one."""
        with open(self.path, "rb") as file:
            file.seek(max(self._start, self.path.stat().st_size - _LARGEST_OUTPUT))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Closes the file."""
        while self.shown and (piece := self._rest + self._reader.read(_PIECE)):
            self._rest = b""
            self.left_out += piece.count(b"\n")
        self._reader.close()

    def _write(self, lines):
        lines, self._last_shown = map(_last_picture, lines), time.monotonic()
        asked_for = os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0"
        lines = [line for line in lines if asked_for or not _RUNTIME_LINE.match(line)]
        try:
            self._terminal.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._terminal.flush()
        except (OSError, ValueError):  # The terminal, or the reader of the pipe, has gone.
            self.shown = False


def _last_picture(line: bytes) -> bytes:
    """Returns what a terminal shows of a line that begins anew after each carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].replace(b"\b", b"")


def _as_line(heading, path) -> bytes:
    """Returns a heading as a line of its own, also after one without an end."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return (b"\n" if file.read() not in (b"", b"\n") else b"") + f"{heading}\n".encode()


def _lock(file):
    """Locks a file until it is closed, where its file system can."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(
            "`log_dir` must be a folder to which no other launcher writes the same logs. "
            f"Received: {file.name}, to which another one writes now. "
            "Use another --log_dir, or end the other launcher."
        ) from None
    except OSError:
        pass


@contextlib.contextmanager
def open_logs(folder: Path, names: dict[int, str], all_output: bool, create=Log):
    """Opens the log of each worker; that of worker 0, the chief, is shown, or all are.

    Args:
        folder: Where `worker_0.log` and so on go.
        names: The workers' names, by index.
        all_output: Whether all are shown.
        create: Function that creates a log, such as `Log`.

    Raises:
        ValueError: If another launcher writes to one of the logs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs: dict[int, Log] = {}
    try:
        for index, name in names.items():
            path = folder / f"{name.replace(' ', '_')}.log"
            logs[index] = create(path, name, all_output or index == 0)
        yield logs
    finally:
        for log in logs.values():
            log.show_rest()
            log.close()
