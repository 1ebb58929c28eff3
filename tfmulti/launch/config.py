"""The settings of a job, checked before anything starts."""

from __future__ import annotations

import dataclasses

from tfmulti.settings import check_settings, setting

ALLOCATORS = ("keep", "default")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """One job; every setting is a flag of `python -m tfmulti.launch`.

    Raises:
        ValueError: For a value that is invalid or incompatible with another.

    Example:
    >>> LaunchConfig(num_workers=2).max_restarts
    0
    """

    num_workers: int | None = setting(None, "Workers to start on this machine.", at_least=1)
    num_ps: int = setting(
        0,
        "Parameter servers to start beside the workers, and a chief: for --strategy "
        "parameter_server.",
        at_least=0,
    )
    max_restarts: int = setting(
        0, "Maximum number of restarts after a failure; preemptions do not count.", at_least=0
    )
    start_timeout: float | None = setting(
        None, "Seconds that workers wait for one another; by default their own 60.", at_least=0.001
    )
    grace: float = setting(
        30.0,
        "Seconds from SIGTERM or Ctrl-C to the end of workers that still run; at most 5 once a "
        "worker has failed.",
        at_least=0.0,
    )
    log_dir: str | None = setting(
        None, "Folder for worker_0.log and so on; by default a temporary one."
    )
    all_output: bool = setting(False, "Show the output of all workers, not the chief's only.")
    hosts: str | None = setting(
        None, "File with one `host[:port] [slots=N]` per line, the same for every host's launcher."
    )
    host_index: int | None = setting(
        None,
        "Which line of --hosts this is, from 0; by default from Slurm, MPI or Kubernetes.",
        at_least=0,
    )
    base_port: int = setting(2222, "First port of a host in --hosts that names none.", at_least=1)

    mpi: bool = setting(False, "Make the workers one MPI job, as mpiexec does.")
    pin: bool = setting(False, "Pin each worker to its part of this machine's cores.")
    threads: int | None = setting(
        None,
        "Threads of an operation in each worker; by default its part of the cores.",
        at_least=0,
    )
    allocator: str = setting(
        "keep", "Whether workers keep memory that they have freed, for the next step.", ALLOCATORS
    )

    def __post_init__(self):
        check_settings(self)
        if (self.num_workers is None) == (self.hosts is None):
            raise ValueError(
                "Either `num_workers` (on this machine) or `hosts` (on several) must be given. "
                f"Received: num_workers={self.num_workers}, hosts={self.hosts}. "
                "Use for example --num_workers 2."
            )
        if self.mpi and self.hosts is not None:
            raise ValueError(
                "`mpi` needs num_workers, on this machine. "
                f"Received: mpi={self.mpi}, hosts={self.hosts}. "
                "Start a job on several hosts with mpiexec, without this launcher."
            )
        if self.num_ps and (self.hosts is not None or self.mpi):
            raise ValueError(
                "`num_ps` needs num_workers, on this machine, without MPI. "
                f"Received: num_ps={self.num_ps}, hosts={self.hosts}, mpi={self.mpi}. "
                "On several hosts start each task with its own TF_CONFIG."
            )
        if self.host_index is not None and self.hosts is None:
            raise ValueError(
                "`host_index` can be used with hosts only. "
                f"Received: host_index={self.host_index}, hosts=None. Leave --host_index out."
            )
