"""What a worker writes: a file of its own, and its lines on the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 16


class Log:
    """The log file of one worker, over all restarts.

    A file and no pipe: a worker never waits for somebody to read what it writes.

    Args:
        path: The file; what it had is gone.
        name: The worker's name, before each line on the terminal.
        shown: Whether its lines go to the terminal.
        terminal: Where they go.
    """

    def __init__(self, path: Path, name: str, shown: bool, terminal: BinaryIO | None = None):
        self.path, self.shown = path, shown
        self._prefix = f"[{name}] ".encode()
        self._terminal = terminal or sys.stdout.buffer
        self._reader = open(path, "w+b")
        self._rest = b""
        self._start = 0

    def open_for_worker(self, heading: str = "") -> BinaryIO:
        """Returns the file for a worker to write to, at its end; the caller closes it."""
        file = open(self.path, "ab")
        if heading:
            file.write(f"{heading}\n".encode())
            file.flush()
        self._start = self.path.stat().st_size
        return file

    def show_new(self) -> None:
        """Shows the whole lines that are new."""
        while self.shown and (piece := self._reader.read(_PIECE)):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._write(lines)

    def show_rest(self) -> None:
        """Shows what is new, and a last line without an end too."""
        self.show_new()
        if self._rest:
            self._write([self._rest])
            self._rest = b""

    def since_start(self, most: int = 1 << 20) -> str:
        """Returns what the worker has written since it was last started, or the end of it.

        Args:
            most: Bytes at most.
        """
        with open(self.path, "rb") as file:
            file.seek(max(self._start, self.path.stat().st_size - most))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def _write(self, lines):
        try:
            for line in lines:
                self._terminal.write(self._prefix + line + b"\n")
            self._terminal.flush()
        except (OSError, ValueError):  # The terminal, or who read from the pipe, has gone.
            self.shown = False


@contextlib.contextmanager
def open_logs(folder: Path, names: dict[int, str], all_output: bool, create=Log):
    """Opens the log of each worker; that of worker 0, the chief, is shown, or all are.

    Args:
        folder: Where `worker_0.log` and so on go.
        names: The workers' names, by index.
        all_output: Whether all are shown.
        create: What makes one, as `Log`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = {
        index: create(folder / f"{name.replace(' ', '_')}.log", name, all_output or index == 0)
        for index, name in names.items()
    }
    try:
        yield logs
    finally:
        for log in logs.values():
            log.show_rest()
            log.close()
