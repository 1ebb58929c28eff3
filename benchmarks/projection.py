"""Extrapolates the step time to more workers from measurements on few."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.kinds import WORKERS
from tfmulti.bench.report import FLOAT_BYTES
from tfmulti.bench.results import find

RING, TREE = "ring", "tree"
NONE, FULL = "none", "full"


@dataclasses.dataclass(frozen=True)
class Link:
    """The cost of a message between two workers.

    Attributes:
        latency: Seconds of one message without content.
        bytes_per_second: What the content of a message adds.
    """

    latency: float
    bytes_per_second: float


def fit_link(seconds: Mapping[int, float], workers: int) -> Link:
    """Returns the link that explains the all-reduces measured: the smallest and the largest.

    Args:
        seconds: Bytes of an all-reduce -> its seconds.
        workers: Workers that reduced.

    >>> fit_link({0: 0.2, 100: 1.2}, workers=2)
    Link(latency=0.1, bytes_per_second=100.0)
    """
    smallest, largest = min(seconds), max(seconds)
    latency = seconds[smallest] / (2 * (workers - 1))
    beyond = max(seconds[largest] - seconds[smallest], 1e-12)
    share = 2 * (workers - 1) / workers
    return Link(latency, (largest - smallest) * share / beyond)


def reduction_seconds(algorithm: str, size: int, workers: int, link: Link) -> float:
    """Returns the seconds of an all-reduce.

    A ring sends 2(n-1) messages one after the other, of a part of the bytes each. A tree reduces
    and then broadcasts in ceil(log2 n) levels each, in pieces that follow one another, so that
    all bytes pass a link twice (Thakur et al., 2005,
    https://doi.org/10.1177/1094342005051521).

    Args:
        algorithm: `"ring"` or `"tree"`.
        size: Bytes.
        workers: The number of workers, n.
        link: What a message costs.

    >>> reduction_seconds("ring", 100, 2, Link(0.1, 100.0))
    1.2
    """
    if workers == 1:
        return 0.0
    if algorithm == RING:
        share = 2 * (workers - 1) / workers
        return 2 * (workers - 1) * link.latency + share * size / link.bytes_per_second
    levels = math.ceil(math.log2(workers))
    return 2 * levels * link.latency + 2 * size / link.bytes_per_second


def project(
    compute: float, size: int, link: Link, largest: int, measured: Mapping[int, float]
) -> dict:
    """Projects step time and weak-scaling efficiency to 2, 4, ... workers.

    Args:
        compute: Seconds of a step without communication.
        size: Bytes of the gradients.
        link: What a message costs.
        largest: The largest number of workers.
        measured: Workers -> seconds of a step, where it was measured.

    Returns:
        `"rows"`: for each number, algorithm and overlap the `seconds` and the `efficiency`;
        `"errors"`: for each number that was measured the seconds projected over those measured,
        less one.
    """
    numbers = [2**power for power in range(1, int(math.log2(largest)) + 1)]
    rows, errors = [], []
    for workers in sorted({*numbers, *(number for number in measured if number > 1)}):
        for algorithm in (RING, TREE):
            reduction = reduction_seconds(algorithm, size, workers, link)
            # One after the other; or both at once, the bound from below.
            overlaps = {NONE: compute + reduction, FULL: max(compute, reduction)}
            for overlap, seconds in overlaps.items():
                kind = {"workers": workers, "algorithm": algorithm, "overlap": overlap}
                rows.append({**kind, "seconds": seconds, "efficiency": compute / seconds})
                if workers in measured:
                    error = seconds / measured[workers] - 1
                    errors.append({**kind, "measured": measured[workers], "error": error})
    return {
        "compute_seconds": compute,
        "bytes": size,
        **dataclasses.asdict(link),
        "rows": rows,
        "errors": errors,
    }


def project_result(found: Mapping[str, Any], largest: int) -> dict:
    """Projects each workload of a result over the faster of our transports.

    Args:
        found: The result.
        largest: The largest number of workers.
    """
    reductions = found["allreduce"] or {"transports": {}}
    links = {
        kind: fit_link(
            {int(size) * FLOAT_BYTES: each["median"] for size, each in sizes.items()},
            reductions["workers"],
        )
        for kind, sizes in reductions["transports"].items()
        if kind in WORKERS
    }
    if not links:
        return {"missing": "no all-reduce was measured, so latency and bandwidth are not known"}
    kind = max(links, key=lambda each: links[each].bytes_per_second)
    projected = {"transport": kind, "workloads": {}}
    calls, workers = found["config"]["steps_per_execution"], reductions["workers"]
    for name, workload in found["workloads"].items():
        rows, size = workload["rows"], workload["gradient_bytes"]
        compute = find(rows, "control", workers, calls) or find(rows, "one_worker", 1, calls)
        measured = {
            row["replicas"]: row["step"]["median"]
            for row in rows
            if row is find(rows, kind, row["replicas"], calls)
        }
        if compute is not None and size:
            seconds = compute["step"]["median"]
            projected["workloads"][name] = project(seconds, size, links[kind], largest, measured)
    return projected
