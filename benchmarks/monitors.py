"""Measures the cost of the monitors: alternating blocks of steps with and without them."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tfmulti.bench import setups
from tfmulti.bench.jobs import Job
from tfmulti.bench.report import TextTable
from tfmulti.bench.results import describe_machine, step_seconds, summarize
from tfmulti.bench.setups import BenchConfig, Setup

# Long enough for the thread that reads the devices to do so, once a second, in every block.
_BLOCK_S = 3.0
_STEPS = (20, 200)
_WARM_UP_STEPS = 12
CLOCK, PROCESSOR = "clock", "processor"
KEYS = {CLOCK: "monitored_over_unmonitored", PROCESSOR: "monitored_over_unmonitored_cpu"}
# A drift of the machine during a round is the same with and without.
_ORDER = (False, True, True, False)


def measure(config: BenchConfig, print_fn: Callable[[str], None]) -> dict:
    """Measures the first workload with one worker, and with several over TensorFlow's ring.

    Args:
        config: The bench.
        print_fn: Function that takes a line of text for the user.

    Returns:
        `"rows"`, one for each configuration, of the clock and of the processor seconds of all
        threads, which other programs disturb less; and `"ratios"`, the largest of each.

    Raises:
        JobFailed: Where a configuration does not run.
    """
    workload, create = config.workload_names[0], "benchmarks.training:Monitored"
    chosen = [
        setups.create_setup(kind.changed(create=create), count, config, workload)
        for kind, count in ((setups.ONE_WORKER, 1), (setups.RING, config.numbers[-1]))
        if kind in config.kinds and (kind == setups.ONE_WORKER or count > 1)
    ]
    rows = [row for setup in chosen for row in _measure_setup(workload, setup, config, print_fn)]
    ratios = {
        key: max((row["ratio"] for row in rows if row["by"] == by), default=None)
        for by, key in KEYS.items()
    }
    return {"machine": describe_machine(), "rows": rows, "ratios": ratios}


def _measure_setup(workload, setup: Setup, config, print_fn) -> list[dict]:
    folder = Path(config.workdir) / "logs" / "monitors" / setup.name.replace(" ", "_")
    rounds: dict[str, list[dict]] = {CLOCK: [], PROCESSOR: []}
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(Job(setup, folder, config.timeout))
        print_fn(f"{workload}: starting {setup.name}")
        job.start()
        warm = [_train(job, _WARM_UP_STEPS, monitored) for monitored in (True, False)]
        least, most = _STEPS
        steps = config.steps or min(most, max(least, int(_BLOCK_S / warm[1][CLOCK])))
        # The minutes are for both configurations.
        deadline = time.perf_counter() + config.minutes * 30.0
        for number in range(config.rounds):
            if number and time.perf_counter() > deadline:
                print_fn(f"{workload}: {setup.name}: time is over after {number} rounds")
                break
            print_fn(f"{workload}: {setup.name}, round {number + 1} of {config.rounds}")
            blocks = [(monitored, _train(job, steps, monitored)) for monitored in _ORDER]
            for by, found in rounds.items():
                monitored = [block[by] for is_monitored, block in blocks if is_monitored]
                unmonitored = [block[by] for is_monitored, block in blocks if not is_monitored]
                found.append({"monitored": monitored, "unmonitored": unmonitored})
        job.end()
    about = {"workload": workload, "setup": setup.name, "steps": steps}
    return [{**about, "by": by, **describe(found)} for by, found in rounds.items()]


def _train(job, steps, monitored) -> dict[str, float]:
    """Returns the seconds of a step: the median by the clock, the mean of the processor."""
    answers = job.train(steps=steps, monitored=monitored)
    clock, processor = (
        [each for answer in answers for each in step_seconds(answer[name])]
        for name in ("ends", "cpu_ends")
    )
    return {CLOCK: statistics.median(clock), PROCESSOR: statistics.fmean(processor)}


def describe(rounds: Sequence[dict]) -> dict:
    """Returns what rounds come to: the median of their ratios, and how they scatter.

    Args:
        rounds: Of each the seconds of a step in the two blocks with the monitors, `"monitored"`,
            and in those without, `"unmonitored"`, the first and the last of the round.

    >>> quiet = {"monitored": [1.0, 1.0], "unmonitored": [1.0, 1.0]}
    >>> describe([quiet, {**quiet, "monitored": [1.01, 1.01]}])["ratio"]
    1.005
    """
    ratios = [sum(each["monitored"]) / sum(each["unmonitored"]) for each in rounds]
    p10, p90 = np.percentile(ratios, (10, 90)).tolist()
    noises = [abs(last / first - 1.0) for first, last in (r["unmonitored"] for r in rounds)]
    spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
    return {
        "ratio": statistics.median(ratios),
        "p10": p10,
        "p90": p90,
        "standard_error": spread,
        "noise": statistics.median(noises),
        "unmonitored": summarize([seconds for each in rounds for seconds in each["unmonitored"]]),
        "monitored": summarize([seconds for each in rounds for seconds in each["monitored"]]),
        "rounds": rounds,
    }


def create_table(found: dict) -> TextTable:
    """Returns the result as a table."""
    columns = ("workload", "configuration", "by", "without ms", "with ms")
    columns += ("ratio", "p10-p90", "error", "noise")
    rows = [
        (
            row["workload"],
            row["setup"],
            row["by"],
            f"{row['unmonitored']['median'] * 1e3:.2f}",
            f"{row['monitored']['median'] * 1e3:.2f}",
            f"{row['ratio']:.4f}",
            f"{row['p10']:.4f}-{row['p90']:.4f}",
            "-" if row["standard_error"] is None else f"{row['standard_error']:.4f}",
            f"{row['noise']:.1%}",
        )
        for row in found["rows"]
    ]
    notes = [
        "ratio: a step with Throughput and Devices over one without, the median over rounds of "
        "four blocks: without, with, with, without; error: the standard error of its mean",
        "noise: by how much the two blocks without differ, the median over rounds",
        "processor: its seconds of all threads, which other programs disturb less than the clock's",
    ]
    return TextTable("What the monitors cost", columns, rows, notes)
