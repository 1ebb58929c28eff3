"""The cluster of the pods of an indexed Job, alone or in a JobSet.

Kubernetes gives each pod JOB_COMPLETION_INDEX and the host name `<job>-<index>`, which a headless
Service publishes as `<job>-<index>.<service>`. The manifest has the number of pods and the name of
the Service. See
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/ and
https://jobset.sigs.k8s.io/docs/concepts/.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfmulti.cluster import environment
from tfmulti.cluster.errors import variable_error
from tfmulti.cluster.task import Cluster
from tfmulti.cluster.variables import read_first_port, read_number, single_worker

SOURCE = "Kubernetes"
INDEX = "JOB_COMPLETION_INDEX"
_PORT = 2222


def find_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster of this pod's Job, or None outside of an indexed Job.

    Args:
        environ: the environment: JOB_COMPLETION_INDEX and HOSTNAME, which Kubernetes sets;
            TFMULTI_NUM_WORKERS (the Job's `completions`) and TFMULTI_SERVICE (its pods'
            `subdomain`; in a JobSet JOBSET_NAME serves as well), which the manifest sets.

    Raises:
        ClusterError: where the manifest does not set them, or they contradict one another.

    Example:
        >>> find_cluster({
        ...     "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1",
        ...     "TFMULTI_NUM_WORKERS": "2", "TFMULTI_SERVICE": "workers",
        ... }).spec["worker"]
        ('train-0.workers:2222', 'train-1.workers:2222')
    """
    if INDEX not in environ:
        return None
    index = read_number(environ, INDEX, SOURCE)
    if environment.NUM_WORKERS not in environ:
        raise variable_error(
            environment.NUM_WORKERS,
            "must be set in the pods of an indexed Job, to the Job's `completions`",
            received=f"{INDEX}={index}, and no {environment.NUM_WORKERS}",
            source=SOURCE,
            advice="Set it in the manifest's `env`; to 1 for pods that train each alone.",
        )
    count = read_number(environ, environment.NUM_WORKERS, SOURCE, at_least=1)
    if count == 1:
        return single_worker(SOURCE)
    if index >= count:
        raise variable_error(
            environment.NUM_WORKERS,
            "must be the Job's `completions`, one for each index",
            received=f"{environment.NUM_WORKERS}={count}, {INDEX}={index}",
            source=SOURCE,
            advice="Write the same number in `completions`, `parallelism` and there.",
        )
    job, service = _find_job(environ, index), _find_service(environ)
    port = read_first_port(environ, _PORT, 1, SOURCE)
    workers = [f"{job}-{each}.{service}:{port}" for each in range(count)]
    return Cluster({"worker": workers}, "worker", index, SOURCE, names_come_late=True)


def _find_job(environ, index) -> str:
    host = environ.get("HOSTNAME", "").split(".")[0]
    job, dash, number = host.rpartition("-")
    several = environ.get("JOBSET_NAME") and job.rpartition("-")[2] != "0"
    if not job or not dash or number != str(index) or several:
        raise variable_error(
            "HOSTNAME",
            "must be the pod's name as Kubernetes gives it, <job>-<index>, in the first Job",
            received=f"HOSTNAME={host}, {INDEX}={index}",
            source=SOURCE,
            advice="Let the pod template name no `hostname`; in a JobSet make one Job of all"
            " workers (`replicas: 1`, `completions` for all).",
        )
    return job


def _find_service(environ) -> str:
    service = environ.get(environment.SERVICE) or environ.get("JOBSET_NAME")
    if not service:
        raise variable_error(
            environment.SERVICE,
            "must name the headless Service, the `subdomain` of the pods",
            received=f"no {environment.SERVICE} and no JOBSET_NAME",
            source=SOURCE,
            advice="Set it in the manifest's `env`: see experiments/kubernetes/indexed-job.yaml.",
        )
    return service
