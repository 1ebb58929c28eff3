"""Finds the scheduler that has started this process, if there is no TF_CONFIG.

There is a module for each. The first one that has started this process is used, the innermost
first: `mpiexec` within a Slurm job, srun within a pod.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from absl import logging

from tfmulti.cluster import environment, kubernetes, mpi, roles, sagemaker, slurm
from tfmulti.cluster.errors import ClusterError, variable_error
from tfmulti.cluster.parsing import from_tf_config
from tfmulti.cluster.task import Cluster

# The number of this host among several; the first variable that is set counts.
HOST_INDEX_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_NODEID",
    kubernetes.INDEX,
)


def find_cluster(
    environ: Mapping[str, str], *, may_start_mpi: bool = False, num_ps: int | None = None
) -> Cluster | None:
    """Returns the cluster that a scheduler's variables describe, or None without any.

    In this order: MPI, Slurm, Kubernetes, SageMaker. `Cluster.source` names which. All tasks are
    workers, or the first one is the chief and the last ones are parameter servers: see `roles`.

    Args:
        environ: the environment.
        may_start_mpi: whether the processes of an MPI job may exchange addresses through MPI,
            which starts it; else such a job is ignored.
        num_ps: how many tasks are parameter servers; None reads TFMULTI_NUM_PS.

    Raises:
        ClusterError: if the variables describe no valid cluster.
        RuntimeError: if MPI cannot be started.

    Example:
        >>> find_cluster({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}).source
        'SageMaker'
        >>> find_cluster({}) is None
        True
    """
    servers = roles.read_num_ps(environ) if num_ps is None else num_ps
    if mpi.size_in_environment(environ):
        if not may_start_mpi:
            return None
        _refuse_servers_of_mpi(environ, servers)
        found = from_tf_config(mpi.tf_config(), source=mpi.SOURCE)
        return dataclasses.replace(found, source=mpi.SOURCE)
    # Slurm's tasks share the GPUs of a host, and servers get none.
    find_in_slurm = functools.partial(slurm.find_cluster, num_ps=servers)
    for find in (find_in_slurm, kubernetes.find_cluster, sagemaker.find_cluster):
        cluster = find(environ)
        if cluster is not None:
            return roles.assign_roles(cluster, servers)
    return None


def _refuse_servers_of_mpi(environ, servers):
    if servers:
        raise variable_error(
            environment.NUM_PS,
            "names servers among the tasks of Slurm, Kubernetes or SageMaker, not of MPI",
            received=f"{servers} servers, {mpi.size_in_environment(environ)} processes",
            source=mpi.SOURCE,
            advice="Use python -m tfmulti.launch --num_ps on one machine; on several give each"
            " task its TF_CONFIG.",
        )


def warn_of_others(environ: Mapping[str, str], strategy: str) -> None:
    """Warns if several processes were started together but each would train separately.

    Args:
        environ: the environment.
        strategy: what this process trains under.
    """
    count, source = mpi.size_in_environment(environ), mpi.SOURCE
    if not count:
        try:
            cluster = find_cluster(environ)
        except ClusterError:
            return
        count, source = (0, "") if cluster is None else (cluster.num_workers, cluster.source)
    if count > 1:
        logging.warning(
            "%s has started %d processes, and each trains a model of its own under %r. "
            "To train one model together choose 'multi_worker', or start one process.",
            source,
            count,
            strategy,
        )


def find_host_index(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns which of a job's hosts this is, as (variable, value), or None if unknown.

    Example:
        >>> find_host_index({"SLURM_NODEID": "1"})
        ('SLURM_NODEID', '1')
    """
    name = next((name for name in HOST_INDEX_VARIABLES if environ.get(name)), None)
    return None if name is None else (name, environ[name])
