"""The few numbers of a host that go to a run's logs, and the line that people read."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    """Returns one line for people.

    >>> describe({"cpu_percent": 93.2, "memory_percent": 41.0, "process_cores": 1.86})
    'CPU 93%, memory 41%; this process 1.9 cores'
    """
    host = _join(readings, {"cpu_percent": "CPU {:.0f}%", "memory_percent": "memory {:.0f}%"})
    own = _join(
        readings, {"process_cores": "{:.1f} cores", "process_memory_gb": "{:.1f} GB of memory"}
    )
    parts = [host, f"this process {own}" if own else ""]
    for number, gpu in gpus_of(readings).items():
        told = _join(gpu, {"percent": "{:.0f}%", "memory_gb": "{:.1f} GB", "watts": "{:.0f} W"})
        parts.append(f"GPU {number} {told}")
    return "; ".join(part for part in parts if part)


def _join(readings, formats) -> str:
    return ", ".join(
        text.format(readings[name]) for name, text in formats.items() if name in readings
    )
