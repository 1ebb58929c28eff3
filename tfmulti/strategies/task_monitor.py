"""Which workers and servers of a job are there, as the chief sees it."""

from __future__ import annotations

import queue
import threading
import time

from tfmulti.cluster import Cluster
from tfmulti.cluster.task import SERVER_TYPE
from tfmulti.rendezvous import find_timeout
from tfmulti.strategies.parameter_server import (
    WorkersLost,
    is_reachable,
    lost_error,
    task_names,
)

_EVERY_S = 1.0
_LOOKS = 3


class TaskMonitor:
    """Looks in a thread whether each task listens, and tells of those that go and come.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: Cluster):
        self._addresses = task_names(cluster)
        self._misses = dict.fromkeys(self._addresses, 0)
        self._news: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._patience_s = find_timeout(None)
        self._without_workers_since: float | None = None

    def start(self) -> None:
        """Begins."""
        threading.Thread(target=self._look, daemon=True, name="tfmulti monitor").start()

    def stop(self) -> None:
        """Ends, without waiting for the thread."""
        self._stopped.set()

    def news(self) -> list[str]:
        """Returns what has happened since the last call, in sentences."""
        lines = []
        while True:
            try:
                lines.append(self._news.get_nowait())
            except queue.Empty:
                return lines

    def check(self) -> None:
        """Raises if training cannot go on.

        Raises:
            ServerLost: If a server has gone.
            WorkersLost: If all workers have gone, and none has come back in the time that tasks
                wait for one another.
        """
        gone = [name for name, misses in self._misses.items() if misses >= _LOOKS]
        servers = [name for name in gone if name.startswith(SERVER_TYPE)]
        if servers:
            raise lost_error(f"{name} ({self._addresses[name]})" for name in servers)
        if len([name for name in gone if name.startswith("worker")]) < self._num_workers:
            self._without_workers_since = None
            return
        now = time.monotonic()
        since = self._without_workers_since = self._without_workers_since or now
        if now - since > self._patience_s:
            raise WorkersLost(
                "At least one worker must be there to compute steps. Received: no worker since "
                f"{self._patience_s + _LOOKS:.0f} s. Start workers again, or with the launcher's "
                "--max_restarts have it do so."
            )

    @property
    def _num_workers(self) -> int:
        return len([name for name in self._addresses if name.startswith("worker")])

    def _look(self):
        while not self._stopped.wait(_EVERY_S):
            for name, address in self._addresses.items():
                self.note(name, is_reachable(address))

    def note(self, name: str, is_there: bool) -> None:
        """Notes whether a task has answered; one that did not several times has gone."""
        self._misses[name] = 0 if is_there else self._misses[name] + 1
        if name.startswith("worker") and self._misses[name] == _LOOKS:
            self._news.put(
                f"{name} ({self._addresses[name]}) is lost: others compute its step under way "
                "again, and no example is left out"
            )
