"""The tables of a result: the bench's own, the floor of an all-reduce, projections, ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.kinds import BenchmarksConfig
from benchmarks.ratios import RATIOS
from benchmarks.socket_copy import floor_seconds
from tfmulti.bench import report
from tfmulti.bench.report import FLOAT_BYTES, TextTable, number, percent


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
