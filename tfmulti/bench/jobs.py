"""One job: the processes of one configuration, started once, and the driver's orders to them.

The driver and its processes speak through named pipes, a line of JSON for each order and answer.
A file such as `result.json` would not do: it is written once, at the end, and here a block of steps
is ordered every second. Nor would TensorFlow's own exchange of keys, for what is measured without
TensorFlow. A process that waits at a pipe uses no processor, and begins at once, with the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import tempfile
import time
from pathlib import Path

from tfmulti.bench.setups import FOLDER, Setup
from tfmulti.bench.worker import INDEX, PIPES
from tfmulti.launch.group import Group
from tfmulti.launch.logs import WorkerExit, log_tail, open_logs

ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1"}
"""Hides GPUs: some configurations would use them, and others would not."""
_POLL_S = 0.1
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
        self._ended: queue.SimpleQueue[WorkerExit] = queue.SimpleQueue()
        self._orders: list = []
        self._answers: list = []
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
        pipes = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tfmulti_bench_"))
        for index in range(self.setup.processes):
            self._open_pipes(Path(pipes), index)
        environments = {
            index: {**ON_CPU, **variables, PIPES: pipes}
            for index, variables in enumerate(self.setup.environments)
        }
        if len(environments) == self.setup.processes:
            for index, variables in environments.items():
                variables[INDEX] = str(index)
        names = {index: f"process {index}" for index in environments}
        logs = self._stack.enter_context(open_logs(self._folder, names, False))
        # The log of process 0 would be shown on the terminal.
        logs[0].shown = False
        self._logs = logs
        self.began = time.perf_counter()
        folder = str(self._folder / "workers")
        command = [part.replace(FOLDER, folder) for part in self.setup.command]
        self._stack.enter_context(Group(command, environments, logs, self._ended))
        self.facts = self._read_all("to start")

    def _open_pipes(self, folder, index):
        orders, answers = folder / f"orders_{index}", folder / f"answers_{index}"
        os.mkfifo(orders)
        os.mkfifo(answers)
        # To open it for both needs no process at the other end yet.
        self._orders.append(open(os.open(orders, os.O_RDWR), "w", buffering=1))
        # Nor does this; and when the process has gone, there is an end to read.
        reader = os.open(answers, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        self._answers.append(open(reader))
        for file in (self._orders[-1], self._answers[-1]):
            self._stack.callback(file.close)

    def train(self, **order) -> list[dict]:
        """Makes all processes execute an order at the same time.

        Args:
            **order: What to do, as `steps=30`.

        Returns:
            What each process measured, in order.

        Raises:
            JobFailed: Where one ends, or time is over.
        """
        self._write_all(order)
        return self._read_all(f"for {order}")

    def _write_all(self, order):
        for file in self._orders:
            file.write(json.dumps(order) + "\n")

    def _read_all(self, what) -> list[dict]:
        lines: dict = {}
        limit = time.monotonic() + self._timeout_s
        while len(lines) < len(self._answers):
            waiting = [file for file in self._answers if file not in lines]
            for file in select.select(waiting, [], [], _POLL_S)[0]:
                if line := file.readline():
                    lines[file] = line
                else:
                    # It has closed the pipe, and exits soon; then its log is complete.
                    limit = min(limit, time.monotonic() + _END_S)
                    time.sleep(_POLL_S)
            self._check(limit, what)
        return [json.loads(lines[file]) for file in self._answers]

    def end(self) -> None:
        """Orders the processes to exit, waits for them, and kills those that do not exit."""
        self._write_all(None)
        limit = time.monotonic() + _END_S
        with contextlib.suppress(queue.Empty):
            for _ in self.setup.environments:
                self._ended.get(timeout=max(0.0, limit - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills the processes and all their children."""
        self._stack.close()
        self._orders, self._answers = [], []

    def _check(self, limit, what):
        with contextlib.suppress(queue.Empty):
            ended = self._ended.get_nowait()
            raise JobFailed(
                self._last_output(ended.index) or f"process {ended.index} {ended.describe()}"
            )
        if time.monotonic() > limit:
            words = self._last_output()
            raise JobFailed(f"no answer within {self._timeout_s:g} s {what}\n{words}".strip())

    def _last_output(self, first: int = 0) -> str:
        for index in sorted(self._logs, key=lambda index: index != first):
            words = log_tail(self._logs[index].since_start())
            if words.strip():
                return words
        return ""
