"""The key ratios and the tables of a result: those of the bench, projections, the ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.kinds import PLAIN, WORKERS, BenchmarksConfig
from benchmarks.peers import TRAINED
from benchmarks.socket_copy import floor_seconds
from tfmulti.bench import report
from tfmulti.bench.report import FLOAT_BYTES, TextTable, number, percent
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


def create_tables(found: Mapping[str, Any], config: BenchmarksConfig) -> list[TextTable]:
    """Returns all tables of a result, in the order of the report."""
    *tables, kinds = report.create_tables(found, config)
    if found["allreduce"]:
        tables[-1] = _with_floor(tables[-1], found["allreduce"])
    if found["projection"]:
        tables += _projections(found["projection"])
    return [*tables, kinds, _ratios(found)]


def _with_floor(table, found) -> TextTable:
    rows = []
    for floats, row in zip(found["floats"], table.rows):
        floor = floor_seconds(floats * FLOAT_BYTES, found)
        medians = [sizes[str(floats)]["median"] for sizes in found["transports"].values()]
        over = min(medians) / floor if medians and floor else None
        cells = number(floor and floor * 1e3, 3), number(over, 1 if floats > 1 else 0)
        rows.append((*row, *cells))
    note = "floor: S/B x 2(n-1)/n, with B of a copy of 67 MB through a TCP socket, one way"
    columns = (*table.columns, "floor ms", "over floor")
    return dataclasses.replace(table, columns=columns, rows=rows, notes=[*table.notes, note])


def _projections(found) -> list[TextTable]:
    if "missing" in found:
        return [TextTable("Projection", ("missing",), [(found["missing"],)], [])]
    tables = []
    for name, each in found["workloads"].items():
        columns = ("workers", "algorithm", "overlap", "step ms", "efficiency")
        rows = [
            (
                f"{row['workers']:,}",
                row["algorithm"],
                row["overlap"],
                f"{row['seconds'] * 1e3:.1f}",
                percent(row["efficiency"]),
            )
            for row in each["rows"]
        ]
        notes = [
            f"{e['workers']} workers, {e['algorithm']}, overlap {e['overlap']}: measured "
            f"{e['measured'] * 1e3:.1f} ms, error of the projection {e['error']:+.0%}"
            for e in each["errors"]
        ]
        title = f"{name}: projected over {found['transport']}, every worker as far as measured here"
        tables.append(TextTable(title, columns, rows, notes))
    return tables


def _ratios(found) -> TextTable:
    rows = [(key, number(value, 3), RATIOS[key][0]) for key, value in found["ratios"].items()]
    notes = [f"{key}: {reason}" for key, reason in found["missing"].items()]
    return TextTable("Ratios", ("key", "value", "what"), rows, notes)
