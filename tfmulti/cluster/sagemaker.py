"""The cluster of a training job of Amazon SageMaker: one worker on each host.

https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tfmulti.cluster.errors import show, variable_error
from tfmulti.cluster.task import Cluster
from tfmulti.cluster.variables import read_first_port, single_worker

SOURCE = "SageMaker"
_PORT = 2222


def find_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster of a SageMaker training job, or None elsewhere.

    Args:
        environ: the environment: SM_HOSTS and SM_CURRENT_HOST, or SM_RESOURCE_CONFIG.

    Raises:
        ClusterError: where they cannot be read, or this host is not among all.

    Example:
        >>> find_cluster({"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2"}).address
        'algo-2:2222'
    """
    name = next((name for name in ("SM_HOSTS", "SM_RESOURCE_CONFIG") if environ.get(name)), None)
    if name is None:
        return None
    value = _read_json(environ[name])
    if name == "SM_HOSTS":
        hosts, here = value, environ.get("SM_CURRENT_HOST")
    else:
        fields = value if isinstance(value, dict) else {}
        hosts, here = fields.get("hosts"), fields.get("current_host")
    strings = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    if not strings or here not in hosts:
        raise variable_error(
            name,
            "must list all hosts as JSON, the current one among them",
            received=f"{name}={show(environ[name])}, current host {show(here)}",
            source=SOURCE,
            advice="SageMaker sets it so: leave it as it is, or unset all of SM_HOSTS,"
            " SM_CURRENT_HOST and SM_RESOURCE_CONFIG.",
        )
    if len(hosts) == 1:
        return single_worker(SOURCE)
    port = read_first_port(environ, _PORT, 1, SOURCE)
    workers = [f"{host}:{port}" for host in hosts]
    return Cluster({"worker": workers}, "worker", hosts.index(here), SOURCE, names_come_late=True)


def _read_json(text):
    try:
        return json.loads(text)
    except ValueError:
        return None
