"""The configurations in which a workload is measured, and how each is started."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import tfmulti
from tfmulti.bench.config import KINDS, SWITCHED, BenchConfig
from tfmulti.runtime import processes

INDEX = "TFMULTI_BENCH_INDEX"
"""Which process of its configuration a process is, where TF_CONFIG does not say it."""

FOLDER = "{folder}"
"""In a command: the folder of the configuration."""

(PLAIN, ONE_REPLICA, ONE_WORKER, CONTROL, MIRRORED, RING, MPI, MPI_BFLOAT16, *PEERS) = KINDS
DDP, STOCK_MIRRORED, STOCK_MULTI_WORKER = PEERS
MULTI_WORKER = (RING, MPI, MPI_BFLOAT16, *SWITCHED)
# The configuration whose environment is switched, its bench setting, and the launcher's flag.
_SWITCHES = {
    "mpi_unpinned": (MPI, {"pin": False}, "--threads=1"),
    "mpi_all_threads": (MPI, {"pin": False}, "--threads=0"),
    "mpi_allocator_default": (MPI, {}, "--allocator=default"),
    "ring_allocator_default": (RING, {}, "--allocator=default"),
}
OURS = (ONE_REPLICA, ONE_WORKER, CONTROL, MIRRORED, *MULTI_WORKER)
LAUNCHED = (ONE_WORKER, CONTROL, MIRRORED, *MULTI_WORKER)
WEAK, STRONG = "weak", "strong"
MEANINGS = {
    PLAIN: "plain Keras, no tfmulti, a tf.data pipeline by hand",
    ONE_REPLICA: "mirrored on one device, DistributedOptimizer, the same pipeline by hand",
    ONE_WORKER: "one_device, distribute_train",
    CONTROL: "so many one_device processes at once, no communication",
    MIRRORED: "mirrored on logical CPUs",
    RING: "multi_worker, TensorFlow's ring",
    MPI: "multi_worker, MPI",
    MPI_BFLOAT16: "multi_worker, MPI, bfloat16 on the wire",
    DDP: "PyTorch DistributedDataParallel, gloo",
    STOCK_MIRRORED: "stock MirroredStrategy on logical CPUs",
    STOCK_MULTI_WORKER: "stock MultiWorkerMirroredStrategy",
    "mpi_unpinned": "mpi, a thread each, not pinned",
    "mpi_all_threads": "mpi, a thread for each core of the machine, not pinned",
    "mpi_allocator_default": "mpi, with the C library's own way of keeping memory",
    "ring_allocator_default": "ring, with the C library's own way of keeping memory",
}
_SCRIPTS = {
    DDP: "pytorch_ddp.py",
    STOCK_MIRRORED: "stock_mirrored.py",
    STOCK_MULTI_WORKER: "stock_multi_worker.py",
}
# 0.1 MB of gradients: what travels decides nothing, and each configuration takes half a minute.
NOT_MEASURED = {"compute": (MPI_BFLOAT16,)}
# What the peers' scripts have.
PEERS_WORKLOADS = ("compute", "communication")
PEERS_FOLDER = Path(tfmulti.__file__).resolve().parent.parent / "experiments" / "scaling"


@dataclasses.dataclass(frozen=True)
class Setup:
    """One way to train a workload.

    Attributes:
        kind: What it is; see `MEANINGS`.
        replicas: The number of replicas.
        batch_size: Examples per replica and step.
        command: The program and its arguments.
        environments: For each process to start, the variables to set.
        processes: How many processes connect to the driver.
        steps_per_execution: The numbers of steps of one call that are measured.
        scaling: `"weak"` or `"strong"`.
    """

    kind: str
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
        return f"{self.kind} x{self.replicas}" + (" strong" if self.scaling == STRONG else "")


def check_peers(config: BenchConfig) -> None:
    """Raises ValueError if peers are requested and their scripts are missing."""
    if config.peers and not PEERS_FOLDER.is_dir():
        raise ValueError(
            "`peers` needs the scripts of a clone: they are no part of the installed package. "
            f"Received: --peers, and no folder {PEERS_FOLDER}. "
            "Start the bench in a clone of tfmulti, or leave --peers out."
        )


def create_setups(workload: str, config: BenchConfig) -> list[Setup]:
    """Returns the configurations of a workload, in the order of the first round."""
    several = [count for count in config.numbers if count > 1]
    chosen = [_ours(kind, 1, workload, config) for kind in (PLAIN, ONE_REPLICA, ONE_WORKER)]
    for count in several:
        kinds = (CONTROL, MIRRORED, *MULTI_WORKER)
        chosen += [_ours(kind, count, workload, config) for kind in kinds]
        if config.strong:
            kinds = (MIRRORED, *MULTI_WORKER)
            chosen += [_ours(kind, count, workload, config, STRONG) for kind in kinds]
    if config.peers and workload in PEERS_WORKLOADS:
        chosen += [_peer(DDP, count, workload, config) for count in config.numbers]
        for kind in (STOCK_MIRRORED, STOCK_MULTI_WORKER):
            chosen += [_peer(kind, count, workload, config) for count in several]
    without = NOT_MEASURED.get(workload, ())
    return [each for each in chosen if each.kind in config.kinds and each.kind not in without]


def _ours(kind, count, workload, config, scaling=WEAK) -> Setup:
    batch_size = config.resolve_batch_size(workload)
    if scaling == STRONG:
        batch_size = max(1, batch_size // count)
    base, changed, *_ = _SWITCHES.get(kind, (kind, {}))
    task = {
        "kind": base,
        "workload": workload,
        "replicas": count,
        "batch_size": batch_size,
        "config": dataclasses.asdict(config) | changed,
    }
    command = (sys.executable, "-m", "tfmulti.bench.worker", json.dumps(task))
    environments: tuple[Mapping[str, str], ...] = ({},)
    if kind == CONTROL:
        environments = tuple({INDEX: str(index)} for index in range(count))
    if kind in LAUNCHED:
        # One worker too, so that all have the environment that the launcher makes.
        workers = count if kind in MULTI_WORKER else 1
        command = (*launcher(workers, kind, config, count), *command)
    return Setup(
        kind,
        count,
        batch_size,
        command,
        environments,
        processes=count if kind in (CONTROL, *MULTI_WORKER) else 1,
        # Compared with one another alone, step by step; the time goes to further rounds.
        steps_per_execution=(
            (1,) if kind in (PLAIN, ONE_REPLICA) else (1, config.steps_per_execution)
        ),
        scaling=scaling,
    )


def launcher(count: int, kind: str, config: BenchConfig, replicas: int) -> tuple[str, ...]:
    """Returns the command that starts workers, up to the workers' own.

    Args:
        count: The number of workers.
        kind: The kind of the configuration.
        config: The bench.
        replicas: Replicas of the configuration, for which a worker of `mirrored` has the cores.
    """
    threads = config.cores_each * (replicas if kind == MIRRORED else 1)
    flags = (f"--num_workers={count}", f"--threads={threads if config.pin else 0}")
    base, _, *switched = _SWITCHES.get(kind, (kind, {}))
    flags += ("--mpi", *switched) if base in (MPI, MPI_BFLOAT16) else tuple(switched)
    # The many launchers of the control would write to the same folder.
    flags += () if kind == CONTROL else (f"--log_dir={FOLDER}",)
    return (sys.executable, "-m", "tfmulti.launch", *flags, "--")


def _peer(kind, count, workload, config) -> Setup:
    command = (
        sys.executable,
        str(PEERS_FOLDER / _SCRIPTS[kind]),
        f"--workload={workload}",
        f"--batch_size={config.resolve_batch_size(workload)}",
        f"--cores={config.cores_each}",
        *(() if config.pin else ("--nopin",)),
    )
    if kind == STOCK_MIRRORED:
        environments: tuple = ({},)
        command = (*command, f"--replicas={count}")
    elif kind == DDP:
        environments = torch_environments(count)
    else:
        environments = tuple({"TF_CONFIG": text} for text in processes.tf_configs(count))
    batch_size = config.resolve_batch_size(workload)
    return Setup(kind, count, batch_size, command, environments, len(environments))


def torch_environments(count: int) -> tuple[dict[str, str], ...]:
    """Returns the variables that `torchrun` sets, for each process of this machine."""
    [port] = processes.free_ports(1)
    return tuple(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(count),
        }
        for index in range(count)
    )
