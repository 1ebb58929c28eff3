"""The tables of a result as text, for the terminal and for Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfmulti.bench import ratios, setups, transports
from tfmulti.bench.results import OK, shorten
from tfmulti.bench.statistics import Summary

_FLOAT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table.

    Attributes:
        title: What it shows.
        columns: The heads.
        rows: The cells.
        notes: Lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def create_tables(found: Mapping[str, Any]) -> list[TextTable]:
    """Returns all tables of a result, in the order of the report."""
    tables = []
    for name, workload in found["workloads"].items():
        tables += [part(name, workload) for part in (_steps, _parts, _around)]
    if found["allreduce"]:
        tables.append(_reductions(found["allreduce"]))
    if found["projection"]:
        tables += _projections(found["projection"])
    return [*tables, _kinds(found), _ratios(found)]


def _steps(name, workload) -> TextTable:
    columns = ("configuration", "a call", "step ms", "p10-p90", "n", "examples/s", "speed-up")
    columns += ("efficiency", "of control")
    rows, notes = [], []
    for row in workload["rows"]:
        if row["status"] != OK:
            note = f"{row['setup']} {row['status']}"
            notes += [note] if note not in notes else []
            continue
        step = row["step"]
        rows.append(
            (
                row["setup"],
                str(row["steps_per_execution"]),
                f"{step['median'] * 1e3:.1f}",
                f"{step['p10'] * 1e3:.1f}-{step['p90'] * 1e3:.1f}",
                str(step["n"]),
                f"{row['throughput']:,.0f}",
                _number(row["speed_up"]),
                _percent(row["efficiency"]),
                _percent(row["efficiency_of_control"]),
            )
        )
    return TextTable(f"{name}: steps", columns, rows, notes)


def _kinds(found) -> TextTable:
    rows = [row for workload in found["workloads"].values() for row in workload["rows"]]
    kinds = dict.fromkeys(row["kind"] for row in rows)
    told = [(kind, setups.MEANINGS[kind]) for kind in kinds]
    notes = [
        "Speed-up and efficiency are against one worker: one_worker; of ddp, ddp x1; of stock "
        "Keras, plain. The control says what the machine leaves to so many processes.",
        "input is drawing a batch alone; compute is the control's step without it; reduction is "
        "the step beyond the control's, both with several steps a call; host is what a step "
        "costs more with one a call.",
    ]
    return TextTable("The configurations", ("configuration", "what"), told, notes)


def _around(name, workload) -> TextTable:
    columns = (
        "configuration",
        "start s",
        "first step s",
        "verification s",
        "fit beyond its steps s",
    )
    columns += ("peak MB of each process",)
    found: dict[str, list] = {}
    for row in workload["rows"]:
        if row["status"] == OK:
            found.setdefault(row["setup"], []).append(row)
    rows = []
    for setup, same in found.items():
        tails = [row["fit_tail_seconds"] for row in same if row["fit_tail_seconds"] is not None]
        peaks = [row["peak_bytes"] for row in same]
        rows.append(
            (
                setup,
                _number(same[0]["start_seconds"], 1),
                _number(same[0]["first_step_seconds"], 1),
                _number(same[0]["verified_seconds"], 1),
                _number(max(tails, default=None)),
                " ".join(f"{max(each) / 1e6:.0f}" for each in zip(*peaks)),
            )
        )
    notes = [
        "start: from the start of the processes to the end of the first step",
        "verification: before the first step, once; these models are made of stock parts, which "
        "are verified with --verify always alone",
    ]
    return TextTable(f"{name}: around the steps", columns, rows, notes)


def _parts(name, workload) -> TextTable:
    columns = ("configuration", "input ms", "compute", "reduction", "host", "verdict")
    rows, advice = [], {}
    for each in workload["breakdown"]:
        parts = [f"{each[key] * 1e3:.1f}" for key in ("input", "compute", "reduction", "host")]
        rows.append((each["setup"], *parts, f"{each['bound_by']}-bound"))
        advice[each["bound_by"]] = f"{each['bound_by']}-bound: {each['advice']}"
    return TextTable(f"{name}: where a step's time goes", columns, rows, list(advice.values()))


def _reductions(found) -> TextTable:
    names = list(found["transports"])
    columns = ("float32", *(f"{name} ms" for name in names), "best MB/s")
    columns += ("floor ms", "over floor")
    copy = found["socket_copy"]
    largest = str(transports.SIZES[-1])
    rows = []
    for floats in found["floats"]:
        medians = [found["transports"][name][str(floats)]["median"] for name in names]
        best = min(medians, default=None)
        size, floor = floats * _FLOAT_BYTES, None
        if copy:
            summary = Summary(**copy[largest])
            floor = transports.floor_seconds(size, found["workers"], summary)
        rows.append(
            (
                f"{floats:,}",
                *(f"{each * 1e3:.3f}" for each in medians),
                _number(best and size / best / 1e6, 1),
                _number(floor and floor * 1e3, 3),
                _number(best and floor and best / floor, 1 if floats > 1 else 0),
            )
        )
    notes = [f"{name} does not run: {shorten(words)}" for name, words in found["failures"].items()]
    notes.append("floor: S/B x 2(n-1)/n, with B of a copy of 67 MB through a TCP socket, one way")
    return TextTable(f"All-reduce, {found['workers']} workers", columns, rows, notes)


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
                _percent(row["efficiency"]),
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
    rows = [
        (key, _number(value, 3), ratios.MEANINGS[key]) for key, value in found["ratios"].items()
    ]
    notes = [f"{key}: {reason}" for key, reason in found["missing"].items()]
    return TextTable("Ratios", ("key", "value", "what"), rows, notes)


def _number(value, digits=2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value) -> str:
    return "-" if value is None else f"{value:.0%}"


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints all tables of a result, the failures, and the verdicts.

    Args:
        found: What `run_bench` returned.
        console: Where to print.
    """
    for each in create_tables(found):
        show_table(each, console)


def show_table(each: TextTable, console: Console) -> None:
    """Prints one table, and its notes."""
    console.print(_create(each.title, each.columns, each.rows))
    for note in each.notes:
        console.print(Text(f"  {note}", style="yellow" if "does not run" in note else "dim"))
    console.print()


def _create(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(
            column, justify="right" if number and column != "what" else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table
