"""The key ratios of a benchmark; None with a reason if one cannot be computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfmulti.bench import setups, transports
from tfmulti.bench.results import OK, find

_TAIL_KINDS = setups.OURS


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
    for key, compute in RATIOS.items():
        try:
            ratios[key] = compute(result)
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
        name = f"{kind} x{count} with {calls} step(s) a call"
        peers = " (--peers measures it)" if kind == setups.DDP else ""
        raise _Missing(f"{name} has no step on {workload}{peers}")
    return row["step"]["median"]


def _best(result, workload, kinds, count) -> float:
    found = [
        row["step"]["median"]
        for row in _rows(result, workload)
        if row["kind"] in kinds
        and row["replicas"] == count
        and row["scaling"] == setups.WEAK
        and row["status"] == OK
    ]
    if not found:
        raise _Missing(f"none of {', '.join(kinds)} ran on {workload}")
    return min(found)


def _efficiency(kind):
    def compute(result):
        calls = result["config"]["steps_per_execution"]
        count = _most(result)
        one = _median(result, "compute", setups.ONE_WORKER, 1, calls)
        return one / _median(result, "compute", kind, count, calls)

    return compute


def _throughput_over_ddp(result):
    count = _most(result)
    ours = _best(result, "compute", (setups.MIRRORED, *setups.MULTI_WORKER), count)
    return _median(result, "compute", setups.DDP, count) / ours


def _step_over_ddp(kind):
    def compute(result):
        count = _most(result)
        ours = _best(result, "communication", (kind,), count)
        return ours / _median(result, "communication", setups.DDP, count)

    return compute


def _allreduce_over_socket_copy(result):
    found = result.get("allreduce") or {}
    size = str(transports.SIZES[-1])
    ours = [
        found["transports"][kind][size]["median"]
        for kind in (setups.RING, setups.MPI)
        if kind in found.get("transports", {})
    ]
    if not ours or not found.get("socket_copy"):
        raise _Missing("no all-reduce, or no socket copy, was measured")
    workers = found["workers"]
    copy = found["socket_copy"][size]["median"] * 2 * (workers - 1) / workers
    return min(ours) / copy


def _fit_tail_seconds(result):
    found = [
        row["fit_tail_seconds"]
        for row in _rows(result, "compute")
        if row["kind"] in _TAIL_KINDS and row["fit_tail_seconds"] is not None
    ]
    if not found:
        raise _Missing("no long block was trained")
    return max(found)


def _one_replica_over_plain(result):
    one = _median(result, "compute", setups.ONE_REPLICA, 1)
    return one / _median(result, "compute", setups.PLAIN, 1)


RATIOS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "compute_efficiency_mpi": _efficiency(setups.MPI),
    "compute_efficiency_ring": _efficiency(setups.RING),
    "compute_throughput_over_ddp": _throughput_over_ddp,
    "communication_step_over_ddp": _step_over_ddp(setups.MPI),
    "communication_step_bfloat16_over_ddp": _step_over_ddp(setups.MPI_BFLOAT16),
    "allreduce_over_socket_copy": _allreduce_over_socket_copy,
    "fit_tail_seconds": _fit_tail_seconds,
    "one_replica_over_plain": _one_replica_over_plain,
}
"""How each is computed, by key."""

MEANINGS = {
    "compute_efficiency_mpi": "compute: one worker's step over that of all by MPI, several a call",
    "compute_efficiency_ring": "the same over TensorFlow's ring",
    "compute_throughput_over_ddp": "compute: best throughput of ours over PyTorch DDP's",
    "communication_step_over_ddp": "communication: step by MPI over PyTorch DDP's",
    "communication_step_bfloat16_over_ddp": "the same with bfloat16 on the wire",
    "allreduce_over_socket_copy": "all-reduce of 67 MB over a socket copy of the same bytes",
    "fit_tail_seconds": "compute: `fit` beyond its last step, 100 steps, the slowest of ours",
    "one_replica_over_plain": "compute: mirrored on one device over plain Keras, one step a call",
}
"""The meaning of each ratio."""
