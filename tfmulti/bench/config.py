"""The settings of a benchmark, checked before anything starts."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

from tfmulti.bench.setups import KINDS, Kind
from tfmulti.choices import VERIFY
from tfmulti.settings import check_settings, setting

_BATCH_SIZES = {"compute": 100, "communication": 16, "own": 32}


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """One bench; every setting is a flag of `python -m tfmulti.bench`.

    Raises:
        ValueError: For a value that cannot be, or that does not go with another.

    Example:
    >>> BenchConfig(workloads="compute", replicas="1").workload_names
    ('compute',)
    """

    replicas: str = setting("1,2", "Numbers of replicas, or of workers, of one core or more each.")
    workloads: str | None = setting(
        None,
        f"Any of {', '.join(_BATCH_SIZES)}; by default own with --model, else the others.",
    )
    model: str | None = setting(None, "Of `own`: cnn, mlp, or package.module:function.")
    dataset: str = setting(
        "digits", "Of `own`: digits, a tensorflow-datasets name, or package.module:function."
    )
    setups: str | None = setting(
        None, f"Only these of {', '.join(kind.name for kind in KINDS)}; by default all."
    )
    allreduce: bool = setting(True, "Measure the all-reduce alone too.")
    verify: str = setting(
        "auto", "As --verify of tfmulti.train; with always, what it costs is in the table.", VERIFY
    )
    pin: bool = setting(True, "Pin each worker to separate cores, with one thread per core.")
    strong: bool = setting(False, "Also measure with the global batch size held (strong scaling).")
    rounds: int = setting(6, "Rounds over all configurations; --minutes ends them.", at_least=1)
    steps: int | None = setting(None, "Steps of a block; by default 6 to 30.", at_least=4)
    steps_per_execution: int = setting(10, "Steps of a call, beside one step a call.", at_least=2)
    minutes: float = setting(7.5, "Time for all, about; rounds beyond are left out.", at_least=0.1)
    timeout: float = setting(240.0, "Seconds to start a configuration, or for a block.", at_least=1)
    batch_size: int | None = setting(None, "Per replica; by default each workload's.", at_least=1)
    workdir: str = setting("runs/bench", "Folder for bench.json, bench.csv and BENCHMARKS.md.")
    write_markdown: str | None = setting(
        None, "File for the tables in Markdown; by default BENCHMARKS.md in --workdir."
    )

    KINDS: ClassVar[tuple[Kind, ...]] = KINDS
    """What can be measured."""
    ONLY_NAMED: ClassVar[tuple[Kind, ...]] = ()
    """What is measured only where it is named."""

    def __post_init__(self):
        check_settings(self)
        names = [kind.name for kind in self.KINDS]
        self._check_names("workloads", list(_BATCH_SIZES), "compute")
        self._check_names("setups", names, "one_worker,ring")
        if ("own" in self.workload_names) != (self.model is not None):
            raise ValueError(
                "`model` and the workload own go together. "
                f"Received: model={self.model!r}, workloads={self.workloads!r}. "
                "Use --model package.module:function --workloads own."
            )
        cores = count_cores()
        numbers = _split(self.replicas)
        if not all(part.isdecimal() and 1 <= int(part) <= cores for part in numbers):
            raise ValueError(
                f"`replicas` must be numbers from 1 to {cores}, this machine's cores, with commas "
                f"between. Received: replicas={self.replicas!r}. Use for example --replicas 1."
            )

    def _check_names(self, flag, known, example):
        given = getattr(self, flag)
        if given is not None and not set(_split(given)) <= set(known):
            raise ValueError(
                f"`{flag}` must be some of {', '.join(known)}, separated by commas. "
                f"Received: {flag}={given!r}. Use for example --{flag} {example}."
            )

    @property
    def workload_names(self) -> tuple[str, ...]:
        """The workloads, in the order given, each once."""
        default = "own" if self.model else "compute,communication"
        return _split(default if self.workloads is None else self.workloads)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of configurations to measure."""
        if self.setups is None:
            return tuple(kind for kind in self.KINDS if kind not in self.ONLY_NAMED)
        return tuple(kind for kind in self.KINDS if kind.name in _split(self.setups))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of replicas, smallest first; 1 is always among them."""
        return tuple(sorted({1, *map(int, _split(self.replicas))}))

    @property
    def cores_each(self) -> int:
        """Cores of each worker, the same however many there are."""
        return max(1, count_cores() // self.numbers[-1])

    def batch_size_of(self, workload: str) -> int:
        """Returns the examples per replica of a workload.

        >>> BenchConfig(replicas="1").batch_size_of("compute")
        100
        """
        return self.batch_size or _BATCH_SIZES[workload]


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
