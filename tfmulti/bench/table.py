"""Shows a result on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfmulti.bench import tables


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints all tables of a result, the failures, and the verdicts.

    Args:
        found: What `run_bench` returned.
        console: Where to print.
    """
    for each in tables.create_tables(found):
        show_table(each, console)


def show_table(each: tables.TextTable, console: Console) -> None:
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
