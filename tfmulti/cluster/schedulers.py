"""Finds the scheduler that has started this process, if there is no TF_CONFIG.

The first one that has started this process is used, the innermost first: `mpiexec` within a Slurm
job, srun within a pod. `SCHEDULERS` lists them in this order, after MPI; to add one, add it there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from absl import logging

from tfmulti.cluster import environment, mpi, scheduler_variables, slurm
from tfmulti.cluster.errors import ClusterError, setting_error, show
from tfmulti.cluster.parsing import from_tf_config
from tfmulti.cluster.scheduler_variables import read_first_port, read_number, single_worker
from tfmulti.cluster.task import Cluster

KUBERNETES, SAGEMAKER = "Kubernetes", "SageMaker"
_INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222
# What SageMaker itself writes into every container of a training job.
_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


def find_in_kubernetes(environ: Mapping[str, str], num_ps: int = 0) -> Cluster | None:
    """Returns the cluster of this pod's Job, or None outside of an indexed Job.

    Kubernetes gives each pod JOB_COMPLETION_INDEX and the host name `<job>-<index>`, which a
    headless Service publishes as `<job>-<index>.<service>`. The manifest has the number of pods
    and the name of the Service. See
    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/ and
    https://jobset.sigs.k8s.io/docs/concepts/.

    Args:
        environ: the environment: JOB_COMPLETION_INDEX and HOSTNAME, which Kubernetes sets;
            TFMULTI_NUM_WORKERS (the Job's `completions`) and TFMULTI_SERVICE (its pods'
            `subdomain`; in a JobSet JOBSET_NAME serves as well), which the manifest sets.
        num_ps: how many pods will be parameter servers; it makes no difference here.

    Raises:
        ClusterError: where the manifest does not set them, or they contradict one another.

    Example:
        >>> find_in_kubernetes({
        ...     "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1",
        ...     "TFMULTI_NUM_WORKERS": "2", "TFMULTI_SERVICE": "workers",
        ... }).spec["worker"]
        ('train-0.workers:2222', 'train-1.workers:2222')
    """
    if _INDEX not in environ:
        return None
    index = read_number(environ, _INDEX, KUBERNETES)
    if environment.NUM_WORKERS not in environ:
        raise setting_error(
            environment.NUM_WORKERS,
            "must be set in the pods of an indexed Job, to the Job's `completions`",
            received=f"{_INDEX}={index}, and no {environment.NUM_WORKERS}",
            source=KUBERNETES,
            advice="Set it in the manifest's `env`; to 1 for pods that train each alone.",
        )
    count = read_number(environ, environment.NUM_WORKERS, KUBERNETES, at_least=1)
    if count == 1:
        return single_worker(KUBERNETES)
    if index >= count:
        raise setting_error(
            environment.NUM_WORKERS,
            "must be the Job's `completions`, one for each index",
            received=f"{environment.NUM_WORKERS}={count}, {_INDEX}={index}",
            source=KUBERNETES,
            advice="Write the same number in `completions`, `parallelism` and there.",
        )
    job = _find_job(environ, index)
    service = environ.get(environment.SERVICE) or environ.get("JOBSET_NAME")
    if not service:
        raise setting_error(
            environment.SERVICE,
            "must name the headless Service, the `subdomain` of the pods",
            received=f"no {environment.SERVICE} and no JOBSET_NAME",
            source=KUBERNETES,
            advice="Set it in the manifest's `env`: see experiments/kubernetes/indexed-job.yaml.",
        )
    port = read_first_port(environ, _PORT, 1, KUBERNETES)
    workers = [f"{job}-{each}.{service}:{port}" for each in range(count)]
    return Cluster({"worker": workers}, "worker", index, KUBERNETES, names_come_late=True)


def _find_job(environ, index) -> str:
    host = environ.get("HOSTNAME", "").split(".")[0]
    job, dash, number = host.rpartition("-")
    several = environ.get("JOBSET_NAME") and job.rpartition("-")[2] != "0"
    if not job or not dash or number != str(index) or several:
        raise setting_error(
            "HOSTNAME",
            "must be the pod's name as Kubernetes gives it, <job>-<index>, in the first Job",
            received=f"HOSTNAME={host}, {_INDEX}={index}",
            source=KUBERNETES,
            advice="Let the pod template name no `hostname`; in a JobSet make one Job of all"
            " workers (`replicas: 1`, `completions` for all).",
        )
    return job


def find_in_sagemaker(environ: Mapping[str, str], num_ps: int = 0) -> Cluster | None:
    """Returns the cluster of a SageMaker training job, or None elsewhere.

    It has one worker on each host. See
    https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md

    Args:
        environ: the environment: SM_HOSTS and SM_CURRENT_HOST, or SM_RESOURCE_CONFIG, which the
            training toolkit sets; without it TRAINING_JOB_NAME, which SageMaker sets, and its file.
        num_ps: how many hosts will be parameter servers; it makes no difference here.

    Raises:
        ClusterError: where they cannot be read, or this host is not among all.

    Example:
        >>> hosts = '["algo-1","algo-2"]'
        >>> find_in_sagemaker({"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-2"}).address
        'algo-2:2222'
    """
    name = next((name for name in ("SM_HOSTS", "SM_RESOURCE_CONFIG") if environ.get(name)), None)
    if name is not None:
        text = environ[name]
    elif environ.get("TRAINING_JOB_NAME") and _RESOURCES.is_file():
        name, text = str(_RESOURCES), _RESOURCES.read_text()
    else:
        return None
    value = None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
    if name == "SM_HOSTS":
        hosts, current = value, environ.get("SM_CURRENT_HOST")
    else:
        fields = value if isinstance(value, dict) else {}
        hosts, current = fields.get("hosts"), fields.get("current_host")
    strings = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    if not strings or current not in hosts:
        raise setting_error(
            name,
            "must list all hosts as JSON, the current one among them",
            received=f"{name}={show(text)}, current host {show(current)}",
            source=SAGEMAKER,
            advice="SageMaker sets it so: leave it as it is, or unset all of SM_HOSTS,"
            " SM_CURRENT_HOST, SM_RESOURCE_CONFIG and TRAINING_JOB_NAME.",
        )
    if len(hosts) == 1:
        return single_worker(SAGEMAKER)
    port = read_first_port(environ, _PORT, 1, SAGEMAKER)
    workers = [f"{host}:{port}" for host in hosts]
    return Cluster(
        {"worker": workers}, "worker", hosts.index(current), SAGEMAKER, names_come_late=True
    )


class Scheduler(NamedTuple):
    """A scheduler whose tasks all start alike, without a role such as worker or server.

    Attributes:
        name: Its name in messages, the `source` of its clusters.
        find: Returns the cluster, or None where another one has started this process. Its
            arguments are the environment, and how many tasks will be parameter servers.
        host_index: The variable with the index of this host among those of the job, if any.
    """

    name: str
    find: Callable[[Mapping[str, str], int], Cluster | None]
    host_index: str | None = None


SCHEDULERS = (
    Scheduler(slurm.SOURCE, slurm.find_in_slurm, "SLURM_NODEID"),
    Scheduler(KUBERNETES, find_in_kubernetes, _INDEX),
    Scheduler(SAGEMAKER, find_in_sagemaker),
)
NAMES = tuple(scheduler.name for scheduler in SCHEDULERS)
ANY_OF_THEM = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"
"""Their names in a sentence."""

# The index of this host among several; the first variable that is set counts.
HOST_INDEX_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    *(scheduler.host_index for scheduler in SCHEDULERS if scheduler.host_index),
)


def find_cluster(
    environ: Mapping[str, str], *, may_start_mpi: bool = False, num_ps: int | None = None
) -> Cluster | None:
    """Returns the cluster that a scheduler's variables describe, or None without any.

    MPI is asked first, then `SCHEDULERS`. `Cluster.source` names which. All tasks
    are workers, or the first one is the chief and the last ones are servers: see
    `scheduler_variables`.

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
    servers = scheduler_variables.read_num_ps(environ) if num_ps is None else num_ps
    if mpi.size_in_environment(environ):
        if not may_start_mpi:
            return None
        if servers:
            raise setting_error(
                environment.NUM_PS,
                f"names servers among the tasks of {ANY_OF_THEM}, not of MPI",
                received=f"{servers} servers, {mpi.size_in_environment(environ)} processes",
                source=mpi.SOURCE,
                advice="Use python -m tfmulti.launch --num_ps on one machine; on several give each"
                " task its TF_CONFIG.",
            )
        if mpi.size_in_environment(environ) == 1:
            # One process exchanges nothing: it needs no mpi4py.
            return scheduler_variables.single_worker(mpi.SOURCE)
        return mpi.find_in_mpi()
    for scheduler in SCHEDULERS:
        cluster = scheduler.find(environ, servers)
        if cluster is not None:
            return scheduler_variables.assign_roles(cluster, servers)
    return None


def warn_of_others(
    environ: Mapping[str, str], strategy: str, cluster: Cluster | None = None
) -> None:
    """Warns if several processes were started together but each would train separately.

    Args:
        environ: the environment.
        strategy: what this process trains under.
        cluster: the cluster of this process, if it is known; else the environment is read.
    """
    count, source = mpi.size_in_environment(environ), mpi.SOURCE
    # The strategy does not use it: mistakes in it do not matter.
    with contextlib.suppress(ClusterError):
        if cluster is None and "TF_CONFIG" in environ:
            cluster = from_tf_config(environ["TF_CONFIG"], servers=True)
        elif cluster is None and not count:
            cluster = find_cluster(environ)
    if cluster is not None and cluster.num_workers > 1:
        count, source = cluster.num_workers, cluster.source
    if count > 1:
        logging.warning(
            "According to %s this is one of %d processes, but under %r each of them trains a "
            "separate model. To train one model together, use 'multi_worker'; otherwise start only "
            "one process.",
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
