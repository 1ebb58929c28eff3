"""Reads devices every second or so, in a thread, and keeps the means."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence


class Sampler:
    """Means of what readers tell, each reading weighed by the time since the one before.

    Args:
        readers: Objects with `read()`, which returns numbers by name, and `close()`.
        interval_s: Seconds from one reading to the next.
        clock: Returns seconds.

    Attributes:
        failures: What each reader that has failed, and was left out from then on, said.

    Example:
    >>> class Reader:
    ...     def read(self):
    ...         return {"cpu_percent": 50.0}
    ...     def close(self):
    ...         pass
    >>> Sampler([Reader()], interval_s=1.0).take()
    {'cpu_percent': 50.0}
    """

    THREAD = "tfmulti: devices"

    def __init__(
        self,
        readers: Sequence,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._readers, self._interval_s, self._clock = list(readers), interval_s, clock
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._sums: dict[str, tuple[float, float]] = {}
        self._last = clock()
        self.failures: list[str] = []

    def start(self) -> None:
        """Begins to read, in a thread that ends with this object, too."""
        self.sample()
        self.take()
        # A `fit` that ends by an error never stops it, so it must not keep the object.
        arguments = (weakref.ref(self), self._ended, self._interval_s)
        self._thread = threading.Thread(
            target=_sample_often, args=arguments, name=self.THREAD, daemon=True
        )
        self._thread.start()

    def sample(self) -> None:
        """Reads once."""
        with self._lock:
            now = self._clock()
            # Of two readings at one time the second one has no weight, but a value.
            weight, self._last = max(now - self._last, 1e-9), now
            for name, value in self._read():
                total, weights = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = (total + weight * value, weights + weight)

    def _read(self):
        for reader in list(self._readers):
            try:
                yield from reader.read().items()
            except Exception as error:
                # Training goes on without it.
                self._readers.remove(reader)
                self.failures.append(f"{type(reader).__name__}: {type(error).__name__}: {error}")

    def take(self) -> dict[str, float]:
        """Reads once, and returns the means since the last call."""
        self.sample()
        with self._lock:
            sums, self._sums = self._sums, {}
        return {name: total / weights for name, (total, weights) in sums.items()}

    def stop(self) -> None:
        """Ends the thread, and closes the readers."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for reader in self._readers:
            reader.close()


def _sample_often(reference, ended, interval_s):
    while not ended.wait(interval_s):
        sampler = reference()
        if sampler is None:
            return
        sampler.sample()
        del sampler
