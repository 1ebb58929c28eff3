"""Shows a comparison on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfmulti.parity.compare import KINDS
from tfmulti.parity.config import ParityConfig
from tfmulti.parity.experiment import EQUAL, NOISE_FACTOR, Result


def show(result: Result, config: ParityConfig, console: Console, tracebacks: bool = False) -> None:
    """Prints one row for each configuration, then the causes and what to write instead.

    Args:
        result: What `run_experiment` returned.
        config: The comparison.
        console: Where to print.
        tracebacks: Whether to show where errors came from.
    """
    title = f"{config.model} on {config.dataset}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    table.add_column("configuration", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True)
    table.add_column("first difference", overflow="fold")
    table.add_column("likely cause", overflow="fold")
    if result.layout:
        console.print(f"\n{result.layout}", highlight=False)
        table.add_row("noise", "", *_numbers(result.noise))
        table.add_row("allowed", "", *_numbers(result.limits), end_section=True)
    for outcome in result.outcomes:
        found = outcome.comparison
        cause = outcome.findings[0].cause if outcome.findings else outcome.error.split(". ")[0]
        style = "green" if outcome.verdict == EQUAL else "bold red"
        numbers = _numbers(found.largest if found else None)
        verdict = Text(outcome.verdict, style=style)
        table.add_row(outcome.name, verdict, *numbers, _first(found), Text(cause))
    console.print(table)
    _show_causes(result, console, tracebacks)
    _show_verdict(result, config, console)


def _numbers(values) -> list[str]:
    return [f"{values[kind]:.1e}" if values else "-" for kind in KINDS]


def _first(found) -> Text:
    """The first difference; of a variable's path the end, the whole is told below."""
    if not found or not found.first:
        return Text("")
    name, step = found.first
    return Text(f"{'/'.join(name.split('/')[-2:])}, step {step}")


def _show_causes(result, console, tracebacks):
    told = {}
    for outcome in result.outcomes:
        for finding in outcome.findings:
            told.setdefault(finding, []).append(outcome.name)
        if outcome.error:
            console.print(Text(f"{outcome.name}: {outcome.error}\n", style="red"))
        if outcome.traceback and tracebacks:
            console.print(Text(outcome.traceback))
    for finding, names in told.items():
        where = f": {finding.where}" if finding.where else ""
        console.print(Text(f"{', '.join(names)}: {finding.cause}{where}", style="bold"))
        console.print(Padding(Text(finding.advice), (0, 0, 1, 2)))


def _show_verdict(result, config, console):
    if result.no_noise:
        console.print(f"The noise could not be measured: {result.no_noise}.")
    elif result.layout:
        console.print(
            "Noise: one device against itself with the rows of each batch in another order.\n"
            f"Allowed: |a - b| / max(1, |b|) up to {config.tolerance:g}, or {NOISE_FACTOR} times "
            "the noise.",
            highlight=False,
        )
    if result.is_equal:
        console.print(Text("Every configuration gives one device's result.", style="bold green"))
    elif result.layout:
        names = [outcome.name for outcome in result.outcomes if outcome.verdict != EQUAL]
        console.print(Text(f"Not one device's result: {', '.join(names)}.", style="bold red"))
    else:
        console.print(Text("One device alone could not train this.", style="bold red"))
