"""The error of a rendezvous, and the names of workers in its text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from tfmulti.cluster import Cluster
from tfmulti.cluster.errors import show

GPUS = "UUIDs of GPUs"
"""The setting that must differ: the GPUs that a worker has for itself."""

_MAX_NAMED = 3


class RendezvousError(RuntimeError):
    """Workers are missing, or their settings differ; the message names them."""


class WorkersMissingError(RendezvousError):
    """Some workers did not connect in time. After a restart they may only be late."""


def name_worker(cluster: Cluster, index: int) -> str:
    """Returns the name and the address of the task at a position in `cluster.tasks`."""
    return cluster.name_of(*cluster.tasks[index])


def missing_error(
    cluster: Cluster, missing: Iterable[int], seconds: float, remarks: Iterable[str] = ()
) -> WorkersMissingError:
    """Returns the error for workers that did not connect.

    Args:
        cluster: The cluster.
        missing: Their positions in `cluster.tasks`.
        seconds: How long this worker has waited for them.
        remarks: Further observations, each a clause.
    """
    names = [name_worker(cluster, index) for index in sorted(missing)]
    seen = "".join(f"; {remark}" for remark in remarks)
    return WorkersMissingError(
        f"All {cluster.num_workers} workers must connect to the rendezvous within the start "
        f"timeout. Received: after {seconds:.1f} s, {len(names)} had not connected: "
        f"{', '.join(names)}{seen}. Start them, or read in their logs why they ended; check that "
        f"the addresses are the same in {where_configured(cluster)}, and that no firewall blocks "
        "the ports. To wait longer, raise start_timeout (seconds)."
    )


def twice_error(cluster: Cluster, index: int, hosts: Iterable[str]) -> RendezvousError:
    """Returns the error for two workers with the same task."""
    return RendezvousError(
        "Every worker must have a different task. "
        f"Received: two workers with the task of {name_worker(cluster, index)}, "
        f"from {' and '.join(hosts)}. "
        f"Give each a different index in {where_configured(cluster)}."
    )


def where_configured(cluster: Cluster) -> str:
    """Returns where a cluster's tasks and addresses are set, for the middle of a sentence.

    Example:
        >>> where_configured(Cluster({"worker": ["a:1"]}, "worker", 0, source="Slurm"))
        'the variables that Slurm sets for every worker'
    """
    if cluster.source == "TF_CONFIG":
        return "every worker's TF_CONFIG"
    if cluster.source == "MPI":
        return "the settings that MPI passes to every worker"
    return f"the variables that {cluster.source} sets for every worker"


def describe_fault(error: BaseException) -> str:
    """Returns what went wrong with a connection, for the middle of a sentence."""
    if isinstance(error, EOFError):
        return "the connection was closed"
    # The error number of a failed name lookup is of another kind, and negative.
    if getattr(error, "errno", None) and error.errno > 0:
        return os.strerror(error.errno).lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or "no answer in time"


def check_equal(cluster: Cluster, settings: Mapping[int, Mapping[str, object]]) -> None:
    """Checks that the settings of all workers agree.

    Args:
        cluster: The cluster.
        settings: For each worker's position in `cluster.tasks`, its settings: name -> value.

    Raises:
        RendezvousError: If a value differs; it names each difference with the values of all.
    """
    names = dict.fromkeys(name for index in sorted(settings) for name in settings[index])
    names.pop(GPUS, None)
    differences = []
    for name in names:
        said: dict[str, list[int]] = {}
        for index in sorted(settings):
            value = show(settings[index][name]) if name in settings[index] else "nothing"
            said.setdefault(value, []).append(index)
        if len(said) > 1:
            values = (f"{value} on {_few(cluster, who)}" for value, who in said.items())
            differences.append(f"{name} is {', but '.join(values)}")
    if differences:
        raise RendezvousError(
            "All workers must run the same program with the same settings and versions. "
            f"Received: {'; '.join(differences)}. "
            "Start every worker with the same command line, environment and cluster."
        )


def check_gpus(cluster: Cluster, settings: Mapping[int, Mapping[str, object]]) -> None:
    """Checks that no two workers use the same GPU.

    Args:
        cluster: The cluster.
        settings: For each worker's position in `cluster.tasks`, its settings: name -> value.

    Raises:
        RendezvousError: If two do; it names them and the GPU.
    """
    users: dict[str, list[int]] = {}
    for index in sorted(settings):
        for gpu in settings[index].get(GPUS, ()):
            users.setdefault(gpu, []).append(index)
    shared = {gpu: who for gpu, who in users.items() if len(who) > 1}
    if shared:
        gpu, who = next(iter(shared.items()))
        raise RendezvousError(
            "Every worker must have GPUs of its own: NCCL allows only one worker on a GPU. "
            f"Received: {gpu} is used by {_few(cluster, who)}. Give each its own "
            "CUDA_VISIBLE_DEVICES, as python -m tfmulti.launch does, or share the GPU with "
            'communication="ring".'
        )


def _few(cluster, indices) -> str:
    named = ", ".join("{} {}".format(*cluster.tasks[index]) for index in indices[:_MAX_NAMED])
    more = len(indices) - _MAX_NAMED
    return named if more <= 0 else f"{named} and {more} more"
