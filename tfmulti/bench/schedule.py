"""Alternates between the configurations of a workload: which one trains when, and how long."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfmulti.bench import results
from tfmulti.bench.jobs import Job, JobFailed
from tfmulti.bench.results import Series, describe_block, step_seconds, summarize
from tfmulti.bench.setups import MPI, RING, BenchConfig, Setup, create_setup, create_setups

Print = Callable[[str], None]
_BLOCK_S = 1.2
_STEPS = (6, 30)
_WARM_UP_STEPS = 4
_INPUT_STEPS = 30
_LONG_STEPS = 100
# For this one, the time of `fit` beyond its steps is measured: a long block takes seconds.
_LONG_WORKLOAD = "compute"

SIZES = (1, 32 * 1024, 1024**2, 16 * 1024**2)
"""Numbers of float32 values that are reduced alone."""
_SUMS = dict(zip(SIZES, (60, 40, 12, 4)))
_REDUCTION_ROUNDS = 3
_REDUCTION_S = 40.0


def run_bench(config: BenchConfig, print_fn: Print, more_reductions: Sequence[Setup] = ()) -> dict:
    """Measures all workloads, then the all-reduce, and returns what `bench.json` holds.

    Args:
        config: The bench.
        print_fn: Function that takes a line of text for the user.
        more_reductions: What else sums values when the transports of workers do.
    """
    began = time.perf_counter()
    folder = Path(config.workdir) / "logs"
    found = {"machine": results.describe_machine(), "config": dataclasses.asdict(config)}
    found["workloads"] = workloads = {}
    reduces = config.numbers[-1] > 1 and config.allreduce
    end = began + config.minutes * 60 - (_REDUCTION_S if reduces else 0.0)
    broken: set[str] = set()
    for number, name in enumerate(config.workload_names):
        now = time.perf_counter()
        deadline = now + (end - now) / (len(config.workload_names) - number)
        chosen = [each for each in create_setups(name, config) if each.kind.name not in broken]
        series = Rounds(name, config, folder / name, print_fn).run(chosen, deadline)
        # Others' programs that do not run here cost their startup time only once.
        broken |= {s.setup.kind.name for s in series if s.failure and s.setup.kind.is_peer}
        workloads[name] = results.describe_workload(series)
    found["allreduce"] = None
    if reduces:
        found["allreduce"] = measure_reductions(config, folder, print_fn, more_reductions)
    found["seconds"] = time.perf_counter() - began
    return found


class Rounds:
    """All configurations of one workload.

    Args:
        workload: The workload.
        config: The bench.
        folder: Where the processes' output goes.
        print_fn: Function that takes a line of text for the user.
    """

    def __init__(self, workload: str, config: BenchConfig, folder: Path, print_fn: Print):
        self._workload, self._config, self._folder = workload, config, folder
        self._tell = lambda line: print_fn(f"{workload}: {line}")
        self._series: list[tuple[Job, Series]] = []
        self._steps: dict[int, int] = {}

    def run(self, chosen: Sequence[Setup], deadline: float) -> list[Series]:
        """Starts all configurations, alternates between them until time is over, and ends them.

        Args:
            chosen: The configurations.
            deadline: When to begin no further round, by `time.perf_counter()`.

        Returns:
            What was measured; also of those that do not run.
        """
        with contextlib.ExitStack() as stack:
            for setup in chosen:
                folder = self._folder / setup.name.replace(" ", "_")
                self._start(stack.enter_context(Job(setup, folder, self._config.timeout)))
            self._measure_once()
            self._go_round(deadline)
            for job in {id(job): job for job, each in self._series if not each.failure}.values():
                job.end()
        return [series for _, series in self._series]

    def _start(self, job):
        self._tell(f"starting {job.setup.name}")
        own = [Series(job.setup, number) for number in job.setup.steps_per_execution]
        self._series += [(job, series) for series in own]
        with self._failing(job):
            job.start()
            first = job.train(steps=1)[0]
            seconds = time.perf_counter() - job.began
            ends = job.train(steps=_WARM_UP_STEPS)[0]["ends"]
            step = (ends[-1] - ends[0]) / (len(ends) - 1)
            for series in own:
                series.figures = {
                    "start_seconds": seconds,
                    "first_step_seconds": first.get("first"),
                    "verified_seconds": first.get("verified"),
                }
                series.gradient_bytes = job.facts[0].get("gradient_bytes")
                number = series.steps_per_execution
                self._steps[id(series)] = self._choose_steps(step, number)
                if number > 1:
                    job.train(**_order(number, number))

    def _choose_steps(self, seconds, number) -> int:
        least, most = _STEPS
        steps = self._config.steps or min(most, max(least, int(_BLOCK_S / max(seconds, 1e-6))))
        # At least one interval between the ends of calls, of which each is a mean already.
        return max(-(-steps // number), 2) * number

    @contextlib.contextmanager
    def _failing(self, job):
        """Notes a failure with the job's series; the others go on."""
        try:
            yield
        except JobFailed as error:
            self._tell(f"{job.setup.name} does not run: its last words are in bench.json")
            job.kill()
            for other, series in self._series:
                if other is job:
                    series.failure = str(error).strip()

    def _running(self):
        return [(job, series) for job, series in self._series if not series.failure]

    def _measure_once(self):
        """Draws batches alone; trains long blocks."""
        self._tell("input alone, and long blocks")
        for job, series in self._running():
            # One job has several series, which all end with it.
            if series.failure:
                continue
            kind, number = job.setup.kind, series.steps_per_execution
            with self._failing(job):
                if number == 1 and not kind.is_peer:
                    answers = job.train(steps=_INPUT_STEPS, input_only=True)
                    drawn = [s for answer in answers for s in step_seconds(answer["ends"])]
                    series.figures["input_seconds"] = statistics.median(drawn)
                is_last = number == job.setup.steps_per_execution[-1]
                if self._workload == _LONG_WORKLOAD and is_last and kind.long_order is not None:
                    order = {**_order(_LONG_STEPS, number), **kind.long_order}
                    block = self._train(job, series, order)
                    series.figures["fit_tail_seconds"] = block["tail"]
                    # The same steps as in a round; with several a call it has most of them.
                    series.blocks += [] if kind.long_order else [block]

    def _go_round(self, deadline):
        longest = 0.0
        for number in range(self._config.rounds):
            began = time.perf_counter()
            if number and began + longest > deadline:
                self._tell(f"time is over after {number} rounds")
                break
            self._tell(f"round {number + 1} of {self._config.rounds}")
            # The long blocks were a round in the first order.
            forth = number % 2 == (self._workload == _LONG_WORKLOAD)
            for job, series in self._running()[:: 1 if forth else -1]:
                if series.failure:
                    continue
                order = _order(self._steps[id(series)], series.steps_per_execution)
                with self._failing(job):
                    series.blocks.append(self._train(job, series, order))
            longest = max(longest, time.perf_counter() - began)

    def _train(self, job, series, order) -> dict:
        answers = job.train(**order)
        series.figures["peak_bytes"] = [answer["peak_bytes"] for answer in answers]
        return describe_block(answers, order["steps"], series.steps_per_execution)


def _order(steps, steps_per_execution) -> dict:
    # What others start supports only steps.
    if steps_per_execution == 1:
        return {"steps": steps}
    return {"steps": steps, "steps_per_execution": steps_per_execution}


def measure_reductions(
    config: BenchConfig, folder: Path, print_fn: Print, more: Sequence[Setup] = ()
) -> dict:
    """Measures all transports between as many workers as the largest configuration has.

    They take turns, as configurations do; each has its first sums of a size for warm-up.

    Returns:
        `"workers"`; `"floats"`; `"transports"`: by name, for each size the summary of the
        seconds; `"failures"`: the last words of those that do not run.
    """
    count = config.numbers[-1]
    chosen = [
        create_setup(kind.changed(create="tfmulti.bench.training:create_all_reduce"), count, config)
        for kind in (RING, MPI)
        if kind in config.kinds
    ]
    failures: dict[str, str] = {}
    seconds: dict[str, dict[int, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        jobs = []
        for setup in [*chosen, *more]:
            name = setup.kind.name
            jobs.append(stack.enter_context(Job(setup, folder / name, config.timeout)))
            print_fn(f"all-reduce: starting {name}")
            try:
                jobs[-1].start()
            except JobFailed as error:
                failures[name] = str(error)
                # Others that are measured would share the processor with it.
                jobs[-1].kill()
        for number in range(_REDUCTION_ROUNDS):
            jobs = [job for job in jobs if job.setup.kind.name not in failures]
            print_fn(f"all-reduce: round {number + 1} of {_REDUCTION_ROUNDS}")
            for job in jobs[:: -1 if number % 2 else 1]:
                _measure_sizes(job, seconds, failures)
        for job in jobs:
            if job.setup.kind.name not in failures:
                job.end()
    found = {
        name: {str(size): summarize(values) for size, values in sizes.items()}
        for name, sizes in seconds.items()
        if name not in failures
    }
    return {"workers": count, "floats": list(SIZES), "transports": found, "failures": failures}


def _measure_sizes(job, seconds, failures):
    name = job.setup.kind.name
    sizes = seconds.setdefault(name, {size: [] for size in SIZES})
    try:
        for size, times in _SUMS.items():
            job.train(floats=size, times=max(1, times // 4))
            sizes[size] += job.train(floats=size, times=times)[0]["seconds"]
    except JobFailed as error:
        failures[name] = str(error)
        job.kill()
