"""The settings of a benchmark, its configurations, and how each is started."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tfmulti.choices import VERIFY
from tfmulti.settings import check_model, check_settings, setting

FOLDER = "{folder}"
"""In a command: the folder of the configuration."""

WEAK, STRONG = "weak", "strong"


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A kind of training; on a number of replicas it is a configuration.

    Attributes:
        name: Its name in tables and flags.
        meaning: What it is, in words.
        task: What its task has instead of the defaults of `create_setup`.
        replicas: On which numbers of replicas it runs: `"one"`, `"several"` or `"any"`.
        is_distributed: Whether each replica is a process.
        environments: Function of the number of replicas: for each process to start, the variables
            to set. None where one is started, or the launcher starts all.
        launched: Whether the launcher starts it, in the environment that it makes.
        launch_flags: More flags for the launcher.
        calls_of_several: Whether it is measured with several steps a call too, and its step is
            divided into parts.
        long_order: Extra arguments for the long measurement; None if it is not measured.
        baseline: Its speed-up is relative to this kind on one replica.
        not_on: Workloads on which it is not measured.
        is_peer: Whether it is another project's: it may not run, and takes only steps.
    """

    name: str
    meaning: str
    task: Mapping[str, Any]
    replicas: str = "several"
    is_distributed: bool = False
    environments: Callable[[int], Sequence[Mapping[str, str]]] | None = None
    launched: bool = True
    launch_flags: tuple[str, ...] = ()
    calls_of_several: bool = True
    long_order: Mapping[str, Any] | None = dataclasses.field(default_factory=dict)
    baseline: str = "one_worker"
    not_on: tuple[str, ...] = ()
    is_peer: bool = False

    def counts(self, numbers: Sequence[int]) -> list[int]:
        """Returns those of the numbers of replicas on which it runs."""
        return [n for n in numbers if self.replicas in ("any", "several" if n > 1 else "one")]

    def changed(self, **task) -> Kind:
        """Returns the same with something else in its task."""
        return dataclasses.replace(self, task={**self.task, **task})


def _workers(communication, **more):
    return {"strategy": {"name": "multi_worker", "communication": communication}, **more}


_ONE_DEVICE = {"strategy": {"name": "one_device", "devices": ["CPU:0"]}}
ONE_WORKER = Kind("one_worker", "one_device, distribute_train", _ONE_DEVICE, "one")
CONTROL = Kind(
    "control",
    "so many one_device processes at once, no communication",
    _ONE_DEVICE,
    is_distributed=True,
    environments=lambda count: [{}] * count,
)
MIRRORED = Kind("mirrored", "mirrored on logical CPUs", {"strategy": {"name": "mirrored"}})
RING = Kind("ring", "multi_worker, TensorFlow's ring", _workers("ring"), is_distributed=True)
MPI = Kind(
    "mpi", "multi_worker, MPI", _workers("mpi"), is_distributed=True, launch_flags=("--mpi",)
)
MPI_BFLOAT16 = dataclasses.replace(
    MPI,
    name="mpi_bfloat16",
    meaning="multi_worker, MPI, bfloat16 on the wire",
    task=_workers("mpi", compression="bfloat16"),
    # 0.1 MB of gradients: what travels decides nothing, and each configuration takes half a minute.
    not_on=("compute",),
)
KINDS = (ONE_WORKER, CONTROL, MIRRORED, RING, MPI, MPI_BFLOAT16)

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

    replicas: str = setting(
        "1,2", "Numbers of replicas or workers to measure; each needs at least one core."
    )
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
        "auto", "Like --verify of tfmulti.train; with always, the table includes its cost.", VERIFY
    )
    pin: bool = setting(True, "Pin each worker to separate cores, with one thread per core.")
    strong: bool = setting(False, "Also measure with the global batch size held (strong scaling).")
    rounds: int = setting(
        6, "Rounds over all configurations; --minutes can end them earlier.", at_least=1
    )
    steps: int | None = setting(None, "Steps per measured block; by default 6 to 30.", at_least=4)
    steps_per_execution: int = setting(
        10, "Also measure with this many steps per call.", at_least=2
    )
    minutes: float = setting(
        7.5,
        "Approximate total time in minutes; rounds that would exceed it are skipped.",
        at_least=0.1,
    )
    timeout: float = setting(
        240.0, "Time limit in seconds for starting a configuration, and for each block.", at_least=1
    )
    batch_size: int | None = setting(
        None, "Batch size per replica; by default each workload's own.", at_least=1
    )
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
        if self.model is not None:
            check_model(self.model)
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


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration: one way to train a workload.

    Attributes:
        kind: What it is.
        replicas: The number of replicas.
        batch_size: Examples per replica and step.
        command: The program and its arguments.
        environments: For each process to start, the variables to set.
        steps_per_execution: The numbers of steps of one call that are measured.
        scaling: `"weak"` or `"strong"`.
    """

    kind: Kind
    replicas: int
    batch_size: int
    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]
    steps_per_execution: tuple[int, ...] = (1,)
    scaling: str = WEAK

    @property
    def name(self) -> str:
        """Its name in tables: the kind, the replicas, and whether the scaling is strong."""
        strong = " strong" if self.scaling == STRONG else ""
        return f"{self.kind.name} x{self.replicas}{strong}"

    @property
    def processes(self) -> int:
        """How many processes take orders."""
        return self.replicas if self.kind.is_distributed else 1


def create_setups(workload: str, config: BenchConfig) -> list[Setup]:
    """Returns the configurations of a workload, in the order of the first round."""
    chosen = []
    for kind in (kind for kind in config.kinds if workload not in kind.not_on):
        for count in kind.counts(config.numbers):
            chosen.append(create_setup(kind, count, config, workload))
            if config.strong and count > 1 and kind.calls_of_several and kind != CONTROL:
                chosen.append(create_setup(kind, count, config, workload, STRONG))
    return chosen


def create_setup(
    kind: Kind, count: int, config: BenchConfig, workload: str = "compute", scaling: str = WEAK
) -> Setup:
    """Returns the configuration of a kind on `count` replicas.

    A task, which its processes take as JSON, has `"create"`, which creates what is measured: a
    function of orders, which may have `facts` for the driver; `"strategy"`, the arguments of
    `create_strategy`; `"compression"`, that of the optimizer; `"cores"` of a process, and whether
    to `"pin"` it to them; whether it needs `"tensorflow"`; and what the configuration and the
    bench have.
    """
    batch_size = config.batch_size_of(workload)
    if scaling == STRONG:
        batch_size = max(1, batch_size // count)
    cores = config.cores_each * (1 if kind.is_distributed else count)
    task = {
        **{name: getattr(config, name) for name in ("model", "dataset", "verify", "pin")},
        **{"workload": workload, "replicas": count, "batch_size": batch_size, "cores": cores},
        **{"create": "tfmulti.bench.training:Trained", "tensorflow": True},
        **{"strategy": {}, "compression": None, **kind.task},
    }
    command: tuple[str, ...] = (sys.executable, "-m", "tfmulti.bench.worker", json.dumps(task))
    if kind.launched:
        workers = count if kind.is_distributed and kind.environments is None else 1
        flags = [f"--num_workers={workers}", f"--threads={cores if config.pin else 0}"]
        # The many launchers of separate processes would write to the same folder.
        flags += [] if kind.environments else [f"--log_dir={FOLDER}"]
        launcher = (sys.executable, "-m", "tfmulti.launch", *flags, *kind.launch_flags, "--")
        command = (*launcher, *command)
    return Setup(
        kind,
        count,
        batch_size,
        command,
        tuple(kind.environments(count)) if kind.environments else ({},),
        (1, config.steps_per_execution) if kind.calls_of_several else (1,),
        scaling,
    )
