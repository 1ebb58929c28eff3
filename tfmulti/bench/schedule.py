"""Alternates between the configurations of a workload: which one trains when, and how long."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfmulti.bench import setups
from tfmulti.bench.config import BenchConfig
from tfmulti.bench.jobs import Job, JobFailed
from tfmulti.bench.setups import Setup
from tfmulti.bench.statistics import step_seconds

_BLOCK_S = 1.2
_STEPS = (6, 30)
_WARM_UP_STEPS = 4
_TAIL_STEPS = 100
_INPUT_STEPS = 30
# Of whose `fit` the time beyond its steps is measured: a long block takes seconds.
_TAIL_WORKLOAD = "compute"


@dataclasses.dataclass
class Block:
    """Steps of one call.

    Attributes:
        round: The round, from 0.
        steps: How many.
        seconds: The seconds of each step, of all processes.
        wall: Seconds of the whole call, as the driver saw it.
        tail: Seconds from the end of the last step to the end of the call, the longest of all
            processes.
        idle_cpu: Processor seconds that the processes used since their last block.
    """

    round: int
    steps: int
    seconds: list[float]
    wall: float
    tail: float
    idle_cpu: float


@dataclasses.dataclass
class Series:
    """The measurements of a configuration with one number of steps per call.

    Attributes:
        setup: The configuration.
        steps_per_execution: Steps of one call.
        blocks: The blocks of all rounds.
        long_block: A long block, for the time of `fit` beyond its steps.
        failure: Why it does not run; empty where it does.
        start_seconds: From the start of its processes to the end of the first step.
        first_step_seconds: From the call of `fit` to the end of the first step.
        verified_seconds: Of verification, which is not in the first step's.
        input_seconds: Seconds to draw one batch and train nothing, for each of several.
        gradient_bytes: The bytes of the gradients.
        peak_bytes: The largest resident memory of each process.
    """

    setup: Setup
    steps_per_execution: int
    blocks: list[Block] = dataclasses.field(default_factory=list)
    long_block: Block | None = None
    failure: str = ""
    start_seconds: float | None = None
    first_step_seconds: float | None = None
    verified_seconds: float | None = None
    input_seconds: list[float] = dataclasses.field(default_factory=list)
    gradient_bytes: int | None = None
    peak_bytes: list[int] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step, of all blocks."""
        return [each for block in self.blocks for each in block.seconds]


class Rounds:
    """All configurations of one workload.

    Args:
        workload: The workload.
        config: The bench.
        folder: Where the processes' output goes.
        print_fn: Function that takes a line of text for the user.
    """

    def __init__(
        self, workload: str, config: BenchConfig, folder: Path, print_fn: Callable[[str], None]
    ):
        self._workload, self._config, self._folder, self._print_fn = (
            workload,
            config,
            folder,
            print_fn,
        )
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
                job = Job(setup, self._folder / setup.name.replace(" ", "_"), self._config.timeout)
                self._start(stack.enter_context(job))
            self._measure_once()
            self._go_round(deadline)
            for job in {id(job): job for job, each in self._series if not each.failure}.values():
                job.end()
        return [series for _, series in self._series]

    def _start(self, job):
        name = job.setup.name
        self._print_fn(f"{self._workload}: starting {name}")
        own = [Series(job.setup, number) for number in job.setup.steps_per_execution]
        self._series += [(job, series) for series in own]
        try:
            job.start()
            first = job.train(steps=1)[0]
            seconds = time.perf_counter() - job.began
            answers = job.train(steps=_WARM_UP_STEPS)
            ends = answers[0]["ends"]
            step = (ends[-1] - ends[0]) / (len(ends) - 1)
            for series in own:
                series.start_seconds = seconds
                series.first_step_seconds = first.get("first", [None])[0]
                series.verified_seconds = first.get("verified", [None])[0]
                series.gradient_bytes = job.facts[0].get("gradient_bytes")
                number = series.steps_per_execution
                self._steps[id(series)] = self._choose_steps(step, number)
                if number > 1:
                    job.train(**_order(number, number))
        except JobFailed as error:
            self._fail(job, error)

    def _choose_steps(self, seconds, number) -> int:
        least, most = _STEPS
        steps = self._config.steps or min(most, max(least, int(_BLOCK_S / max(seconds, 1e-6))))
        # At least one interval between the ends of calls, of which each is a mean already.
        return max(-(-steps // number), 2) * number

    def _fail(self, job, error):
        words = str(error).strip()
        self._print_fn(
            f"{self._workload}: {job.setup.name} does not run: its last words are in bench.json"
        )
        job.kill()
        for other, series in self._series:
            if other is job:
                series.failure = words

    def _running(self):
        return [(job, series) for job, series in self._series if not series.failure]

    def _measure_once(self):
        """Draws batches alone; trains long blocks."""
        self._print_fn(f"{self._workload}: input alone, and long blocks")
        for job, series in self._running():
            ours = job.setup.kind in (setups.PLAIN, *setups.OURS)
            try:
                if ours and series.steps_per_execution == 1:
                    answers = job.train(steps=_INPUT_STEPS, input_only=True)
                    series.input_seconds = [
                        each for answer in answers for each in step_seconds(answer["ends"])
                    ]
                last = series.steps_per_execution == job.setup.steps_per_execution[-1]
                if self._workload == _TAIL_WORKLOAD and last and job.setup.kind != setups.DDP:
                    order = _order(_TAIL_STEPS, series.steps_per_execution)
                    by_hand = job.setup.kind in (setups.PLAIN, setups.ONE_REPLICA)
                    order |= {"autotune": True} if by_hand else {}
                    series.long_block = self._train(job, series, -1, order)
                    if not by_hand:
                        # The same steps as in a round; with several a call it has most of them.
                        series.blocks.append(series.long_block)
            except JobFailed as error:
                self._fail(job, error)

    def _go_round(self, deadline):
        longest = 0.0
        for number in range(self._config.rounds):
            began = time.perf_counter()
            if number and began + longest > deadline:
                self._print_fn(f"{self._workload}: time is over after {number} rounds")
                break
            self._print_fn(f"{self._workload}: round {number + 1} of {self._config.rounds}")
            # The long blocks were a round in the first order.
            forth = number % 2 == (self._workload == _TAIL_WORKLOAD)
            for job, series in self._running()[:: 1 if forth else -1]:
                if series.failure:
                    continue
                order = _order(self._steps[id(series)], series.steps_per_execution)
                try:
                    series.blocks.append(self._train(job, series, number, order))
                except JobFailed as error:
                    self._fail(job, error)
            longest = max(longest, time.perf_counter() - began)

    def _train(self, job, series, number, order) -> Block:
        began = time.perf_counter()
        answers = job.train(**order)
        wall = time.perf_counter() - began
        seconds = [
            each
            for answer in answers
            for each in step_seconds(answer["ends"], series.steps_per_execution)
        ]
        series.peak_bytes = [int(answer["peak_bytes"][0]) for answer in answers]
        return Block(
            number,
            order["steps"],
            seconds,
            wall,
            max(answer["ended"][0] - answer["ends"][-1] for answer in answers),
            sum(answer["idle_cpu_seconds"][0] for answer in answers),
        )


def _order(steps, steps_per_execution) -> dict:
    # The scripts of the peers support only steps.
    if steps_per_execution == 1:
        return {"steps": steps}
    return {"steps": steps, "steps_per_execution": steps_per_execution}
