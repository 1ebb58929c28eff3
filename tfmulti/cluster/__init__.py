"""Who am I, and who are the others: the cluster, read and checked before TensorFlow starts.

TensorFlow answers a wrong `TF_CONFIG` with a message about something else, with a hang, or by
training alone in silence. Here each mistake is named in milliseconds. Nothing in this folder
imports TensorFlow.

The folder divides the work so: `task` holds the answer (`Cluster`), `parsing` turns the text of a
`TF_CONFIG` into one, `network` reads `host:port` and asks whether this machine can reach the others
and listen itself, and `sources` (`resolve_cluster`) knows where a `TF_CONFIG` may lie.
Without one `schedulers` asks `mpi`, `slurm`, `kubernetes` and `sagemaker`, which share `variables`;
`gpus` divides a host's GPUs where the scheduler has not, and `roles` makes parameter servers of
tasks. `presence` asks whether a task is there.

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
