"""Whether replicas have equal work."""

from __future__ import annotations

from collections.abc import Mapping

from tfmulti.hardware.summary import gpus_of

TOLERANCE = 0.2
# Of devices that hardly work a ratio says nothing.
_LEAST_PERCENT = 10.0
_PERCENT_OF_A_CORE = 100.0


def describe_imbalance(workers: Mapping[str, Mapping[str, float]]) -> str | None:
    """Tells where one device does more than 20% less than another.

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
