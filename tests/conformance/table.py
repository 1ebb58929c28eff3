"""Shows the matrix: on the terminal, as CONFORMANCE.md, and as CONFORMANCE.json."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance import columns, guarantees
from conformance.compare import Cell
from conformance.guarantee import NOISE_FACTOR, TOLERANCE
from conformance.matrix import Row

COLUMNS = (*columns.TFMULTI, *columns.STOCK)
INTRODUCTION = f"""# Conformance

`make conformance` made this file: {{where}}.

Each guarantee is a small training. A figure is the largest difference to plain Keras on one
device, with the same first weights and the same examples in each step: max |a - b| / max(1, |b|)
over the weights and the optimizer's variables on every replica of every worker, the logs of
each epoch and, for some, evaluation and predictions. A figure may be {TOLERANCE:g}, or
{NOISE_FACTOR} times the noise where that is more; 2^-11 and 2^-8 under mixed_float16 and
mixed_bfloat16, to which each replica rounds its part of a gradient. The noise is one device's
own: the same training with the rows of each batch in other orders, the same mathematics.

What several replicas cannot have may be told in its place: an error before the first update, which
says what was received and what to do. It stands as "told"; a difference without a word is not kept.
That is with `on_difference="error"`. The last section has the same trainings as they are by
default: every replica computes the whole batch, and the result must be one device's.

What is not kept is bold. The last two columns are stock Keras and TensorFlow without tfmulti,
against plain Keras on one device: a figure, or the first words of the error. A dash was not tried.
"""


def environment() -> dict[str, str]:
    """Returns the versions, and the kind of machine in general words."""
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras")}
    machine = f"CPU, {len(os.sched_getaffinity(0))} cores"
    return {"python": platform.python_version(), **versions, "machine": machine}


def show(rows, seconds: float) -> None:
    """Prints the table."""
    table = Table(title="Largest difference to one device")
    for name in ("guarantee", "noise", *(column.name for column in COLUMNS)):
        table.add_column(name, no_wrap=name == "guarantee")
    for section, group in itertools.groupby(rows, key=lambda row: row.section):
        table.add_row(f"[bold]{section}")
        for row in group:
            cells = [_styled(row.cells.get(column.name), column.stock) for column in COLUMNS]
            table.add_row(row.guarantee.name, _noise(row), *cells)
        table.add_section()
    console = Console(width=None if os.isatty(1) else 200)
    console.print(table)
    console.print(f"{summary(rows)} {seconds:.0f} s.")


def _noise(row) -> str:
    return "" if row.guarantee.judge else f"{row.noise:.1e}"


def _styled(cell, stock) -> str:
    if cell is None:
        return "–"
    style = "green" if cell.ok else ("yellow" if stock else "bold red")
    return f"[{style}]{cell.text}[/]"


def summary(rows) -> str:
    """Tells how many guarantees are kept, in words."""
    broken = [row.guarantee.name for row in rows if not row.kept]
    text = f"{len(rows) - len(broken)} of {len(rows)} guarantees are kept"
    return f"{text}; not: {', '.join(broken)}." if broken else f"{text}."


def load(folder: Path) -> dict[str, Row]:
    """Returns the rows that CONFORMANCE.json holds, by name; those of today's guarantees."""
    path = folder / "CONFORMANCE.json"
    records = json.loads(path.read_text())["guarantees"] if path.exists() else []
    names = {guarantee.name for guarantee in guarantees.ALL}
    return {record["name"]: _row(record) for record in records if record["name"] in names}


def write(known: dict[str, Row], folder: Path) -> None:
    """Writes CONFORMANCE.json, and CONFORMANCE.md once every guarantee has been measured."""
    rows = [known[each.name] for each in guarantees.ALL if each.name in known]
    if len(rows) == len(guarantees.ALL):
        (folder / "CONFORMANCE.md").write_text(markdown(rows))
    lines = ",\n".join(json.dumps(_record(row)) for row in rows)
    content = {"environment": environment(), "tolerance": TOLERANCE, "noise_factor": NOISE_FACTOR}
    head = json.dumps(content)[:-1]
    (folder / "CONFORMANCE.json").write_text(f'{head}, "guarantees": [\n{lines}\n]}}\n')


def _record(row) -> dict:
    cells = {name: dataclasses.asdict(cell) for name, cell in row.cells.items()}
    for cell in cells.values():
        cell["difference"] = _finite(cell["difference"])
    names = {"section": row.section, "name": row.guarantee.name, "tree": row.tree}
    return {**names, "kept": row.kept, "noise": row.noise, "cells": cells}


def _row(record) -> Row:
    cells = {name: Cell(**cell) for name, cell in record["cells"].items()}
    guarantee = guarantees.find(record["name"])
    return Row(record["section"], guarantee, record["noise"], cells, record["tree"])


def _finite(value):
    return None if value is None or value == float("inf") else value


def markdown(rows) -> str:
    """Returns the text of CONFORMANCE.md."""
    where = ", ".join(
        value if name == "machine" else f"{name} {value}" for name, value in environment().items()
    )
    trees = collections.Counter(row.tree for row in rows)
    where += "; commits " + ", ".join(f"{tree} ({count} rows)" for tree, count in trees.items())
    lines = [INTRODUCTION.format(where=where), f"{summary(rows)}\n"]
    for section, group in itertools.groupby(rows, key=lambda row: row.section):
        headings = ("guarantee", "noise", *(column.name for column in COLUMNS))
        lines += [f"## {section}\n", _line(headings), _line(["---"] * len(headings))]
        for row in group:
            cells = [_marked(row.cells.get(column.name)) for column in COLUMNS]
            lines.append(_line([row.guarantee.name, _noise(row), *cells]))
        lines.append("")
    return "\n".join(lines)


def _marked(cell) -> str:
    if cell is None:
        return "–"
    text = cell.text.replace("|", "\\|")
    return text if cell.ok else f"**{text}**"


def _line(values) -> str:
    return f"| {' | '.join(values)} |"
