"""Reads the devices of this host in a thread, and tells the readings in numbers and lines."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from tfmulti.hardware.gpus import Gpus, load_nvml

_GB = 1e9


class Processor:
    """Reads the use of the host's processor and memory, and this process's part of it.

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


def find_readers(
    nvml=None, environ: Mapping[str, str] = os.environ
) -> tuple[list, str | None, str | None]:
    """Returns the readers of this host's devices.

    Args:
        nvml: The module `pynvml` of nvidia-ml-py, or something like it.
        environ: The variables of the environment.

    Returns:
        The readers, each with `read()` and `close()`; a message where a package is missing, or
        None; and why no GPU is read, or None.
    """
    readers, missing = [], None
    try:
        import psutil

        readers.append(Processor(psutil))
    except ImportError:
        missing = (
            "Processor and memory are read by psutil. Received: no module named psutil. "
            "pip install 'tfmulti[monitor]'"
        )
    nvml = nvml or load_nvml()
    try:
        gpus = Gpus(nvml, environ)
    except nvml.NVMLError as error:
        return readers, missing, f"NVML does not start: {error}"
    if not len(gpus):
        gpus.close()
        return readers, missing, "NVML shows this process no GPU"
    return [*readers, gpus], missing, None


class Sampler:
    """Means of readings, each weighted by the time since the previous one.

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
                with contextlib.suppress(Exception):
                    reader.close()

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


NAMES = (
    "cpu_percent",
    "memory_percent",
    "process_cores",
    "process_memory_gb",
    "gpu_percent",
    "gpu_memory_percent",
    "gpu_watts",
)
_GPU = re.compile(r"gpu_(\d+)_(\w+)")
_DIGITS = {"process_cores": 2, "process_memory_gb": 3}


def summarize(readings: Mapping[str, float]) -> dict[str, float]:
    """Returns a few numbers for all devices of a worker, however many GPUs it has.

    Args:
        readings: What a `Sampler` gave.

    Returns:
        Those of `NAMES` that are known: of GPUs the mean use, the memory of the fullest one, and
        the power of all.

    Example:
    >>> summarize({"cpu_percent": 12.34, "gpu_0_percent": 90.0, "gpu_1_percent": 80.0})
    {'cpu_percent': 12.3, 'gpu_percent': 85.0}
    """
    found = {name: readings[name] for name in NAMES if name in readings}
    gpus = gpus_of(readings)
    percents, fullness, watts = (
        [gpu[name] for gpu in gpus.values() if name in gpu]
        for name in ("percent", "memory_percent", "watts")
    )
    if percents:
        found["gpu_percent"] = sum(percents) / len(percents)
    if fullness:
        found["gpu_memory_percent"] = max(fullness)
    if watts:
        found["gpu_watts"] = sum(watts)
    return {name: round(value, _DIGITS.get(name, 1)) for name, value in found.items()}


def gpus_of(readings: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Returns the readings of each GPU by its number.

    >>> gpus_of({"gpu_0_percent": 90.0, "gpu_0_watts": 300.0})
    {0: {'percent': 90.0, 'watts': 300.0}}
    """
    gpus: dict[int, dict[str, float]] = {}
    for name, value in readings.items():
        if match := _GPU.fullmatch(name):
            gpus.setdefault(int(match[1]), {})[match[2]] = value
    return gpus


def describe(readings: Mapping[str, float]) -> str:
    """Returns a readable line.

    >>> describe({"cpu_percent": 93.2, "memory_percent": 41.0, "process_cores": 1.86})
    'CPU 93%, memory 41%; this process 1.9 cores'
    """
    host = _join(readings, {"cpu_percent": "CPU {:.0f}%", "memory_percent": "memory {:.0f}%"})
    own = _join(
        readings, {"process_cores": "{:.1f} cores", "process_memory_gb": "{:.1f} GB of memory"}
    )
    parts = [host, f"this process {own}" if own else ""]
    for number, gpu in gpus_of(readings).items():
        text = _join(gpu, {"percent": "{:.0f}%", "memory_gb": "{:.1f} GB", "watts": "{:.0f} W"})
        parts.append(f"GPU {number} {text}")
    return "; ".join(part for part in parts if part)


def _join(readings, formats) -> str:
    return ", ".join(
        text.format(readings[name]) for name, text in formats.items() if name in readings
    )


TOLERANCE = 0.2
# Of devices that hardly work a ratio says nothing.
_LEAST_PERCENT = 10.0
_PERCENT_OF_A_CORE = 100.0


def describe_imbalance(workers: Mapping[str, Mapping[str, float]]) -> str | None:
    """Describes which device is used over 20% less than another.

    GPUs are compared by their use, of all workers; workers without GPUs by the cores that they
    keep busy.

    Args:
        workers: By the name of each worker what its `Sampler` gave.

    Returns:
        A line for people, or None where all do about the same.

    Example:
    >>> describe_imbalance({"worker 0": {"process_cores": 2.0}, "worker 1": {"process_cores": 1.9}})
    >>> told = describe_imbalance({"worker 0": {"gpu_0_percent": 98.0, "gpu_1_percent": 49.0}})
    >>> told.partition(";")[0]
    'unequal work: worker 0 GPU 1 at 49%, worker 0 GPU 0 at 98%'
    """
    percents = _percents(workers)
    if len(percents) < 2:
        return None
    least, most = min(percents, key=percents.get), max(percents, key=percents.get)
    low, high = percents[least], percents[most]
    if high < _LEAST_PERCENT or 1.0 - low / high <= TOLERANCE:
        return None
    return (
        f"unequal work: {least} at {low:.0f}%, {most} at {high:.0f}%; the one that does less waits "
        "for the others or for its data, or shares its device with another program. "
        "Look at its host: python -m tfmulti.doctor."
    )


def _percents(workers) -> dict[str, float]:
    percents = {}
    for worker, readings in workers.items():
        for number, gpu in gpus_of(readings).items():
            if "percent" in gpu:
                percents[f"{worker} GPU {number}"] = gpu["percent"]
    if percents:
        return percents
    return {
        f"{worker} CPU": readings["process_cores"] * _PERCENT_OF_A_CORE
        for worker, readings in workers.items()
        if "process_cores" in readings
    }
