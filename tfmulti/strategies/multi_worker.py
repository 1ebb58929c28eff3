"""The strategy of one worker of a cluster."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import tensorflow as tf

from tfmulti import cluster as cluster_lib
from tfmulti import keras_compat, meeting
from tfmulti.cluster import network
from tfmulti.strategies import ending
from tfmulti.strategies.repaired import MultiWorkerMirroredStrategy

_RPC_LAYER = "grpc"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How workers wait for one another.

    Attributes:
        start_timeout: Seconds at the start; None for the default.
        peer_timeout: Seconds of silence after which a worker counts as lost; None for
            TensorFlow's ten.
    """

    start_timeout: float | None = None
    peer_timeout: float | None = None


def create_multi_worker(
    cluster: cluster_lib.Cluster | None,
    communication: str = "auto",
    logical_cpus: int = 0,
    patience: Patience = Patience(),
    must_agree: Mapping[str, object] | None = None,
) -> MultiWorkerMirroredStrategy:
    """Creates the strategy of one worker of a cluster; all workers must do the same."""
    if cluster is None:
        raise RuntimeError(
            "`multi_worker` needs a cluster in TF_CONFIG. "
            "Received: no TF_CONFIG in the environment and no `tf_config`. "
            "Set TF_CONFIG for each worker, or name a file: see tf_config/README.md."
        )
    if cluster.num_workers > 1:
        _meet(cluster, patience.start_timeout, must_agree or {})
        ending.watch_uncaught(cluster)
    os.environ["TF_CONFIG"] = cluster.to_json()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({kind: list(tasks) for kind, tasks in cluster.spec.items()}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer=_RPC_LAYER,
        num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))},
    )
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation(communication.upper())
    )
    try:
        with keras_compat.heartbeats(patience.peer_timeout):
            strategy = MultiWorkerMirroredStrategy(resolver, options, logical_cpus or 1)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise _too_late_error(error) from error
    strategy.compares_acts = cluster.num_workers > 1
    return strategy


def _meet(cluster, start_timeout, must_agree):
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        # Refused once TensorFlow runs: nobody shall wait for the others in vain.
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError as error:
        raise _too_late_error(error) from error
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    network.warn_of_public_addresses(cluster)
    notes = {**keras_compat.installed_versions(), **must_agree}
    meeting.meet(cluster, notes, timeout_s=start_timeout)


def _too_late_error(error) -> RuntimeError:
    return RuntimeError(
        "`multi_worker` must be created before TensorFlow is used in this process. "
        f"Received: {error} "
        "Call create_strategy first, or restart the process (in a notebook: the kernel)."
    )
