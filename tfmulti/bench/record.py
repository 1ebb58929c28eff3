"""Writes a result: bench.json, bench.csv, bench.png, and the tables in Markdown."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfmulti.bench import tables
from tfmulti.bench.config import BenchConfig
from tfmulti.runtime import files

_COLUMNS = ("setup", "kind", "replicas", "scaling", "steps_per_execution", "global_batch_size")
_MEASURED = ("throughput", "speed_up", "efficiency", "efficiency_of_control")
_MORE = ("input_seconds", "fit_tail_seconds", "start_seconds")
_MORE += ("first_step_seconds", "verified_seconds")


def write_all(found: Mapping[str, Any], config: BenchConfig) -> list[str]:
    """Writes all files of a result.

    Args:
        found: What `run_bench` returned.
        config: The bench.

    Returns:
        A line about each file, or why it is not there.
    """
    folder = Path(config.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    markdown = Path(config.write_markdown or folder / "BENCHMARKS.md")
    text = json.dumps(found, indent=1) + "\n"
    files.write_atomically(folder / "bench.json", lambda path: path.write_text(text))
    files.write_atomically(folder / "bench.csv", lambda path: _write_csv(found, path))
    files.write_atomically(markdown, lambda path: path.write_text(_write_markdown(found)))
    told = [f"wrote {folder / 'bench.json'}, {folder / 'bench.csv'}, {markdown}"]
    try:
        from tfmulti.bench import plot
    except ImportError as error:
        return [*told, f"no bench.png: {error}; pip install 'tfmulti[plot]'"]
    files.write_atomically(folder / "bench.png", lambda path: plot.draw(found, path))
    return [*told, f"wrote {folder / 'bench.png'}"]


def _write_csv(found, path):
    """Writes a row for each configuration and number of steps a call; in seconds and bytes."""
    summary = ("median", "p10", "p90", "mean", "n", "best")
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        heads = ("workload", *_COLUMNS, "status", *(f"step_{name}" for name in summary))
        writer.writerow((*heads, *_MEASURED, *_MORE, "peak_bytes"))
        for name, workload in found["workloads"].items():
            for row in workload["rows"]:
                step = row["step"] or dict.fromkeys(summary, "")
                cells = [row[column] for column in (*_COLUMNS, "status")]
                cells += [step[key] for key in summary]
                cells += [row[column] for column in (*_MEASURED, *_MORE)]
                writer.writerow((name, *cells, max(row["peak_bytes"], default="")))


def _write_markdown(found) -> str:
    machine, versions = found["machine"], found["machine"]["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    gpus = ", ".join(machine["gpus"]) or "none"
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m tfmulti.bench`; a figure of a step is the median over all blocks of "
        "all rounds, the first calls of a block left out.",
        "",
        f"- processor: {machine['cpu']}, {machine['cores']} cores; "
        f"memory {machine['memory_bytes'] / 2**30:.0f} GiB; GPUs: {gpus}",
        f"- system: {machine['system']}",
        f"- versions: {named}",
        f"- load before the start: {machine['load']:.2f}; the run took {found['seconds']:.0f} s",
    ]
    for table in tables.create_tables(found):
        lines += ["", f"## {table.title}", ""]
        lines += [_row(table.columns), _row("---" if not n else "---:" for n in _numbers(table))]
        lines += [_row(row) for row in table.rows]
        lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def _numbers(table):
    return range(len(table.columns))


def _row(cells) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
