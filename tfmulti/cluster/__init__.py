"""The cluster, and this process's task in it, read and checked before TensorFlow starts.

TensorFlow responds to a wrong `TF_CONFIG` with a message about something else, with a hang, or by
silently training alone. Here each mistake is named in milliseconds. Nothing in this folder
imports TensorFlow.

`task` defines `Cluster`; `parsing` makes one from the text of a `TF_CONFIG`; `network` parses
`host:port`, and checks that this machine can reach the others and listen; `sources`
(`resolve_cluster`) finds the `TF_CONFIG`. Without one, `schedulers` tries MPI and the schedulers
that it lists, which share `scheduler_variables`; `gpus` divides a host's GPUs if the scheduler has
not. `peers` checks that a task answers, and names the task that has caused an error.

Example:
    >>> import json
    >>> text = json.dumps({
    ...     "cluster": {"worker": ["127.0.0.1:12345", "127.0.0.1:23456"]},
    ...     "task": {"type": "worker", "index": 1},
    ... })
    >>> cluster = resolve_cluster(environ={"TF_CONFIG": text}, check_network=False)
    >>> cluster.describe()
    'worker 1 of 2 (127.0.0.1:23456)'
    >>> resolve_cluster(environ={}) is None
    True
"""

from tfmulti.cluster.errors import ClusterError
from tfmulti.cluster.parsing import from_tf_config
from tfmulti.cluster.sources import resolve_cluster, tpu_in_environment
from tfmulti.cluster.task import Cluster

__all__ = ["Cluster", "ClusterError", "from_tf_config", "resolve_cluster", "tpu_in_environment"]
