"""Which of a scheduler's tasks are the chief, workers and parameter servers.

A scheduler starts the same program many times, without roles. With TFMULTI_NUM_PS=N the first task
is the chief, the last N are servers, and those between are workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfmulti.cluster import environment
from tfmulti.cluster.errors import variable_error
from tfmulti.cluster.task import SERVER_TYPE, Cluster
from tfmulti.cluster.variables import read_number
from tfmulti.settings import check_whole_number

NO_GPUS = ""
"""What CUDA_VISIBLE_DEVICES must be for a task that computes no steps."""


def check_num_ps(num_ps: int | None, strategy: str) -> None:
    """Raises ValueError for an invalid `num_ps`, and with a strategy that has no servers.

    >>> check_num_ps(None, "mirrored"), check_num_ps(2, "parameter_server")
    (None, None)
    """
    check_whole_number("num_ps", num_ps, "Use for example num_ps=1.", optional=True)
    if num_ps is not None and strategy not in ("auto", "parameter_server"):
        raise ValueError(
            "`num_ps` can be used with parameter_server and auto only. Received: "
            f"num_ps={num_ps}, and {strategy!r}. Use 'parameter_server', or leave num_ps out."
        )


def read_num_ps(environ: Mapping[str, str]) -> int:
    """Returns how many tasks are parameter servers; 0 where TFMULTI_NUM_PS is not set.

    >>> read_num_ps({"TFMULTI_NUM_PS": "2"}), read_num_ps({})
    (2, 0)
    """
    name = environment.NUM_PS
    return read_number(environ, name, "the environment") if name in environ else 0


def is_worker(index: int, count: int, num_ps: int) -> bool:
    """Whether a task computes steps: without servers all do, else all but chief and servers.

    >>> [is_worker(index, 4, 1) for index in range(4)]
    [False, True, True, False]
    """
    return not num_ps or 0 < index < count - num_ps


def assign_roles(cluster: Cluster, num_ps: int) -> Cluster:
    """Makes a chief, workers and servers of a cluster of workers.

    Args:
        cluster: The cluster of a scheduler, whose tasks are all workers.
        num_ps: How many are parameter servers; 0 leaves the cluster as it is.

    Raises:
        ClusterError: Where no worker would be left.

    Example:
        >>> tasks = ["a:1", "a:2", "b:1", "b:2"]
        >>> cluster = assign_roles(Cluster({"worker": tasks}, "worker", 3), 1)
        >>> dict(cluster.spec)
        {'chief': ('a:1',), 'worker': ('a:2', 'b:1'), 'ps': ('b:2',)}
        >>> cluster.task_type, cluster.task_index
        ('ps', 0)
    """
    if not num_ps:
        return cluster
    tasks, index = cluster.spec["worker"], cluster.task_index
    servers = len(tasks) - num_ps
    if servers < 2:
        raise variable_error(
            environment.NUM_PS,
            "must leave a task for the chief and at least one for a worker",
            received=f"{num_ps} servers, and {len(tasks)} tasks in all",
            source=cluster.source,
            advice="Start more tasks, or use fewer servers.",
        )
    spec = {"chief": tasks[:1], "worker": tasks[1:servers], SERVER_TYPE: tasks[servers:]}
    kind, first = ("chief", 0) if index == 0 else ("worker", 1)
    if index >= servers:
        kind, first = SERVER_TYPE, servers
    return dataclasses.replace(cluster, spec=spec, task_type=kind, task_index=index - first)
