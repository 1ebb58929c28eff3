"""Rows of names and values: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

_FILE_WIDTH = 120


def count(number: float, word: str) -> str:
    """Returns a number with what it counts.

    >>> count(1, "worker"), count(1500, "step")
    ('1 worker', '1,500 steps')
    """
    return f"{number:,g} {word}" + ("" if number == 1 else "s")


def is_terminal() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def create_console():
    """Returns a rich `Console` as wide as the terminal, or wide enough for tables in a file.

    Without a terminal, rich uses 80 columns, which are too few for most tables.
    """
    from rich.console import Console

    is_given = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if is_given else Console(width=_FILE_WIDTH)


def show_rows(
    rows: Mapping[str, object], print_fn: Callable[[str], None], title: str | None = None
) -> None:
    """Shows names with their values: a table where standard output is a terminal, else lines.

    Args:
        rows: The values by name.
        print_fn: Function of one line of text.
        title: The title above them.

    Example:
    >>> show_rows({"steps": 3, "batch size": 64}, print_fn=print)
      steps:      3
      batch size: 64
    """
    if is_terminal():
        _print_table(rows, title)
        return
    if title is not None:
        print_fn(f"{title}:")
    width = max(map(len, rows)) + 1
    for name, value in rows.items():
        print_fn(f"  {f'{name}:':{width}} {value}")


def _print_table(rows, title):
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, show_header=False, title_justify="left", title_style="bold", border_style="dim"
    )
    table.add_column(style="dim", no_wrap=True)
    # Paths are copied: they wrap at the edge alone, and nothing in them is taken for a style.
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    Console(highlight=False).print(table)
