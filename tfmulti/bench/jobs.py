"""One job: the processes of one configuration, started once, and the driver's orders to them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path

from tfmulti.bench import control
from tfmulti.bench.setups import FOLDER, Setup
from tfmulti.launch.group import Group
from tfmulti.launch.logs import Ended, log_tail, open_logs

_LOOK_S = 0.1
_END_S = 15.0


class JobFailed(Exception):
    """A configuration does not run; the message has the tail of its log."""


class Job:
    """The processes of a configuration. Use it in a `with` statement, which none outlives.

    They are started in `start` and not before. Each runs under a guard of `tfmulti.launch`, so
    that all are ended even where the driver is killed.

    Args:
        setup: What to start.
        folder: Where the processes' output goes.
        timeout_s: Seconds to wait for all to be ready, and for each order.

    Attributes:
        facts: What each process said of itself, in order.
        began: When it was started, by `time.perf_counter()`.
    """

    def __init__(self, setup: Setup, folder: Path, timeout_s: float):
        self.setup, self._folder, self._timeout_s = setup, folder, timeout_s
        self._stack = contextlib.ExitStack()
        self._events: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._connections: dict[int, Connection] = {}
        self.facts: list[dict] = []
        self.began = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self) -> None:
        """Starts the processes, and waits until all are ready.

        Raises:
            JobFailed: Where one ends first, or time is over.
        """
        key = secrets.token_bytes(32)
        arrivals: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        address = self._stack.enter_context(_listening(key, arrivals))
        own = {control.ADDRESS: f"127.0.0.1:{address[1]}", control.KEY: key.hex()}
        environments = {
            index: {**os.environ, **variables, **own}
            for index, variables in enumerate(self.setup.environments)
        }
        names = {index: f"process {index}" for index in environments}
        # The log of process 0 would be shown on the terminal.
        logs = self._stack.enter_context(open_logs(self._folder, names, False))
        logs[0].shown = False
        self._logs = logs
        self.began = time.perf_counter()
        folder = str(self._folder / "workers")
        command = [part.replace(FOLDER, folder) for part in self.setup.command]
        group = Group(command, environments, logs, self._events)
        self._stack.enter_context(group)
        self._collect(arrivals)

    def _collect(self, arrivals):
        waiting: list[Connection] = []
        found = {}
        limit = time.monotonic() + self._timeout_s
        while len(found) < self.setup.processes:
            with contextlib.suppress(queue.Empty):
                waiting.append(arrivals.get(timeout=_LOOK_S))
            for connection in wait(waiting, 0):
                waiting.remove(connection)
                with contextlib.suppress(EOFError, OSError):
                    fact = connection.recv()
                    found[fact["index"]] = (connection, fact)
            self._check(limit, "to start")
        self._connections = {index: found[index][0] for index in sorted(found)}
        self.facts = [found[index][1] for index in sorted(found)]

    def train(self, **order) -> list[dict[str, list[float]]]:
        """Makes all processes execute an order at the same time.

        Args:
            **order: What to do, as `steps=30`.

        Returns:
            What each process measured, in order.

        Raises:
            JobFailed: Where one ends, or time is over.
        """
        answers = {}
        limit = time.monotonic() + self._timeout_s
        try:
            for connection in self._connections.values():
                connection.send(order)
            while len(answers) < len(self._connections):
                left = [c for index, c in self._connections.items() if index not in answers]
                for connection in wait(left, _LOOK_S):
                    index = next(i for i, c in self._connections.items() if c is connection)
                    answers[index] = connection.recv()
                self._check(limit, f"for {order}")
        except (EOFError, OSError):
            # It has closed the connection, and exits soon; then its log is complete.
            time_left = min(limit, time.monotonic() + _END_S)
            while True:
                self._check(time_left, f"for {order}")
                time.sleep(_LOOK_S)
        return [answers[index] for index in sorted(answers)]

    def end(self) -> None:
        """Orders the processes to exit, waits for them, and kills those that do not exit."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(None)
        limit = time.monotonic() + _END_S
        with contextlib.suppress(queue.Empty):
            for _ in self.setup.environments:
                self._events.get(timeout=max(0.0, limit - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills the processes and all their children."""
        self._stack.close()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _check(self, limit, what):
        with contextlib.suppress(queue.Empty):
            ended = self._events.get_nowait()
            raise JobFailed(
                self._last_words(ended.index) or f"process {ended.index} {ended.describe()}"
            )
        if time.monotonic() > limit:
            words = self._last_words()
            raise JobFailed(f"no answer within {self._timeout_s:g} s {what}\n{words}".strip())

    def _last_words(self, first: int = 0) -> str:
        for index in sorted(self._logs, key=lambda index: index != first):
            words = log_tail(self._logs[index].since_start())
            if words.strip():
                return words
        return ""


@contextlib.contextmanager
def _listening(key, arrivals):
    """Accepts connections that know the key, and puts them into a queue."""
    listener = Listener(("127.0.0.1", 0), backlog=128, authkey=key)
    closed = threading.Event()

    def accept():
        while not closed.is_set():
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                arrivals.put(listener.accept())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.address
    finally:
        closed.set()
        # Only another connection wakes a thread in `accept`.
        with contextlib.suppress(OSError):
            socket.create_connection(listener.address, timeout=1.0).close()
        thread.join(1.0)
        listener.close()
