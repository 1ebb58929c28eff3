"""Reports a result: tables for the terminal and in Markdown, bench.json, bench.csv."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfmulti.bench.results import OK, shorten
from tfmulti.bench.setups import BenchConfig
from tfmulti.runtime import files

FLOAT_BYTES = 4


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


def create_tables(found: Mapping[str, Any], config: BenchConfig) -> list[TextTable]:
    """Returns the tables of a result, in the order of the report; the last one lists the kinds."""
    tables = []
    for name, workload in found["workloads"].items():
        tables += [part(name, workload) for part in (_steps, _parts, _around)]
    if found["allreduce"]:
        tables.append(_reductions(found["allreduce"]))
    return [*tables, _kinds(found, config)]


_STEPS: dict[str, Callable[[Mapping], str]] = {
    "configuration": lambda row: row["setup"],
    "a call": lambda row: str(row["steps_per_execution"]),
    "step ms": lambda row: f"{row['step']['median'] * 1e3:.1f}",
    "p10-p90": lambda row: f"{row['step']['p10'] * 1e3:.1f}-{row['step']['p90'] * 1e3:.1f}",
    "n": lambda row: str(row["step"]["n"]),
    "examples/s": lambda row: f"{row['throughput']:,.0f}",
    "speed-up": lambda row: number(row["speed_up"]),
    "efficiency": lambda row: percent(row["efficiency"]),
    "of control": lambda row: percent(row["efficiency_of_control"]),
}


def _steps(name, workload) -> TextTable:
    ran = [row for row in workload["rows"] if row["status"] == OK]
    rows = [tuple(cell(row) for cell in _STEPS.values()) for row in ran]
    failed = [f"{row['setup']} {row['status']}" for row in workload["rows"] if row not in ran]
    return TextTable(f"{name}: steps on the CPU", tuple(_STEPS), rows, list(dict.fromkeys(failed)))


def _parts(name, workload) -> TextTable:
    columns = ("configuration", "input ms", "compute", "reduction", "host", "verdict")
    rows, advice = [], {}
    for each in workload["breakdown"]:
        parts = [f"{each[key] * 1e3:.1f}" for key in ("input", "compute", "reduction", "host")]
        rows.append((each["setup"], *parts, f"{each['bound_by']}-bound"))
        advice[each["bound_by"]] = f"{each['bound_by']}-bound: {each['advice']}"
    return TextTable(f"{name}: where a step's time goes", columns, rows, list(advice.values()))


_AROUND: dict[str, Callable[[list[Mapping]], str]] = {
    "configuration": lambda same: same[0]["setup"],
    "start s": lambda same: number(same[0]["start_seconds"], 1),
    "first step s": lambda same: number(same[0]["first_step_seconds"], 1),
    "verification s": lambda same: number(same[0]["verified_seconds"], 1),
    "fit beyond its steps s": lambda same: number(
        max((t for row in same if (t := row["fit_tail_seconds"]) is not None), default=None)
    ),
    "peak MB of each process": lambda same: " ".join(
        f"{max(each) / 1e6:.0f}" for each in zip(*(row["peak_bytes"] for row in same))
    ),
}


def _around(name, workload) -> TextTable:
    found: dict[str, list] = {}
    for row in workload["rows"]:
        if row["status"] == OK:
            found.setdefault(row["setup"], []).append(row)
    rows = [tuple(cell(same) for cell in _AROUND.values()) for same in found.values()]
    notes = [
        "start: from the start of the processes to the end of the first step",
        "verification: before the first step, once; with --verify auto, of models with custom "
        "parts alone",
    ]
    return TextTable(f"{name}: around the steps", tuple(_AROUND), rows, notes)


def _reductions(found) -> TextTable:
    names = list(found["transports"])
    rows = []
    for floats in found["floats"]:
        medians = [found["transports"][name][str(floats)]["median"] for name in names]
        best = floats * FLOAT_BYTES / min(medians) / 1e6 if medians else None
        cells = (f"{each * 1e3:.3f}" for each in medians)
        rows.append((f"{floats:,}", *cells, number(best, 1)))
    columns = ("float32", *(f"{name} ms" for name in names), "best MB/s")
    notes = [f"{name} does not run: {shorten(words)}" for name, words in found["failures"].items()]
    return TextTable(f"All-reduce on the CPU, {found['workers']} workers", columns, rows, notes)


def _kinds(found, config) -> TextTable:
    rows = [row for workload in found["workloads"].values() for row in workload["rows"]]
    known = {kind.name: kind for kind in config.KINDS}
    kinds = [known[name] for name in dict.fromkeys(row["kind"] for row in rows)]
    others = [kind for kind in kinds if kind.baseline != "one_worker"]
    text = "".join(f"; of {kind.name}, {kind.baseline} x1" for kind in others)
    notes = [
        f"Speed-up and efficiency are against one worker: one_worker{text}. The control says what "
        "the machine leaves to so many processes.",
        "input is drawing a batch alone; compute is the control's step without it; reduction is "
        "the step beyond the control's, both with several steps a call; host is what a step "
        "costs more with one a call.",
    ]
    rows = [(kind.name, kind.meaning) for kind in kinds]
    return TextTable("The configurations", ("configuration", "what"), rows, notes)


def number(value: float | None, digits: int = 2) -> str:
    """Returns a number for a cell; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Returns a fraction for a cell; a dash for None."""
    return "-" if value is None else f"{value:.0%}"


def show(tables: Iterable[TextTable], console: Console) -> None:
    """Prints tables and their notes."""
    for each in tables:
        table = Table(box=box.SIMPLE_HEAD, title=each.title, title_justify="left")
        for place, column in enumerate(each.columns):
            justify = "right" if place and column != "what" else "left"
            table.add_column(column, justify=justify, overflow="fold")
        for row in each.rows:
            table.add_row(*row)
        console.print(table)
        for note in each.notes:
            style = "yellow" if "does not run" in note else "dim"
            console.print(Text(f"  {note}", style=style))
        console.print()


_COLUMNS = ("workload", "setup", "kind", "replicas", "scaling", "steps_per_execution")
_COLUMNS += ("global_batch_size", "status")
_COLUMNS += tuple(f"step_{name}" for name in ("median", "p10", "p90", "mean", "n", "best"))
_COLUMNS += ("throughput", "speed_up", "efficiency", "efficiency_of_control", "input_seconds")
_COLUMNS += ("fit_tail_seconds", "start_seconds", "first_step_seconds", "verified_seconds")
_COLUMNS += ("peak_bytes",)


def write_all(
    found: Mapping[str, Any], tables: Sequence[TextTable], config: BenchConfig, command: str
) -> str:
    """Writes the files of a result.

    Args:
        found: What `run_bench` returned.
        tables: Its tables.
        config: The bench.
        command: What wrote them, for the file of tables.

    Returns:
        A line about them.
    """
    folder = Path(config.workdir)
    markdown = Path(config.write_markdown or folder / "BENCHMARKS.md")
    told = _write_markdown(found, tables, command)
    write_json(found, folder / "bench.json")
    files.write_atomically(folder / "bench.csv", lambda path: _write_csv(found, path))
    files.write_atomically(markdown, lambda path: path.write_text(told))
    return f"wrote {folder / 'bench.json'}, {folder / 'bench.csv'}, {markdown}"


def write_json(found: Mapping[str, Any], path: Path) -> None:
    """Writes a result, into a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1) + "\n"
    files.write_atomically(path, lambda temporary: temporary.write_text(text))


def _write_csv(found, path):
    """Writes a row for each configuration and number of steps a call; in seconds and bytes."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for name, workload in found["workloads"].items():
            for row in workload["rows"]:
                step = {f"step_{key}": value for key, value in (row["step"] or {}).items()}
                peak = max(row["peak_bytes"], default="")
                writer.writerow({"workload": name, **row, **step, "peak_bytes": peak})


def _write_markdown(found, tables, command) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"Written by `{command}`; a figure of a step is the median over all blocks of "
        "all rounds, the first calls of a block left out.",
        "",
        *describe_machine(found["machine"], found["seconds"]),
    ]
    for table in tables:
        dashes = ["---", *("---:" for _ in table.columns[1:])]
        lines += ["", f"## {table.title}", ""]
        lines += [_row(cells) for cells in (table.columns, dashes, *table.rows)]
        lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def describe_machine(machine: Mapping[str, Any], seconds: float) -> list[str]:
    """Returns lines of Markdown about a machine, and the seconds that a run took there."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = ", ".join(machine["gpus"]) or "none"
    return [
        f"- processor: {machine['cpu']}, {machine['cores']} cores; "
        f"memory {machine['memory_bytes'] / 2**30:.0f} GiB; GPUs: {gpus}",
        f"- system: {machine['system']}",
        f"- versions: {versions}",
        f"- load before the start: {machine['load']:.2f}; the run took {seconds:.0f} s",
    ]


def _row(cells) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
