"""The result of one check, and the table of all results."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfmulti.runtime.console import count

OK, WARNING, FAILURE, UNKNOWN = "ok", "warning", "failure", "unknown"


@dataclasses.dataclass(frozen=True)
class Check:
    """The name of a check, its result, and a hint.

    Attributes:
        name: What was looked at.
        status: `"ok"`, `"warning"` (training works, worse than it could), `"failure"` (it does
            not), or `"unknown"` (the doctor could not look).
        detail: The result, as text.
        hint: What to do; empty where there is nothing to do.
    """

    name: str
    status: str
    detail: str
    hint: str = ""


_STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red", UNKNOWN: "dim"}
_SIGNS = {OK: "✓", WARNING: "!", FAILURE: "✗", UNKNOWN: "?"}
_NAME_WIDTH = 24

Areas = Sequence[tuple[str, Sequence[Check]]]


def show(areas: Areas, console: Console) -> None:
    """Prints everything.

    Args:
        areas: What was found, by area.
        console: Where to print; lines are wrapped only on a terminal.
    """
    if console.is_terminal:
        _draw(areas, console)
    else:
        for area, checks in areas:
            console.print(area, highlight=False, soft_wrap=True)
            for check in checks:
                console.print(Text(plain(check)), soft_wrap=True)
    last = verdict([check for _, checks in areas for check in checks])
    console.print(last, soft_wrap=not console.is_terminal)


def plain(check: Check) -> str:
    """Returns one line.

    >>> plain(Check("cores", "warning", "2 of 64", "Ask for more."))
    '  warning  cores: 2 of 64. To do: Ask for more.'
    """
    line = f"  {check.status:8} {check.name}: {check.detail}"
    return f"{line.removesuffix('.')}. To do: {check.hint}" if check.hint else line


def verdict(checks: Sequence[Check]) -> Text:
    """Returns the last line: how many of each, and whether this host is ready."""
    counts = Counter(check.status for check in checks)
    words = {
        FAILURE: count(counts[FAILURE], "failure"),
        WARNING: count(counts[WARNING], "warning"),
        OK: f"{counts[OK]} ok",
        UNKNOWN: f"{counts[UNKNOWN]} not looked at",
    }
    counted = ", ".join(
        words[status] for status in (FAILURE, WARNING, OK, UNKNOWN) if counts[status]
    )
    if counts[FAILURE]:
        names = ", ".join(check.name for check in checks if check.status == FAILURE)
        return Text(f"Not ready: {names}. ({counted})", style=_STYLES[FAILURE])
    if counts[WARNING]:
        return Text(f"Ready, with warnings. ({counted})", style=_STYLES[WARNING])
    return Text(f"Ready. ({counted})", style=_STYLES[OK])


def _draw(areas, console):
    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(max_width=_NAME_WIDTH, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for number, (area, checks) in enumerate(areas):
        if number:
            table.add_row("", "", "")
        table.add_row("", Text(area, style="bold"), "")
        for check in checks:
            style = _STYLES[check.status]
            sign = Text(_SIGNS[check.status], style=style)
            detail = Text(check.detail, style=style if check.status in (FAILURE, UNKNOWN) else "")
            if check.hint:
                detail.append(
                    f"\n→ {check.hint}", style="cyan" if check.status != UNKNOWN else "dim"
                )
            table.add_row(sign, Text(check.name), detail)
    console.print(table)
