"""The key ratios of a benchmark; None with a reason if one cannot be computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.kinds import PLAIN, WORKERS
from benchmarks.peers import TRAINED
from benchmarks.socket_copy import floor_seconds
from tfmulti.bench.report import FLOAT_BYTES
from tfmulti.bench.results import OK, find
from tfmulti.bench.setups import WEAK

_NOT_OURS = {PLAIN.name, *(kind.name for kind in TRAINED)}


class _Missing(Exception):
    """A value that a ratio needs was not measured."""


def compute_ratios(result: Mapping[str, Any]) -> tuple[dict[str, float | None], dict[str, str]]:
    """Computes all ratios of a result.

    Args:
        result: What `bench.json` holds: `"workloads"`, `"allreduce"`, and `"config"`.

    Returns:
        By key the ratio or None, and by key why one is missing.
    """
    ratios, missing = {}, {}
    for key, (_, compute, *arguments) in RATIOS.items():
        try:
            ratios[key] = compute(result, *arguments)
        except _Missing as reason:
            ratios[key], missing[key] = None, str(reason)
    return ratios, missing


def _rows(result, workload):
    if workload not in result["workloads"]:
        raise _Missing(f"the workload {workload} was not measured")
    return result["workloads"][workload]["rows"]


def _most(result) -> int:
    count = max((r["replicas"] for w in result["workloads"].values() for r in w["rows"]), default=1)
    if count < 2:
        raise _Missing("nothing was measured on two workers or more")
    return count


def _median(result, workload, kind, count, calls=1) -> float:
    row = find(_rows(result, workload), kind, count, calls)
    if row is None:
        raise _Missing(f"{kind} x{count} with {calls} step(s) a call has no step on {workload}")
    return row["step"]["median"]


def _best(result, workload, kinds, count) -> float:
    found = [
        row["step"]["median"]
        for row in _rows(result, workload)
        if row["kind"] in kinds and (row["replicas"], row["scaling"]) == (count, WEAK)
        if row["status"] == OK
    ]
    if not found:
        raise _Missing(f"none of {', '.join(kinds)} ran on {workload}")
    return min(found)


def _efficiency(result, kind):
    calls, count = result["config"]["steps_per_execution"], _most(result)
    one = _median(result, "compute", "one_worker", 1, calls)
    return one / _median(result, "compute", kind, count, calls)


def _throughput_over_ddp(result):
    count = _most(result)
    ours = _best(result, "compute", WORKERS, count)
    return _median(result, "compute", "ddp", count) / ours


def _step_over_ddp(result, kind):
    count = _most(result)
    ours = _best(result, "communication", (kind,), count)
    return ours / _median(result, "communication", "ddp", count)


def _allreduce_over_socket_copy(result):
    found = result["allreduce"] or {"transports": {}, "floats": [0], "socket_copy": None}
    size = found["floats"][-1]
    ours = [
        found["transports"][kind][str(size)]["median"]
        for kind in ("ring", "mpi")
        if kind in found["transports"]
    ]
    floor = floor_seconds(size * FLOAT_BYTES, found)
    if not ours or floor is None:
        raise _Missing("no all-reduce, or no socket copy, was measured")
    return min(ours) / floor


def _fit_tail_seconds(result):
    found = [
        row["fit_tail_seconds"]
        for row in _rows(result, "compute")
        if row["kind"] not in _NOT_OURS and row["fit_tail_seconds"] is not None
    ]
    if not found:
        raise _Missing("no long block was trained")
    return max(found)


def _one_replica_over_plain(result):
    one = _median(result, "compute", "one_replica", 1)
    return one / _median(result, "compute", PLAIN.name, 1)


RATIOS: dict[str, tuple] = {
    "compute_efficiency_mpi": (
        "compute: one worker's step over that of all by MPI, several a call",
        _efficiency,
        "mpi",
    ),
    "compute_efficiency_ring": ("the same over TensorFlow's ring", _efficiency, "ring"),
    "compute_throughput_over_ddp": (
        "compute: best throughput of ours over PyTorch DDP's",
        _throughput_over_ddp,
    ),
    "communication_step_over_ddp": (
        "communication: step by MPI over PyTorch DDP's",
        _step_over_ddp,
        "mpi",
    ),
    "communication_step_bfloat16_over_ddp": (
        "the same with bfloat16 on the wire",
        _step_over_ddp,
        "mpi_bfloat16",
    ),
    "allreduce_over_socket_copy": (
        "all-reduce of 67 MB over a socket copy of the same bytes",
        _allreduce_over_socket_copy,
    ),
    "fit_tail_seconds": (
        "compute: `fit` beyond its last step, 100 steps, the slowest of ours",
        _fit_tail_seconds,
    ),
    "one_replica_over_plain": (
        "compute: mirrored on one device over plain Keras, one step a call",
        _one_replica_over_plain,
    ),
}
"""By key what each is, the function that computes it, and what else that takes."""
