"""The configurations in which a workload is measured, and how each is started."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
        long_order: More words of the order of a long block; None where there is none.
        baseline: The kind whose one replica is that against which its speed-up is.
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


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration: one way to train a workload.

    Attributes:
        kind: What it is.
        replicas: The number of replicas.
        batch_size: Examples per replica and step.
        command: The program and its arguments.
        environments: For each process to start, the variables to set.
        processes: How many processes take orders.
        steps_per_execution: The numbers of steps of one call that are measured.
        scaling: `"weak"` or `"strong"`.
    """

    kind: Kind
    replicas: int
    batch_size: int
    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]
    processes: int
    steps_per_execution: tuple[int, ...] = (1,)
    scaling: str = WEAK

    @property
    def name(self) -> str:
        """Its name in tables: the kind, the replicas, and whether the scaling is strong."""
        strong = " strong" if self.scaling == STRONG else ""
        return f"{self.kind.name} x{self.replicas}{strong}"


def create_setups(workload: str, config) -> list[Setup]:
    """Returns the configurations of a workload, in the order of the first round."""
    chosen = []
    for kind in (each for each in config.kinds if workload not in each.not_on):
        for count in kind.counts(config.numbers):
            chosen.append(create_setup(kind, count, config, workload))
            if config.strong and count > 1 and kind.calls_of_several and kind != CONTROL:
                chosen.append(create_setup(kind, count, config, workload, STRONG))
    return chosen


def create_setup(kind, count: int, config, workload: str = "compute", scaling: str = WEAK) -> Setup:
    """Returns the configuration of a `Kind` on `count` replicas, by a `BenchConfig`.

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
        count if kind.is_distributed else 1,
        (1, config.steps_per_execution) if kind.calls_of_several else (1,),
        scaling,
    )
