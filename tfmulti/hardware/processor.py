"""Processor and memory, by psutil."""

from __future__ import annotations

import time
from collections.abc import Callable

_GB = 1e9


class Processor:
    """Reads the host's processor and memory, and what this process takes of them.

    Args:
        psutil: The module, or something like it.
        clock: Returns seconds.
    """

    def __init__(self, psutil, clock: Callable[[], float] = time.monotonic):
        self._psutil, self._clock = psutil, clock
        self._process = psutil.Process()
        self._last = self._counters()

    def read(self) -> dict[str, float]:
        """Returns what was used since the last call, or since this object was made.

        Returns:
            `cpu_percent`, of all cores of the host, whoever uses them; `memory_percent`, of the
            host's memory; `process_cores`, the cores that this process kept busy (1.0 is one
            core); `process_memory_gb`, its resident memory in 1e9 bytes. A container's limits
            are not looked at.
        """
        before, self._last = self._last, self._counters()
        busy, total, own, seconds = (now - then for now, then in zip(self._last, before))
        found = {
            "memory_percent": float(self._psutil.virtual_memory().percent),
            "process_memory_gb": self._process.memory_info().rss / _GB,
        }
        if total > 0:
            found["cpu_percent"] = 100.0 * min(1.0, max(0.0, busy / total))
        if seconds > 0:
            found["process_cores"] = max(0.0, own / seconds)
        return found

    def close(self) -> None:
        """Has nothing to close."""

    def _counters(self) -> tuple[float, float, float, float]:
        """Seconds: of busy cores, of all cores, of this process, of the clock."""
        times, own = self._psutil.cpu_times(), self._process.cpu_times()
        # What guests use is in the user's time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return total - idle, total, own.user + own.system, self._clock()
