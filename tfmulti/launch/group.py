"""Starts all workers of this machine once, each under a supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmulti.launch import supervisor
from tfmulti.launch.logs import Log, WorkerExit

_KILL_TIMEOUT_S = 10.0


@dataclasses.dataclass
class _Worker:
    process: subprocess.Popen
    lifeline: int
    waiter: threading.Thread


class Group:
    """The workers of one start. Use it in a `with` statement; when that ends, all workers are dead.

    Args:
        command: The program and its arguments.
        environments: For each worker's index, the variables to set besides this process's; None
            removes one.
        logs: For each worker's index, its log.
        events: A queue that receives a `WorkerExit` for each worker that ends.
        heading: A line for the logs, before the output of the workers.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Mapping[int, Mapping[str, str | None]],
        logs: Mapping[int, Log],
        events: queue.SimpleQueue,
        heading: str = "",
    ):
        self._command, self._environments, self._logs = list(command), environments, logs
        self._events, self._heading = events, heading
        self._workers: list[_Worker] = []

    def __enter__(self):
        try:
            for index, variables in self._environments.items():
                self._workers.append(self._start(index, variables))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_):
        self.kill()

    def start_again(self, index: int, heading: str, more: Mapping[str, str]) -> None:
        """Restarts a worker that has ended.

        Args:
            index: Its index.
            heading: A line for its log.
            more: Variables to set besides those of its first start.
        """
        self._heading = heading
        variables = {**self._environments[index], **more}
        local_index = list(self._environments).index(index)
        old, self._workers[local_index] = self._workers[local_index], self._start(index, variables)
        os.close(old.lifeline)

    def send(self, signum: int) -> None:
        """Sends a signal to each worker that still runs."""
        for worker in self._workers:
            worker.process.send_signal(signum)

    def kill(self) -> None:
        """Kills all workers and their child processes, and waits until all are gone."""
        for worker in self._workers:
            if worker.lifeline >= 0:
                os.close(worker.lifeline)
                worker.lifeline = -1
        limit = time.monotonic() + _KILL_TIMEOUT_S
        for worker in self._workers:
            worker.waiter.join(max(0.0, limit - time.monotonic()))
            if worker.waiter.is_alive():  # Something of it cannot be killed now.
                worker.process.kill()

    def _start(self, index, variables) -> _Worker:
        environ = {**os.environ, **variables}
        worker_end, lifeline = os.pipe()
        try:
            with self._logs[index].open_for_worker(self._heading) as log:
                process = subprocess.Popen(
                    # -I and -S: the user's environment cannot keep the supervisor from starting.
                    [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), str(worker_end)]
                    + self._command,
                    env={name: value for name, value in environ.items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[worker_end],
                    # Only the launcher receives Ctrl-C, and forwards it.
                    start_new_session=True,
                )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(worker_end)
        began = time.monotonic()

        def wait():
            returncode = process.wait()
            self._events.put(WorkerExit(index, returncode, time.monotonic() - began))

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        return _Worker(process, lifeline, waiter)


@contextlib.contextmanager
def signals_as_events(events: queue.SimpleQueue):
    """Puts the number of each SIGTERM, SIGINT and SIGHUP into a queue within the context.

    A signal that is already ignored, such as SIGHUP under `nohup`, stays ignored. Python delivers
    signals to its main thread only; in another thread the queue stays empty.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda received, _: events.put(received))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
