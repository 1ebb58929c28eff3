"""The settings of a benchmark, checked before anything starts."""

from __future__ import annotations

import dataclasses
import os

from tfmulti.choices import VERIFY
from tfmulti.settings import check_settings, setting

WORKLOADS = ("compute", "communication", "resnet50", "transformer", "own")
KINDS = (
    "plain",
    "one_replica",
    "one_worker",
    "control",
    "mirrored",
    "ring",
    "mpi",
    "mpi_bfloat16",
    "ddp",
    "stock_mirrored",
    "stock_multi_worker",
)
# What a launcher's switches do; measured where they are named.
SWITCHED = ("mpi_unpinned", "mpi_all_threads", "mpi_allocator_default", "ring_allocator_default")
_BATCH_SIZES = {"compute": 100, "communication": 16, "resnet50": 8, "transformer": 16, "own": 32}


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
        f"Any of {', '.join(WORKLOADS)}; by default compute,communication, and own with --model.",
    )
    model: str | None = setting(
        None, "The model of the workload `own`: cnn, mlp, or package.module:function."
    )
    dataset: str = setting(
        "digits",
        "The data of `own`: digits, a tensorflow-datasets name, or package.module:function.",
    )
    peers: bool = setting(
        False, "Also measure PyTorch DDP and stock Keras, by the scripts of experiments/scaling."
    )
    setups: str | None = setting(
        None,
        f"Only these of {', '.join((*KINDS, *SWITCHED))}; by default all but the last four, "
        "and the three before them with --peers.",
    )
    allreduce: bool = setting(True, "Measure the all-reduce alone too.")
    monitors: bool = setting(
        False, "Measure what the monitors cost on the first workload, and nothing else."
    )
    verify: str = setting(
        "auto", "As --verify of tfmulti.train; with always, what it costs is in the table.", VERIFY
    )
    pin: bool = setting(True, "Pin each worker to separate cores, with one thread per core.")
    strong: bool = setting(False, "Also measure with the global batch size held (strong scaling).")
    project: int | None = setting(
        None, "Project the step to 2, 4, ... up to this number of workers.", at_least=2
    )
    rounds: int = setting(
        6, "Rounds over all configurations at most; --minutes ends them.", at_least=1
    )
    steps: int | None = setting(
        None, "Steps of a block; by default 10 to 30, about two seconds.", at_least=4
    )
    steps_per_execution: int = setting(
        10, "Steps of one call, beside 1 step of one call.", at_least=2
    )
    minutes: float = setting(
        7.5, "Time for the whole run, about; further rounds are left out.", at_least=0.1
    )
    timeout: float = setting(
        240.0, "Seconds for a configuration to start, or for a block.", at_least=1.0
    )
    batch_size: int | None = setting(
        None, "Examples per replica; by default each workload's own.", at_least=1
    )
    image_size: int = setting(96, "Height and width of the images of resnet50.", at_least=32)
    layers: int = setting(2, "Blocks of transformer.", at_least=1)
    width: int = setting(128, "Width of transformer.", at_least=8)
    heads: int = setting(4, "Attention heads of transformer.", at_least=1)
    length: int = setting(64, "Tokens of a sequence of transformer.", at_least=1)
    vocabulary: int = setting(8000, "Different tokens of transformer.", at_least=2)
    workdir: str = setting("runs/bench", "Folder for bench.json, .csv, .png and BENCHMARKS.md.")
    write_markdown: str | None = setting(
        None, "File for the tables in Markdown; by default BENCHMARKS.md in --workdir."
    )

    def __post_init__(self):
        check_settings(self)
        if not self.workload_names or set(self.workload_names) - set(WORKLOADS):
            raise ValueError(
                f"`workloads` must be of {', '.join(WORKLOADS)}, with commas between. "
                f"Received: workloads={self.workloads!r}. Use for example --workloads compute."
            )
        if ("own" in self.workload_names) != (self.model is not None):
            raise ValueError(
                "`model` and the workload own go together. "
                f"Received: model={self.model!r}, workloads={self.workloads!r}. "
                "Use --model package.module:function --workloads own."
            )
        if set(self.kinds) - {*KINDS, *SWITCHED}:
            raise ValueError(
                f"`setups` must be of {', '.join((*KINDS, *SWITCHED))}, with commas between. "
                f"Received: setups={self.setups!r}. Use for example --setups one_worker,ring."
            )
        numbers = [part.strip() for part in self.replicas.split(",")]
        cores = count_cores()
        if not all(part.isdecimal() and 1 <= int(part) <= cores for part in numbers):
            raise ValueError(
                f"`replicas` must be numbers from 1 to {cores}, this machine's cores, with commas "
                f"between. Received: replicas={self.replicas!r}. Use for example --replicas 1."
            )

    @property
    def workload_names(self) -> tuple[str, ...]:
        """The workloads, in the order given, each once."""
        text = self.workloads
        if text is None:
            text = "own" if self.model else "compute,communication"
        return tuple(dict.fromkeys(part.strip() for part in text.split(",")))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of configurations that may be measured."""
        text = ",".join(KINDS) if self.setups is None else self.setups
        return tuple(part.strip() for part in text.split(","))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of replicas, smallest first; 1 is always among them."""
        return tuple(sorted({1, *(int(part) for part in self.replicas.split(","))}))

    @property
    def cores_each(self) -> int:
        """Cores of each worker, the same however many there are."""
        return max(1, count_cores() // self.numbers[-1])

    def resolve_batch_size(self, workload: str) -> int:
        """Returns the examples per replica of a workload.

        >>> BenchConfig(replicas="1").resolve_batch_size("compute")
        100
        """
        return self.batch_size or _BATCH_SIZES[workload]


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
