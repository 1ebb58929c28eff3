"""Summarizes measured times: medians, the parts of a step, rows; describes the machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import statistics
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from tfmulti import hardware
from tfmulti.bench.setups import CONTROL, WEAK, Setup

_PACKAGES = ("tensorflow", "keras", "numpy", "torch", "mpi4py", "impi-rt", "mpich", "openmpi")


def describe_machine() -> dict:
    """Returns cores, processor, memory, and versions, for `bench.json`."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    information = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", information, re.MULTILINE)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model[1] if model else platform.processor(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [gpu.name for gpu in hardware.read_driver().gpus],
        "load": os.getloadavg()[0],
        "versions": versions,
    }


def summarize(values: Sequence[float]) -> dict | None:
    """Returns median, tenth and ninetieth percentile, mean, number and smallest of values.

    >>> summarize([3.0, 1.0, 2.0])["median"], summarize([])
    (2.0, None)
    """
    if not values:
        return None
    p10, median, p90 = np.percentile(values, (10, 50, 90)).tolist()
    mean = statistics.fmean(values)
    return dict(median=median, p10=p10, p90=p90, mean=mean, n=len(values), best=min(values))


def step_seconds(ends: Sequence[float], steps_per_execution: int = 1) -> list[float]:
    """Returns the seconds of each step of a block, from the times at the end of each call.

    The first call of a block begins with the making of an iterator, and is left out; so are two
    more where there are many.

    >>> step_seconds([1.0, 3.0, 5.0], steps_per_execution=2)
    [1.0, 1.0]
    """
    seconds = [(after - before) / steps_per_execution for before, after in zip(ends, ends[1:])]
    return seconds[2:] if len(seconds) >= 8 else seconds


@dataclasses.dataclass
class Series:
    """The measurements of a configuration with one number of steps per call.

    Attributes:
        setup: The configuration.
        steps_per_execution: Steps of one call.
        blocks: The blocks of all rounds, as `describe_block` has them.
        failure: Why it does not run; empty where it does.
        figures: What else is known, as the row has it: `input_seconds`, to draw one batch and train
            nothing; `fit_tail_seconds`, of `fit` beyond the last step of a long block;
            `start_seconds`, from the start of its processes to the end of the first step;
            `first_step_seconds`, from the call of `fit` to there without the `verified_seconds` of
            verification; `peak_bytes`, the largest resident memory of each process.
        gradient_bytes: The bytes of the gradients.
    """

    setup: Setup
    steps_per_execution: int
    blocks: list[dict] = dataclasses.field(default_factory=list)
    failure: str = ""
    figures: dict = dataclasses.field(default_factory=dict)
    gradient_bytes: int | None = None


_FIGURES = ("input_seconds", "fit_tail_seconds", "start_seconds", "first_step_seconds")


def describe_block(answers: Sequence[dict], steps: int, steps_per_execution: int) -> dict:
    """Returns the seconds of each step of a block, of all processes.

    `tail` is from the end of the last step to the end of the call, the longest of all processes.
    """
    seconds = [s for answer in answers for s in step_seconds(answer["ends"], steps_per_execution)]
    return {
        "steps": steps,
        "seconds": seconds,
        "tail": max(answer["ended"] - answer["ends"][-1] for answer in answers),
    }


OK = "ok"
INPUT, COMPUTE, COMMUNICATION, HOST = "input", "compute", "communication", "host"
_INPUT_SHARE = 0.5
_SHARE = 0.2
ADVICE = {
    INPUT: "Make the source faster: map with num_parallel_calls=tf.data.AUTOTUNE, cache(), "
    "decode less, store prepared examples; then measure again.",
    COMPUTE: "More workers help. Within one: mixed_bfloat16 where the processor has it, "
    "or a smaller model.",
    COMMUNICATION: "Start workers with tfmulti.launch --mpi; try "
    "DistributedOptimizer(compression='bfloat16'), a "
    "larger batch per replica, or gradient_accumulation_steps.",
    HOST: "Raise steps_per_execution, or the batch size.",
}


def break_down(single: float, several: float, control: float, input_alone: float) -> dict:
    """Divides a step, with one step per call, into parts in seconds that add up to it.

    What noise makes negative is 0, and the part before it is smaller by as much.

    Args:
        single: Seconds of a step with one step a call.
        several: The same with several steps a call.
        control: Seconds of a step of the control with several steps a call: of as many one-device
            processes at once that do not communicate.
        input_alone: Seconds to draw one batch from the same pipeline, without training.

    Returns:
        `"input"`, at most the control's step; `"compute"`, the rest of it; `"reduction"`, the step
        beyond the control's; `"host"`, what one step a call costs beyond several: Keras's and
        Python's own work.

    >>> break_down(single=12.0, several=10.0, control=8.0, input_alone=1.0)
    {'input': 1.0, 'compute': 7.0, 'reduction': 2.0, 'host': 2.0}
    """
    several = min(several, single)
    control = min(control, several)
    drawn = min(input_alone, control)
    parts = drawn, control - drawn, several - control, single - several
    return dict(zip(("input", "compute", "reduction", "host"), parts))


def find_bottleneck(parts: dict) -> str:
    """Returns the input if it takes half of a step, else what takes a fifth, else the computation.

    >>> find_bottleneck({"input": 1.0, "compute": 60.0, "reduction": 40.0, "host": 1.0})
    'communication'
    """
    step = sum(parts.values())
    if parts["input"] >= _INPUT_SHARE * step:
        return INPUT
    if parts["reduction"] >= _SHARE * step:
        return COMMUNICATION
    return HOST if parts["host"] >= _SHARE * step else COMPUTE


def describe_workload(series: Sequence[Series]) -> dict:
    """Returns the part of the result for one workload.

    Returns:
        `"rows"`, one for each configuration and number of steps a call; `"breakdown"`, one for each
        configuration on several workers or replicas, and for one worker, with a verdict.
    """
    rows = [_describe(each) for each in series]
    parts = []
    for row, each in zip(rows, series):
        _compare(row, rows, each.setup.kind.baseline)
        if each.setup.kind.calls_of_several and each.setup.kind != CONTROL:
            parts += _break_down(row, rows)
    size = next((s.gradient_bytes for s in series if s.gradient_bytes), None)
    return {"rows": rows, "breakdown": parts, "gradient_bytes": size}


def _describe(series) -> dict:
    setup = series.setup
    step = summarize([seconds for block in series.blocks for seconds in block["seconds"]])
    failed = bool(series.failure) or not step
    examples = setup.batch_size * setup.replicas
    return {
        "setup": setup.name,
        "kind": setup.kind.name,
        **{name: getattr(setup, name) for name in ("replicas", "processes", "scaling")},
        "steps_per_execution": series.steps_per_execution,
        "global_batch_size": examples,
        "status": f"does not run: {shorten(series.failure)}" if failed else OK,
        "failure": series.failure,
        "step": step,
        "throughput": step and examples / step["median"],
        **dict.fromkeys((*_FIGURES, "verified_seconds")),
        "peak_bytes": [],
        **series.figures,
        "blocks": series.blocks,
    }


_ERROR = re.compile(r"\b([A-Z]\w*(Error|Exception)|error): ")
_WORKER = re.compile(r"^\[worker \d+\] ")
_LENGTH = 200


def shorten(words: str) -> str:
    r"""Returns the line of an error that says most: the last one that names its kind.

    >>> shorten("Traceback:\n  File x\nValueError: no data\n\nThe logs are there")
    'ValueError: no data'
    """
    lines = [_WORKER.sub("", line).strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return textwrap.shorten((errors or lines or ["no step was measured"])[-1], _LENGTH)


def find(rows, kind: str, replicas: int, steps_per_execution: int = 1, scaling=WEAK):
    """Returns the row of a configuration that ran, or None."""
    wanted = (kind, replicas, steps_per_execution, scaling, OK)
    names = ("kind", "replicas", "steps_per_execution", "scaling", "status")
    return next((row for row in rows if tuple(row[name] for name in names) == wanted), None)


def _compare(row, rows, baseline):
    """Adds speed-up and efficiency: against one worker, and the control."""
    calls, throughput, count = row["steps_per_execution"], row["throughput"], row["replicas"]
    one = find(rows, baseline, 1, calls)
    control = one if count == 1 else find(rows, CONTROL.name, count, calls)
    speed_up = throughput / one["throughput"] if throughput and one else None
    of_control = throughput / control["throughput"] if throughput and control else None
    row["speed_up"] = speed_up
    row["efficiency"] = speed_up and speed_up / count
    row["efficiency_of_control"] = of_control if row["scaling"] == WEAK else None


def _break_down(row, rows) -> list[dict]:
    """Divides the step of a configuration, once for all its numbers of steps a call."""
    if row["scaling"] != WEAK or row["steps_per_execution"] != 1 or row["status"] != OK:
        return []
    same = [each for each in rows if each["setup"] == row["setup"] and each["step"]]
    several = max(same, key=lambda each: each["steps_per_execution"])
    calls, count = several["steps_per_execution"], row["replicas"]
    control = several if count == 1 else find(rows, CONTROL.name, count, calls)
    if control is None:
        return []
    steps = [each["step"]["median"] for each in (row, several, control)]
    parts = break_down(*steps, row["input_seconds"] or 0.0)
    verdict = find_bottleneck(parts)
    return [{"setup": row["setup"], **parts, "bound_by": verdict, "advice": ADVICE[verdict]}]


def has_measured(found) -> bool:
    """Whether any configuration of a result ran."""
    return any(row["status"] == OK for each in found["workloads"].values() for row in each["rows"])
