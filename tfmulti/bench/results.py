"""Makes the rows of the result of what was measured."""

from __future__ import annotations

import dataclasses
import re
import statistics
import textwrap
from collections.abc import Sequence

from tfmulti.bench import breakdown, setups
from tfmulti.bench.schedule import Block, Series
from tfmulti.bench.statistics import summarize

OK = "ok"
_ERROR = re.compile(r"\b([A-Z]\w*(Error|Exception)|error): ")
_WORKER = re.compile(r"^\[worker \d+\] ")
_LENGTH = 200


def describe_workload(name: str, series: Sequence[Series]) -> dict:
    """Returns the part of the result that is about one workload.

    Args:
        name: The workload.
        series: What was measured.

    Returns:
        `"rows"`, one for each configuration and number of steps a call; `"breakdown"`, one for each
        configuration of ours on several workers or replicas, with a verdict.
    """
    rows = [_describe(each) for each in series]
    for row in rows:
        _compare(row, rows)
    return {
        "rows": rows,
        "breakdown": [found for row in rows if (found := _break_down(row, rows))],
        "gradient_bytes": next((s.gradient_bytes for s in series if s.gradient_bytes), None),
    }


def _describe(series) -> dict:
    setup, step = series.setup, summarize(series.seconds)
    failed = bool(series.failure) or not step
    status = f"does not run: {shorten(series.failure)}" if failed else OK
    examples = setup.batch_size * setup.replicas
    long = series.long_block
    return {
        "setup": setup.name,
        "kind": setup.kind,
        "replicas": setup.replicas,
        "processes": setup.processes,
        "scaling": setup.scaling,
        "steps_per_execution": series.steps_per_execution,
        "global_batch_size": examples,
        "status": status,
        "failure": series.failure,
        "step": step and dataclasses.asdict(step),
        "throughput": step and examples / step.median,
        "input_seconds": statistics.median(series.input_seconds) if series.input_seconds else None,
        "fit_tail_seconds": long and long.tail,
        "start_seconds": series.start_seconds,
        "first_step_seconds": series.first_step_seconds,
        "verified_seconds": series.verified_seconds,
        "idle_cpu_seconds": sum(block.idle_cpu for block in series.blocks),
        "peak_bytes": series.peak_bytes,
        "blocks": [_describe_block(block) for block in series.blocks],
    }


def shorten(words: str) -> str:
    r"""Returns the line of an error that says most: the last one that names its kind.

    >>> shorten("Traceback:\n  File x\nValueError: no data\n\nThe logs are there")
    'ValueError: no data'
    """
    lines = [_WORKER.sub("", line).strip() for line in words.splitlines()]
    lines = [line for line in lines if line]
    told = [line for line in lines if _ERROR.search(line)]
    return textwrap.shorten((told or lines or ["no step was measured"])[-1], _LENGTH)


def _describe_block(block: Block) -> dict:
    median = statistics.median(block.seconds) if block.seconds else None
    return {**dataclasses.asdict(block), "median": median}


def find(rows, kind: str, replicas: int, steps_per_execution: int = 1, scaling=setups.WEAK):
    """Returns the row of a configuration that ran, or None."""
    wanted = (kind, replicas, steps_per_execution, scaling)
    for row in rows:
        known = tuple(row[n] for n in ("kind", "replicas", "steps_per_execution", "scaling"))
        if known == wanted and row["status"] == OK:
            return row
    return None


def _compare(row, rows):
    """Adds speed-up and efficiency: against one worker of the same kind, and the control."""
    kind, calls = row["kind"], row["steps_per_execution"]
    alone = {
        setups.DDP: setups.DDP,
        setups.STOCK_MIRRORED: setups.PLAIN,
        setups.STOCK_MULTI_WORKER: setups.PLAIN,
    }.get(kind, setups.ONE_WORKER)
    one = find(rows, alone, 1, calls)
    control = find(rows, setups.CONTROL, row["replicas"], calls)
    if row["replicas"] == 1:
        control = one
    speed_up = row["throughput"] and one and row["throughput"] / one["throughput"]
    row["speed_up"] = speed_up
    row["efficiency"] = speed_up and speed_up / row["replicas"]
    row["efficiency_of_control"] = (
        row["throughput"] / control["throughput"]
        if row["throughput"] and control and row["scaling"] == setups.WEAK
        else None
    )


def _break_down(row, rows):
    """Divides the step of a configuration of ours, once for all its numbers of steps a call."""
    kind, count = row["kind"], row["replicas"]
    is_one = kind == setups.ONE_WORKER
    chosen = is_one or kind in (setups.MIRRORED, *setups.MULTI_WORKER)
    if not chosen or row["scaling"] != setups.WEAK or row["steps_per_execution"] != 1:
        return None
    several = max(
        (r for r in rows if r["setup"] == row["setup"] and r["step"]),
        key=lambda r: r["steps_per_execution"],
        default=None,
    )
    if several is None or row["status"] != OK:
        return None
    calls = several["steps_per_execution"]
    control = several if is_one else find(rows, setups.CONTROL, count, calls)
    if control is None:
        return None
    parts = breakdown.break_down(
        row["step"]["median"],
        several["step"]["median"],
        control["step"]["median"],
        row["input_seconds"] or 0.0,
    )
    return {
        "setup": row["setup"],
        **dataclasses.asdict(parts),
        "bound_by": parts.bound_by,
        "advice": breakdown.ADVICE[parts.bound_by],
    }
