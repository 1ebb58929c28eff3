"""What the schedulers' variables have in common: numbers, lists of hosts, ports; and roles.

A scheduler starts the same program many times, without roles. With TFMULTI_NUM_PS=N the first task
is the chief, the last N are servers, and those between are workers.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tfmulti.cluster import environment
from tfmulti.cluster.errors import ClusterError, setting_error
from tfmulti.cluster.network import MAX_PORT
from tfmulti.cluster.task import SERVER_TYPE, Cluster
from tfmulti.runtime import processes
from tfmulti.settings import check_whole_number

_MAX_DIGITS = 10


def read_number(environ: Mapping[str, str], name: str, source: str, *, at_least: int = 0) -> int:
    """Returns the whole number in a variable.

    Raises:
        ClusterError: if it is missing, or not a number.

    Example:
        >>> read_number({"SLURM_PROCID": "3"}, "SLURM_PROCID", "Slurm")
        3
    """
    text = environ.get(name, "")
    if len(text) > _MAX_DIGITS or not re.fullmatch("[0-9]+", text) or int(text) < at_least:
        raise setting_error(
            name,
            f"must be an integer from {at_least} up",
            received=f"{name}={text}" if name in environ else f"no {name}",
            source=source,
            advice=f"It is set by {source}, or by the job's own script or manifest.",
        )
    return int(text)


def expand_hosts(text: str, source: str) -> list[str]:
    """Returns the hosts of a list such as `rack[1-2]n[1-2],login`, in its order.

    Raises:
        ClusterError: for a list with brackets that cannot be read, or without python-hostlist.

    Example:
        >>> expand_hosts("a,b", "Slurm")
        ['a', 'b']
    """
    if "[" not in text and "]" not in text:
        return [host for host in text.split(",") if host]
    try:
        import hostlist
    except ImportError as error:
        raise ClusterError(
            "A list of hosts with brackets needs the package python-hostlist. "
            f"Received: {text} (from {source}). Install it with: pip install 'tfmulti[slurm]'."
        ) from error
    try:
        return hostlist.expand_hostlist(text, allow_duplicates=True)
    except hostlist.BadHostlist as error:
        raise ClusterError(
            "A list of hosts must have brackets in pairs with numbers in them. "
            f"Received: {text} (from {source}): {error}. Write for example: node[1-3,7]."
        ) from error


def list_addresses(hosts: Sequence[str], tasks: Sequence[int], first_port: int) -> list[str]:
    """Returns the address of each task, host by host; a host's tasks have consecutive ports.

    On a single host all use the loopback address.

    Example:
        >>> list_addresses(["a", "b"], [2, 1], 5000)
        ['a:5000', 'a:5001', 'b:5000']
    """
    alone = len(set(hosts)) == 1
    so_far: Counter[str] = Counter()
    addresses = []
    for host, count in zip(hosts, tasks):
        for port in range(first_port + so_far[host], first_port + so_far[host] + count):
            addresses.append(f"{'127.0.0.1' if alone else host}:{port}")
        so_far[host] += count
    return addresses


def read_first_port(environ: Mapping[str, str], default: int, num_ports: int, source: str) -> int:
    """Returns the first port on each host: that of TFMULTI_BASE_PORT, else the default.

    Raises:
        ClusterError: if there are not enough ports above it.

    Example:
        >>> read_first_port({"TFMULTI_BASE_PORT": "4000"}, 2222, 4, "Slurm")
        4000
    """
    name = environment.BASE_PORT
    first = read_number(environ, name, source, at_least=1) if name in environ else default
    if first + num_ports - 1 > MAX_PORT:
        raise setting_error(
            name,
            f"must leave a port below {MAX_PORT} for each worker of a host",
            received=f"first port {first}, {num_ports} workers on a host",
            source=source,
            advice="Use for example 20000.",
        )
    return first


def single_worker(source: str) -> Cluster:
    """Returns a cluster of this process alone, with a port that is now free."""
    [port] = processes.free_ports(1)
    return Cluster({"worker": [f"127.0.0.1:{port}"]}, "worker", 0, source)


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
        raise setting_error(
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
