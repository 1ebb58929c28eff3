"""A job that MPI has started: its size, its communicator, and its cluster.

`mpiexec -n 4 python train.py` gives each process its number; the processes exchange their addresses
through MPI itself. mpi4py is imported when it is needed, and then starts MPI.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import socket
from collections.abc import Mapping

from tfmulti.cluster.parsing import from_tf_config
from tfmulti.cluster.task import Cluster
from tfmulti.runtime import processes

SOURCE = "MPI"
# Intel MPI's: a process that waits lets others have its core. With more processes than cores each
# would wait, on its core, for one that has none.
_YIELD = ("I_MPI_THREAD_YIELD", "2")
# The number of processes: of MPICH, Intel MPI and this package's launcher; of Open MPI.
_PMI, _OPEN_MPI = "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"


def size_in_environment(environ: Mapping[str, str] | None = None) -> int:
    """Returns the number of processes that MPI has started together; 0 where it started none.

    `srun --mpi=pmi2`, the default at many sites, sets PMI_SIZE for every program, with MPI or
    without: such a size does not count.

    >>> size_in_environment({"PMI_SIZE": "4"}), size_in_environment({})
    (4, 0)
    >>> step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    >>> size_in_environment({"PMI_SIZE": "4", "PMI_RANK": "1", "PMI_JOBID": "7.0", **step})
    0
    """
    environ = os.environ if environ is None else environ
    names = [_OPEN_MPI] if _is_from_srun(environ) else [_PMI, _OPEN_MPI]
    sizes = [environ.get(name, "") for name in names]
    return next((int(size) for size in sizes if size.isdecimal()), 0)


def _is_from_srun(environ) -> bool:
    """Whether the variables of PMI are those of srun, for the very task that this process is.

    A program that `mpiexec` starts in a task inherits PMI_JOBID, but has its own rank and size.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    return (
        bool(job)
        # The number of the step; Cray's srun gives that of the job.
        and environ.get("PMI_JOBID") in (job, f"{job}.{step}")
        and environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
        and environ.get(_PMI) == tasks
    )


@functools.cache
def world():
    """Returns MPI's communicator of all processes; starts MPI when called first.

    Raises:
        RuntimeError: Without mpi4py, or without an MPI that it can load.
    """
    os.environ.setdefault(*_YIELD)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "`communication` 'mpi' needs mpi4py and an MPI library. "
            f"Received: {type(error).__name__}: {str(error).splitlines()[0]} "
            "Install both with: pip install 'tfmulti[mpi]', or use the MPI of the cluster "
            "with: pip install mpi4py."
        ) from error
    atexit.register(_end_mpi)
    return MPI.COMM_WORLD


def _end_mpi():
    """Ends MPI where Python's own shutdown, in which mpi4py would do so, does not come.

    `mpiexec` takes a process that ends without it for a failed one, and kills all others, which
    may still save.
    """
    from mpi4py import MPI

    if processes.is_done() and not MPI.Is_finalized():
        MPI.Finalize()


@functools.cache
def find_in_mpi() -> Cluster:
    """Returns the cluster of the job that MPI has started; all its processes must call it.

    Raises:
        RuntimeError: Where MPI cannot be started, or another one than mpi4py's has started the job.
    """
    comm = world()
    _check_size(comm, size_in_environment())
    with processes.hold_ports(1, address="") as [port]:
        address = (socket.gethostname(), port)
        # Held until all have theirs, so that no two processes of a host get the same.
        addresses = comm.allgather(address)
    one_host = len({host for host, _ in addresses}) == 1
    workers = [f"{'127.0.0.1' if one_host else host}:{port}" for host, port in addresses]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": comm.rank}}
    return dataclasses.replace(from_tf_config(config, source=SOURCE), source=SOURCE)


def communicator(num_workers: int, index: int):
    """Returns a communicator of all workers, in which this one has its index.

    Raises:
        RuntimeError: Where MPI was started with another number of processes.
    """
    comm = world()
    _check_size(comm, num_workers)
    return comm.Split(0, index)


def _check_size(comm, num_workers) -> None:
    """Refuses a job of another size, such as 1: that of a library that `mpiexec` is no part of."""
    if comm.size != num_workers:
        raise RuntimeError(
            "`communication` 'mpi' needs as many MPI processes as the cluster has workers. "
            f"Received: an MPI job of size {comm.size}, {num_workers} workers, {_library()}. "
            f"Start the job with that library's mpiexec -n {num_workers}; the MPI that "
            "python -m tfmulti.launch --mpi starts comes with pip install 'tfmulti[mpi]'."
        )


def _library() -> str:
    """Returns the name and the version of the MPI library."""
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip()


def on_one_host(communicator) -> bool:
    """Returns whether all its processes run on one host; all must call it."""
    return len(set(communicator.allgather(socket.gethostname()))) == 1


def have_spare_cores(communicator) -> bool:
    """Returns whether each host has two cores for each of its processes; all must call it."""
    found = communicator.allgather((socket.gethostname(), os.sched_getaffinity(0)))
    hosts: dict[str, list[set[int]]] = {}
    for host, cores in found:
        hosts.setdefault(host, []).append(cores)
    return all(len(set().union(*cores)) >= 2 * len(cores) for cores in hosts.values())
