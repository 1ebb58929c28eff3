"""Monitors, on the chief, which workers and servers of a job are running."""

from __future__ import annotations

import queue
import threading
import time

from tfmulti.cluster import Cluster
from tfmulti.cluster.peers import MISSES, NO_ANSWER, Presence, probe
from tfmulti.cluster.task import SERVER_TYPE
from tfmulti.strategies.parameter_server import (
    ServerLost,
    WorkersLost,
    end_stuck_chief,
    lost_error,
    task_names,
)

_EVERY_S = 1.0
# A program that has not ended by then is waiting in TensorFlow for a task that has gone.
_STUCK_S = 5.0


class TaskMonitor:
    """Checks in a thread whether each task answers, and reports those that are lost.

    Args:
        cluster: The cluster.
        start_timeout_s: Seconds to wait for a worker once all are lost.
        heartbeat_timeout_s: Seconds without an answer after which a task counts as lost.
    """

    def __init__(self, cluster: Cluster, start_timeout_s: float, heartbeat_timeout_s: float):
        self._tasks = {
            name: Presence(address, heartbeat_timeout_s)
            for name, address in task_names(cluster).items()
        }
        self._lost: dict[str, str] = {}
        self._news: queue.SimpleQueue = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._patience_s = start_timeout_s
        self._without_workers_since: float | None = None
        self._ending_since: float | None = None

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._look, daemon=True, name="tfmulti monitor").start()

    def stop(self) -> None:
        """Stops the thread without waiting for it, since a frozen task could delay that."""
        self._stopped.set()

    def news(self) -> list[str]:
        """Returns a sentence for each worker that was lost since the last call."""
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
            WorkersLost: If a worker is frozen or cut off, since TensorFlow would wait for it
                forever; or if all workers have gone and none has returned within the time that
                tasks wait for one another.
        """
        if (error := self._find_error()) is not None:
            raise error
        workers = [name for name in self._tasks if name.startswith("worker")]
        if any(name not in self._lost for name in workers):
            self._without_workers_since = None
            return
        now = time.monotonic()
        since = self._without_workers_since = self._without_workers_since or now
        if now - since > self._patience_s:
            raise WorkersLost(
                "At least one worker must be running. Received: no worker for "
                f"{self._patience_s + MISSES:.0f} s. Restart the workers, or let the launcher do "
                "so with --max_restarts."
            )

    def _find_error(self) -> ServerLost | WorkersLost | None:
        lost = {
            f"{name} ({self._tasks[name].address}: {why})": name.startswith(SERVER_TYPE)
            for name, why in list(self._lost.items())
            if name.startswith(SERVER_TYPE) or why == NO_ANSWER
        }
        if any(lost.values()):
            return lost_error(name for name, is_server in lost.items() if is_server)
        if not lost:
            return None
        return WorkersLost(
            f"Each worker must answer the chief. Received: {', '.join(lost)} is lost. Look at its "
            "host, and start all again: with tfmulti.callbacks.Checkpoint or --workdir they resume "
            "from the last checkpoint."
        )

    def _look(self):
        while not self._stopped.is_set() or NO_ANSWER in self._lost.values():
            time.sleep(_EVERY_S)
            for name, task in self._tasks.items():
                self.note(name, probe(task.address))
            error, now = self._find_error(), time.monotonic()
            if error is None:
                self._ending_since = None
            elif self._ending_since is None:
                self._ending_since = now
            elif now - self._ending_since > _STUCK_S:
                end_stuck_chief(error)

    def note(self, name: str, seen: str) -> None:
        """Records the state of a task, as `peers.probe` returns it."""
        why = self._tasks[name].note(seen)
        if why is None:
            self._lost.pop(name, None)
            return
        if name.startswith("worker") and name not in self._lost and why != NO_ANSWER:
            self._news.put(
                f"{name} ({self._tasks[name].address}) is lost: another worker repeats its step, "
                "and no example is left out"
            )
        self._lost[name] = why
