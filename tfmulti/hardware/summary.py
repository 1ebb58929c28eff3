"""Summarizes what was read of a host: numbers for the logs of a run, and lines for people."""

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
        told = _join(gpu, {"percent": "{:.0f}%", "memory_gb": "{:.1f} GB", "watts": "{:.0f} W"})
        parts.append(f"GPU {number} {told}")
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
