"""The strategy of one worker of a cluster, which reports its errors to the others."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import tensorflow as tf

from tfmulti import devices, hardware, keras_compat, rendezvous, topology
from tfmulti.cluster import environment, mpi, network, peers, schedulers
from tfmulti.cluster.task import Cluster
from tfmulti.mpi import order
from tfmulti.mpi.all_reduce import CACHED_PIECE_BYTES, MPI_CALLS, MpiAllReduce
from tfmulti.runtime import command_line, errors, processes
from tfmulti.strategies import coordination, ring
from tfmulti.strategies.base import MultiWorkerMirroredStrategy

_RPC_LAYER = "grpc"
_SIGTERM_S = 4.0
# TensorFlow copies each bucket several times; without buckets, all gradients together.
RING_BUCKET_BYTES = 16 * 2**20


def create_multi_worker(
    cluster: Cluster | None,
    *,
    communication: str,
    bucket_bytes: int | None,
    logical_cpus: int,
    start_timeout: float | None,
    heartbeat_timeout: float,
    must_agree: Mapping[str, object],
) -> MultiWorkerMirroredStrategy:
    """Creates the strategy of one worker of a cluster; all workers must do the same.

    See `create_strategy` for the arguments.
    """
    if cluster is None:
        raise RuntimeError(
            "`multi_worker` needs a cluster in TF_CONFIG. "
            "Received: no TF_CONFIG in the environment, no `tf_config`, and a process that was "
            f"not started by MPI, {schedulers.ANY_OF_THEM}. "
            "Set TF_CONFIG for each worker, or name a file: see tf_config/README.md."
        )
    communication, reason = choose_communication(communication, cluster.num_workers, logical_cpus)
    if cluster.num_workers > 1:
        replicas = max(devices.count_gpus(), logical_cpus, 1)
        agreed = {**must_agree, "communication": communication, "replicas of a worker": replicas}
        agreed["bucket_bytes"] = bucket_bytes
        _join_rendezvous(cluster, start_timeout, agreed)
        watch_uncaught(cluster)
    communicator = None
    if communication == "mpi":
        # After the rendezvous, which has a timeout; MPI has none.
        communicator = mpi.communicator(cluster.num_workers, cluster.worker_index)
    os.environ["TF_CONFIG"] = cluster.to_json()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({kind: list(tasks) for kind, tasks in cluster.spec.items()}),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer=_RPC_LAYER,
        num_accelerators={"GPU": devices.count_gpus()},
    )
    try:
        with keras_compat.heartbeats(heartbeat_timeout):
            strategy = MultiWorkerMirroredStrategy(
                resolver,
                _collective_options(communication, bucket_bytes),
                logical_cpus or 1,
                over_mpi=communicator is not None,
            )
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise _too_late_error(error) from error
    _end_after_sigterm()
    strategy.checks_call_order = cluster.num_workers > 1
    strategy.communication = f"{communication} ({reason})"
    if communicator is not None:
        _use_mpi(strategy, communicator, cluster, bucket_bytes)
    _use_ring(strategy)
    return strategy


def _collective_options(communication, bucket_bytes):
    if bucket_bytes is None:
        bucket_bytes = RING_BUCKET_BYTES if communication == "ring" else 0
    engine = "RING" if communication == "mpi" else communication.upper()
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=bucket_bytes,
        implementation=tf.distribute.experimental.CommunicationImplementation(engine),
    )


def _use_mpi(strategy, communicator, cluster, bucket_bytes) -> None:
    all_reduce = _create_mpi_all_reduce(communicator, cluster, bucket_bytes)
    for name in MPI_CALLS:
        setattr(strategy.extended, name, getattr(all_reduce, name))
    strategy.extended.gathers_ahead = mpi.have_spare_cores(communicator)
    _report_end(cluster)


def _use_ring(strategy) -> None:
    is_alone = topology.num_workers(strategy) == 1
    if is_alone or not strategy.communication.startswith("ring") or devices.count_gpus():
        return
    # Sums for owners need workers with one replica each.
    if topology.num_local_replicas(strategy) == 1:
        calls = ring.RingCalls(strategy)
        strategy.extended.receive = calls.receive
        strategy.extended.reduce_to_owners = calls.reduce_to_owners
        strategy.extended.adds_together = True


def _create_mpi_all_reduce(communicator, cluster, bucket_bytes) -> MpiAllReduce:
    me = (cluster.task_type, cluster.task_index)
    others = [f"/job:{k}/replica:0/task:{i}" for k, i in cluster.tasks if (k, i) != me]
    settings = {} if bucket_bytes is None else {"bucket_bytes": bucket_bytes}
    if mpi.on_one_host(communicator):
        settings["piece_bytes"] = CACHED_PIECE_BYTES
    check_peers = functools.partial(keras_compat.check_peers, others)
    rank = communicator.rank
    collectives = order.CollectiveOrder(rank, order.through_service(rank, communicator.size))
    return MpiAllReduce(communicator, check_peers, order=collectives, **settings)


def _report_end(cluster) -> None:
    """Tells the others, over MPI, when this program ends: its process then waits for theirs.

    Its connections stay open, and without a word the others would wait for it in turn.
    """

    def report():
        # After an error nothing is waited for.
        if processes.is_done() or not processes.is_ending():
            keras_compat.report_end(_task_of(cluster))

    keras_compat.listen_for_ends()
    atexit.register(report)


def choose_communication(asked: str, num_workers: int, logical_cpus: int = 0) -> tuple[str, str]:
    """Returns how workers add gradients, and the reason.

    Args:
        asked: `"auto"`, `"ring"`, `"nccl"` or `"mpi"`.
        num_workers: Workers of the cluster.
        logical_cpus: Logical CPUs of each worker; 0 or 1 for one replica.

    Raises:
        ValueError: For MPI with several replicas in a worker.
    """
    num_gpus = devices.count_gpus()
    several = logical_cpus > 1 or num_gpus > 1
    if asked == "mpi" and several:
        raise ValueError(
            "`communication` 'mpi' needs exactly one replica in each worker. "
            f"Received: logical_cpus={logical_cpus}, {num_gpus} GPUs. "
            "Start one worker for each replica: mpiexec -n N, or python -m tfmulti.launch --mpi."
        )
    if asked != "auto":
        return asked, "as requested"
    if num_gpus:
        return "nccl", "there are GPUs"
    if mpi.size_in_environment() == num_workers and num_workers > 1 and not several:
        return "mpi", "MPI has started the job"
    return "ring", "there is no GPU, and MPI has not started the job"


def try_nccl(strategy: tf.distribute.Strategy, timeout_s: float) -> None:
    """Sends a first number between workers over NCCL, whose own waiting for a worker never ends.

    Args:
        strategy: The strategy; if it does not use NCCL, nothing happens.
        timeout_s: Seconds to wait.

    Raises:
        RuntimeError: If the number does not arrive in time.
    """
    if topology.num_workers(strategy) == 1 or not strategy.communication.startswith("nccl"):
        return
    try:
        processes.in_thread(lambda: coordination.min_and_max(strategy, 0), timeout_s)
    except TimeoutError as error:
        raise RuntimeError(
            "Workers must reach one another over NCCL, which opens ports of its own, within "
            f"`start_timeout`. Received: {error}. Open all ports between the hosts, choose the "
            "network with NCCL_SOCKET_IFNAME, see what NCCL says with NCCL_DEBUG=INFO, or use "
            'communication="ring".'
        ) from error


def _list_uuids() -> list[str]:
    """Returns the UUIDs of the GPUs that TensorFlow may use."""
    found, every = hardware.list_uuids(), tf.config.list_physical_devices("GPU")
    if len(found) != len(every):
        return []
    visible = tf.config.get_visible_devices("GPU")
    return [uuid for uuid, device in zip(found, every) if device in visible]


def _join_rendezvous(cluster, start_timeout, must_agree):
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        # Raises if TensorFlow is already in use: fail now, before waiting for other workers.
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError as error:
        raise _too_late_error(error) from error
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    network.warn_of_public_addresses(cluster)
    settings = {**keras_compat.installed_versions(), **must_agree}
    gpus = _list_uuids() if must_agree["communication"] == "nccl" else ()
    rendezvous.join(cluster, settings, timeout_s=start_timeout, gpus=gpus)


def _end_after_sigterm():
    """Ends this worker some seconds after SIGTERM, which TensorFlow's service would ignore.

    In the meantime the worker can still receive the error of another one.
    """

    def end(*_):
        timer = threading.Timer(_SIGTERM_S, processes.end_process, [environment.PREEMPTED])
        timer.daemon = True
        timer.start()

    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, end)


def _too_late_error(error) -> RuntimeError:
    return RuntimeError(
        "`multi_worker` must be created before TensorFlow is used in this process. "
        f"Received: {error} "
        "Call create_strategy first, or restart the process (in a notebook: the kernel)."
    )


_REPORT_LENGTH = 1_000
_HEARD_S = 1.0


def report_to_others(error: BaseException, cluster: Cluster) -> None:
    """Reports this worker's error to all workers, so that they need not wait for a timeout."""
    cause = " ".join(errors.short_message(error).split())
    keras_compat.report_error(f"{peers.REPORT}{cause}"[:_REPORT_LENGTH], _task_of(cluster))


def _task_of(cluster) -> str:
    return f"/job:{cluster.task_type}/replica:0/task:{cluster.task_index}"


def end_worker(error: BaseException, cluster: Cluster | None) -> peers.PeerError | None:
    """Finds out whether another worker caused an error; if not, reports it to the others.

    Returns:
        The peer error, with its text and exit code, or None for a local error.
    """
    peer_error = peers.find_peer_error(error, cluster)
    if cluster is not None and cluster.num_workers > 1:
        if peer_error is None or peer_error.exit_code == command_line.ERROR:
            report_to_others(error, cluster)
            if cluster.is_chief:
                # The service ends with the chief. Workers that wait in MPI poll it for errors.
                time.sleep(_HEARD_S)
    return peer_error


def watch_uncaught(cluster: Cluster) -> None:
    """Reports uncaught errors to the other workers and exits with a code for the launcher.

    An error that another worker caused gives exit code 144 and a message with its name.
    """
    previous = sys.excepthook

    def hook(kind, error, traceback):
        peer_error = end_worker(error, cluster) if isinstance(error, Exception) else None
        previous(kind, error, traceback)
        if peer_error is not None:
            print(f"error: {peer_error.text}", file=sys.stderr)
        if hasattr(sys, "ps1") and peer_error is None:
            # An interactive session continues.
            return
        own = command_line.ERROR if isinstance(error, Exception) else command_line.INTERRUPTED
        processes.end_process(own if peer_error is None else peer_error.exit_code)

    sys.excepthook = hook
