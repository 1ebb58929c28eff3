"""Makes the rows of the result of what was measured, and describes the machine."""

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

from tfmulti import hardware
from tfmulti.bench import setups
from tfmulti.bench.config import count_cores
from tfmulti.bench.schedule import Block, Series
from tfmulti.bench.statistics import summarize

_PACKAGES = ("tensorflow", "keras", "numpy", "torch", "mpi4py", "impi-rt", "mpich", "openmpi")


def describe() -> dict:
    """Returns cores, processor, memory, and versions, for `bench.json`."""
    return {
        "cores": count_cores(),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": _gpus(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor()


def _gpus() -> list[str]:
    return [gpu.name for gpu in hardware.read_driver().gpus]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


INPUT, COMPUTE, COMMUNICATION, HOST = "input", "compute", "communication", "host"
_INPUT_SHARE = 0.5
_SHARE = 0.2
ADVICE = {
    INPUT: "Make the source faster: map with num_parallel_calls=tf.data.AUTOTUNE, cache(), "
    "decode less, store prepared examples; then measure again.",
    COMPUTE: "More workers help. Within one: mixed_bfloat16 where the processor has it, "
    "or a smaller model.",
    COMMUNICATION: "Try --communication mpi, DistributedOptimizer(compression='bfloat16'), a "
    "larger batch per replica, or gradient_accumulation_steps.",
    HOST: "Raise steps_per_execution, or the batch size.",
}


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The parts of a step with one step a call, in seconds; they add to the step.

    Attributes:
        input: Drawing a batch from the same pipeline, measured alone, without training; at most
            the control's step.
        compute: The control's step with several steps a call, without the input. The control
            is as many one-device processes at once that do not communicate.
        reduction: The step with several steps a call beyond the control's.
        host: What one step a call costs beyond several: Keras's and Python's own work.
    """

    input: float
    compute: float
    reduction: float
    host: float

    @property
    def step(self) -> float:
        """The sum of the parts."""
        return self.input + self.compute + self.reduction + self.host

    @property
    def bound_by(self) -> str:
        """The bottleneck of the job.

        Input where drawing a batch takes half of a step; else communication, and else the host,
        where it is a fifth; else compute.

        >>> Breakdown(input=1.0, compute=60.0, reduction=40.0, host=1.0).bound_by
        'communication'
        """
        if self.input >= _INPUT_SHARE * self.step:
            return INPUT
        if self.reduction >= _SHARE * self.step:
            return COMMUNICATION
        return HOST if self.host >= _SHARE * self.step else COMPUTE


def break_down(single: float, several: float, control: float, input_alone: float) -> Breakdown:
    """Divides a step.

    What noise makes negative is 0, and the part before it is smaller by as much.

    Args:
        single: Seconds of a step with one step a call.
        several: The same with several steps a call.
        control: Seconds of a step of the control with several steps a call.
        input_alone: Seconds to draw one batch.

    >>> break_down(single=12.0, several=10.0, control=8.0, input_alone=1.0)
    Breakdown(input=1.0, compute=7.0, reduction=2.0, host=2.0)
    """
    several = min(several, single)
    control = min(control, several)
    drawn = min(input_alone, control)
    return Breakdown(drawn, control - drawn, several - control, single - several)


OK = "ok"
_ERROR = re.compile(r"\b([A-Z]\w*(Error|Exception)|error): ")
_WORKER = re.compile(r"^\[worker \d+\] ")
_LENGTH = 200


def describe_workload(name: str, series: Sequence[Series]) -> dict:
    """Returns the part of the result for one workload.

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
    parts = break_down(
        row["step"]["median"],
        several["step"]["median"],
        control["step"]["median"],
        row["input_seconds"] or 0.0,
    )
    return {
        "setup": row["setup"],
        **dataclasses.asdict(parts),
        "bound_by": parts.bound_by,
        "advice": ADVICE[parts.bound_by],
    }
