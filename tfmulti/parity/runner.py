"""Runs one device and every configuration in turn, compares them and shows the result."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tfmulti.cluster.environment import PEER_LOST
from tfmulti.launch.logs import log_tail
from tfmulti.parity import worker
from tfmulti.parity.compare import (
    KINDS,
    Comparison,
    Record,
    compare,
    first_differing_replicas,
    first_differing_workers,
    noise_of,
)
from tfmulti.parity.config import ParityConfig
from tfmulti.runtime import processes
from tfmulti.verification import causes

EQUAL, DIFFERS, REFUSED, FAILED = "equal", "differs", "refused", "failed"
# How much larger than the noise a difference may be: the noise is only one sample.
NOISE_FACTOR = 10
# With these, no later difference says anything of the step.
_POINTLESS = (causes.DATA.name, causes.START.name)
_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": "{}"}


@dataclasses.dataclass
class Outcome:
    """The result of one configuration.

    Attributes:
        name: Such as "2 replicas".
        verdict: `"equal"`, `"differs"`, `"refused"` (a ValueError) or `"failed"`.
        comparison: The differences, where it ran to its end.
        findings: The likely causes, the likeliest first.
        error: The error's message, where there is one.
        traceback: Where it came from.
    """

    name: str
    verdict: str
    comparison: Comparison | None = None
    findings: list[causes.Finding] = dataclasses.field(default_factory=list)
    error: str = ""
    traceback: str = ""


@dataclasses.dataclass
class Result:
    """The whole comparison.

    Attributes:
        layout: The steps, as text.
        noise: For weights, loss and metrics: the difference that another order of the rows
            makes on one device; None where it could not be measured.
        no_noise: Why it could not be measured.
        limits: For weights, loss and metrics: the largest difference that counts as equal.
        outcomes: One for each configuration; one device alone where it failed.
    """

    layout: str
    noise: dict[str, float] | None
    no_noise: str
    limits: dict[str, float]
    outcomes: list[Outcome]

    @property
    def is_equal(self) -> bool:
        """Whether every configuration agrees with one device."""
        return all(outcome.verdict == EQUAL for outcome in self.outcomes)


def run_experiment(config: ParityConfig, print_fn: Callable[[str], object]) -> Result:
    """Trains on one device and in every configuration, compares, and looks for causes.

    Args:
        config: The comparison.
        print_fn: Function that takes a line of text about the progress.

    Returns:
        The result. It includes configurations that raised an error.
    """
    with tempfile.TemporaryDirectory(prefix="tfmulti_parity_") as name:
        folder = Path(name)
        print_fn("one device, and again with the rows of each batch in another order ...")
        failed = _run(config, worker.ONE_DEVICE, 1, folder / "one", "one device")
        if failed:
            return Result("", None, "", {}, [failed])
        reference = Record(folder / "one" / "0")
        reordered = compare(Record(folder / "one" / "reordered"), reference, config.tolerance)
        noise, no_noise = noise_of(reordered, reference.read_summary().rounding)
        layout = (folder / "one" / "layout.txt").read_text()
        noises = noise or dict.fromkeys(KINDS, 0.0)
        limits = {kind: max(config.tolerance, NOISE_FACTOR * noises[kind]) for kind in KINDS}
        result = Result(layout, noise, no_noise, limits, [])
        for kind, count in config.setups:
            title = f"{count} {kind}"
            print_fn(f"{title} ...")
            run_folder = folder / title
            outcome = _run(config, kind, count, run_folder, title)
            if outcome is None:
                numbers = range(count if kind == worker.WORKERS else 1)
                records = [Record(run_folder / str(number)) for number in numbers]
                outcome = _judge(config, title, records, reference, limits)
            result.outcomes.append(outcome)
            shutil.rmtree(run_folder, ignore_errors=True)
        _explain(config, result, folder / "diagnosis", print_fn)
        return result


def _judge(config, title, records, reference, allowed) -> Outcome:
    try:
        found = compare(records[0], reference, config.tolerance)
    except ValueError as error:
        return Outcome(title, DIFFERS, error=str(error))
    outcome = Outcome(title, EQUAL, found)
    if any(found.largest[name] > allowed[name] for name in KINDS):
        outcome.verdict = DIFFERS
    elif found.first is not None:
        outcome.findings.append(causes.find(causes.ROUNDING, found.first[0]))
    for cause, unlike in (
        (causes.WORKERS, first_differing_workers(records)),
        (causes.REPLICAS, first_differing_replicas(records[0])),
    ):
        if unlike is not None:
            outcome.verdict = DIFFERS
            found.differing.append(unlike[0])
            outcome.findings.append(causes.find(cause, f"{unlike[0]} after step {unlike[1]}"))
    if outcome.verdict == DIFFERS and not found.same_data:
        outcome.findings.append(causes.find(causes.DATA, config.dataset))
    if outcome.verdict == DIFFERS and not found.same_start:
        outcome.findings.append(causes.find(causes.START, found.first[0]))
    return outcome


def _explain(config, result, run_folder, print_fn):
    """Looks for causes that the records alone do not show."""
    unexplained = [
        (outcome, count)
        for outcome, (_, count) in zip(result.outcomes, config.setups)
        if outcome.verdict in (DIFFERS, REFUSED)
        and not any(finding.cause in _POINTLESS for finding in outcome.findings)
    ]
    if unexplained:
        print_fn("looking for the cause ...")
        outcome, count = unexplained[0]
        failed = _run(config, worker.DIAGNOSIS, count, run_folder, "diagnosis")
        found = [] if failed else json.loads((run_folder / "findings.json").read_text())
        for outcome, _ in unexplained:
            outcome.findings += [causes.Finding(**finding) for finding in found]
            if outcome.comparison and not outcome.findings:
                said = [f"the diagnosis failed: {failed.error}"] if failed else []
                outcome.findings.append(causes.find(causes.UNKNOWN, *said))
    for outcome in result.outcomes:
        outcome.findings = causes.in_order(outcome.findings)


def _run(config, kind, count, folder, title) -> Outcome | None:
    """Runs a task in separate processes. Returns None, or the error."""
    folder.mkdir()
    task = {"kind": kind, "count": count, "config": dataclasses.asdict(config)}
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, "-m", worker.__name__, str(folder)]
    environments = [_ENVIRONMENT]
    if kind == worker.WORKERS:
        environments = [{**_ENVIRONMENT, "TF_CONFIG": each} for each in processes.tf_configs(count)]
    finished = processes.run_together(command, environments, timeout_s=config.timeout)
    if all(done.how == processes.DONE for done in finished):
        return None
    return _describe_failure(config, finished, folder, title)


def _describe_failure(config, finished, folder, title) -> Outcome:
    # Others have only seen that one is lost, and may have ended first.
    causes_first = sorted(enumerate(finished), key=lambda each: each[1].returncode == PEER_LOST)
    for number, done in causes_first:
        if done.how != processes.FAILED:
            continue
        path = folder / f"error_{number}.json"
        if not path.exists():
            last = log_tail(done.stderr)
            message = f"The process ended with exit code {done.returncode}. {last}"
            return Outcome(title, FAILED, error=message.strip())
        failure = json.loads(path.read_text())
        verdict = REFUSED if failure["kind"] == "ValueError" else FAILED
        return Outcome(title, verdict, error=failure["message"], traceback=failure["traceback"])
    message = f"It took longer than {config.timeout} s. Use a larger --timeout, or fewer --steps."
    return Outcome(title, FAILED, error=message)


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
    """Returns the first difference, with a shortened variable path; the full path is below."""
    if not found or not found.first:
        return Text("")
    name, step = found.first
    return Text(f"{'/'.join(name.split('/')[-2:])}, step {step}")


def _show_causes(result, console, tracebacks):
    outcomes_of = {}
    for outcome in result.outcomes:
        for finding in outcome.findings:
            outcomes_of.setdefault(finding, []).append(outcome.name)
        if outcome.error:
            console.print(Text(f"{outcome.name}: {outcome.error}\n", style="red"))
        if outcome.traceback and tracebacks:
            # Unwrapped, so that paths and code can be copied.
            console.print(Text(outcome.traceback), soft_wrap=True)
    for finding, names in outcomes_of.items():
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
