"""Workers, replicas and the chief of a strategy.

Replicas have a job-wide number, which counts all replicas of worker 0 first, then those of
worker 1. A worker's own are also counted from 0: its *local* replicas. The replica batches of a
global batch are counted in another order, in which neighbours go to different workers, as in
TensorFlow's own distribution; Keras concatenates the rows of `predict` in that order.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.cluster.task import Cluster


def refuse_servers(strategy: tf.distribute.Strategy, technique: str, instead: str) -> None:
    """Raises ValueError for what cannot be used with parameter servers, instead of ignoring it.

    Args:
        strategy: The strategy.
        technique: The call or the argument, as the user wrote it.
        instead: What to do, in a sentence.
    """
    if keras_compat.has_servers(strategy):
        raise ValueError(
            f"`{technique.partition('=')[0]}` cannot be used with parameter servers, where each "
            "worker computes whole batches and the servers hold the weights and slots. Received: "
            f"{technique}, with {type(strategy).__name__}. {instead}"
        )


def cluster_of(strategy: tf.distribute.Strategy) -> Cluster | None:
    """Returns the cluster of a strategy, seen from this worker; None without one."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return None
    resolver = strategy.cluster_resolver
    spec = resolver.cluster_spec().as_dict()
    return Cluster(spec, resolver.task_type, resolver.task_id) if spec else None


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers of the job; 1 for a strategy without workers."""
    cluster = cluster_of(strategy)
    return 1 if cluster is None else cluster.num_workers


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of this worker, from 0."""
    cluster = cluster_of(strategy)
    return 0 if cluster is None else cluster.worker_index


def worker_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the names of all workers by their numbers, such as `worker 0`."""
    cluster = cluster_of(strategy)
    tasks = (("worker", 0),) if cluster is None else cluster.tasks
    return tuple(f"{kind} {index}" for kind, index in tasks)


def worker_name(strategy: tf.distribute.Strategy) -> str:
    """Returns the name of this worker."""
    return worker_names(strategy)[worker_index(strategy)]


def num_workers_on_this_host(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of workers whose addresses have the host of this worker's."""
    cluster = cluster_of(strategy)
    if cluster is None:
        return 1
    hosts = [cluster.spec[kind][index].rpartition(":")[0] for kind, index in cluster.tasks]
    return hosts.count(hosts[cluster.worker_index])


def is_chief(strategy: tf.distribute.Strategy) -> bool:
    """Whether this worker is the chief, which writes files."""
    return strategy.extended.should_checkpoint


def num_local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Returns the number of this worker's replicas."""
    return max(len(strategy.extended.worker_devices), 1)


def on_gpus(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas compute on GPUs, some of whose kernels add in another order each time."""
    return any("GPU" in device.upper() for device in strategy.extended.worker_devices)


def first_local_replica(strategy: tf.distribute.Strategy) -> int:
    """Returns the job-wide number of this worker's first replica."""
    return worker_index(strategy) * num_local_replicas(strategy)


def local_batch_indices(strategy: tf.distribute.Strategy) -> tuple[int, ...]:
    """Returns which replica batches of a global batch this worker's replicas take, in order."""
    step = num_workers(strategy)
    first = worker_index(strategy)
    return tuple(range(first, first + step * num_local_replicas(strategy), step))


def is_one_of_several_replicas() -> bool:
    """Whether the code that calls this runs, or is traced, in one of several replicas."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def local_replica_index(context: tf.distribute.ReplicaContext) -> tf.Tensor:
    """Returns the number of the current replica among those of this worker, an int32 scalar."""
    replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
    return replica % num_local_replicas(context.strategy)


def replica_batch_index(context: tf.distribute.ReplicaContext) -> tf.Tensor:
    """Returns which replica batch of a global batch this replica takes, an int32 scalar.

    The same as `local_batch_indices`, computed within a replica.
    """
    replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
    worker = replica // num_local_replicas(context.strategy)
    return worker + local_replica_index(context) * num_workers(context.strategy)


def is_first_local_replica() -> tf.Tensor | bool:
    """Whether the current replica is this worker's first one, a bool scalar."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return True
    return local_replica_index(context) == 0
