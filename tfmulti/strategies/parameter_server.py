"""Training with parameter servers: the chief's strategy, and the processes that serve it.

The chief runs the whole program. A worker or a server runs it up to `create_strategy`, which then
serves the chief, and ends the process when the chief has ended or is lost.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import numpy as np
import tensorflow as tf

from tfmulti import devices, keras_compat
from tfmulti.choices import DEFAULT_HEARTBEAT_TIMEOUT_S
from tfmulti.cluster import Cluster, environment, gpus, network, schedulers
from tfmulti.cluster.peers import Presence, is_reachable
from tfmulti.cluster.task import SERVER_TYPE
from tfmulti.parallel import partitioned
from tfmulti.rendezvous import DEFAULT_TIMEOUT_S, find_timeout
from tfmulti.runtime import command_line, processes

_RPC_LAYER = "grpc"
_POLL_S = 1.0
_LAST_S = 30.0
_GOODBYE_S = 5.0
# TensorFlow numbers the Python functions of a process in the order of their creation.
_SAY_GOODBYE, _WHO = "pyfunc_0", "pyfunc_1"
_FROM_SERVER = re.compile(r"GRPC error information from remote target /job:ps/replica:0/task:(\d+)")
_UNAVAILABLE = (tf.errors.UnavailableError, tf.errors.AbortedError)
# The error on the chief if a worker was restarted before the chief noticed that it had failed.
_UNKNOWN_TO_WORKER = "Unable to find the relevant tensor remote_handle"


class ServerLost(RuntimeError):
    """A parameter server is lost, and with it a part of the model."""


class WorkersLost(RuntimeError):
    """No worker is left to compute a step."""


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Variables on servers, steps on workers; `tfmulti.train_async` trains under it.

    Each variable is placed on the server that has the fewest bytes so far; an optimizer's slots
    are where their variable is. Large embeddings are cut into parts, one for each server.

    Attributes:
        cluster: The cluster, seen from the chief.
        num_servers: Parameter servers.
        num_workers: Workers.
        start_timeout_s: Seconds to wait for workers, at the start and once all are lost.
        heartbeat_timeout_s: Seconds without an answer after which a task counts as lost.
        bytes_on_servers: Bytes of the variables that were placed on each server, without slots.
        pieces: Draws the initial values of large tables.
    """

    has_parameter_servers = True
    why = ""
    verify = "never"
    start_timeout_s, heartbeat_timeout_s = DEFAULT_TIMEOUT_S, DEFAULT_HEARTBEAT_TIMEOUT_S
    # Whether an error ends the chief.
    has_failed = False

    def __init__(self, resolver, cluster: Cluster):
        super().__init__(resolver)
        self.cluster = cluster
        self.num_servers = len(cluster.spec[SERVER_TYPE])
        self.num_workers = len(cluster.spec["worker"])
        self.bytes_on_servers = [0] * self.num_servers
        self._coordinator = None
        self.pieces = partitioned.Pieces()
        keras_compat.place_variables(self, self.bytes_on_servers, self.pieces.fill)

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The coordinator, which sends steps to workers, and sends a lost worker's to others."""
        if self._coordinator is None:
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
            _keep(self._coordinator)
        return self._coordinator


def _keep(value) -> None:
    """Keeps an object alive to the end of the process, so that its destructor never runs.

    The destructor of a coordinator waits without a timeout for a lost worker to return.
    """
    threading.Thread(
        target=lambda value: threading.Event().wait(), args=(value,), daemon=True
    ).start()


def create_parameter_server(
    cluster: Cluster | None,
    start_timeout: float | None = None,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
) -> ParameterServerStrategy:
    """Creates the chief's strategy; a worker and a server serve it instead, and never return."""
    _check_cluster(cluster)
    timeout_s = find_timeout(start_timeout)
    if cluster.task_type != "chief":
        serve(cluster, timeout_s, heartbeat_timeout_s)
    network.warn_of_public_addresses(cluster)
    _wait_for_tasks(cluster, timeout_s)
    spec = {kind: list(cluster.spec[kind]) for kind in ("chief", "worker", SERVER_TYPE)}
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer=_RPC_LAYER
    )
    try:
        strategy = ParameterServerStrategy(resolver, cluster)
        strategy.start_timeout_s = timeout_s
        strategy.heartbeat_timeout_s = heartbeat_timeout_s
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            "`parameter_server` must be created before TensorFlow is used in this process, and "
            f"once. Received: {error} Call create_strategy first, or restart the process."
        ) from error
    _end_with(strategy)
    return strategy


def _check_cluster(cluster):
    if cluster is None:
        raise RuntimeError(
            "`parameter_server` needs a cluster with a chief, workers and servers. "
            "Received: no TF_CONFIG in the environment, no `tf_config`, and a process that was not "
            f"started by {schedulers.ANY_OF_THEM}. Start it with "
            "python -m tfmulti.launch --num_workers 2 --num_ps 1, or set TF_CONFIG for each task."
        )
    if not cluster.has_servers and cluster.source in schedulers.NAMES:
        raise ValueError(
            "`num_ps` must say how many of the tasks are parameter servers. "
            f"Received: {cluster.num_workers} tasks of {cluster.source}, and no TFMULTI_NUM_PS. "
            "Set it to 1, say, or pass num_ps (--num_ps 1): the last tasks become servers, and the "
            "first one the chief."
        )
    missing = [kind for kind in ("chief", "worker", SERVER_TYPE) if not cluster.spec.get(kind)]
    if missing:
        has = ", ".join(f"{len(tasks)} {kind}" for kind, tasks in cluster.spec.items())
        raise ValueError(
            "`parameter_server` needs a chief, at least one worker and at least one ps in "
            f"TF_CONFIG. Received: a cluster with {has}, and no {missing[0]}. Add the address of a "
            f'"{missing[0]}" task, which runs in a separate process.'
        )


def task_names(cluster: Cluster) -> dict[str, str]:
    """Returns the addresses of the workers and the servers by their names, such as `ps 0`."""
    return {
        f"{kind} {index}": address
        for kind in ("worker", SERVER_TYPE)
        for index, address in enumerate(cluster.spec[kind])
    }


def _wait_for_tasks(cluster, timeout_s):
    """Waits until all tasks listen: TensorFlow has no timeout, and does not name missing tasks."""
    until = time.monotonic() + timeout_s
    missing = task_names(cluster)
    while missing:
        missing = {name: each for name, each in missing.items() if not is_reachable(each)}
        if missing and time.monotonic() >= until:
            names = ", ".join(f"{name} ({address})" for name, address in missing.items())
            raise RuntimeError(
                "All workers and servers must start within `start_timeout`. Received: nothing from "
                f"{names} in {timeout_s:g} s. Read their logs, or raise start_timeout "
                "(--start_timeout)."
            )
        time.sleep(0.05 if missing else 0.0)


def serve(cluster: Cluster, timeout_s: float, heartbeat_timeout_s: float) -> NoReturn:
    """Serves the chief, as a worker or a server, until it is done; then ends this process.

    The exit code is the one that the chief sends, 0 after success; 144 if the chief is lost or
    does not start; 143 after SIGTERM, once the chief no longer needs this task.

    Args:
        cluster: The cluster, seen from this task.
        timeout_s: Seconds to wait for the chief.
        heartbeat_timeout_s: Seconds without an answer after which the chief counts as lost.
    """
    _take_one_gpu(cluster.task_type)
    told, preempted = threading.Event(), threading.Event()
    code = [0]

    def goodbye(number):
        code[0] = int(number)
        told.set()
        return np.int64(0)

    index = cluster.task_index
    tokens = [_token(goodbye, [0]), _token(lambda: np.array([index, os.getpid()], np.int64), [])]
    if tokens != [_SAY_GOODBYE, _WHO]:
        raise RuntimeError(
            "A worker or a parameter server must call create_strategy before it creates TensorFlow "
            "ops that call Python (tf.py_function, tf.numpy_function, from_generator). Received: "
            f"{tokens}. Move create_strategy to the start of the program."
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: preempted.set())
    spec = {kind: list(tasks) for kind, tasks in cluster.spec.items() if kind != "evaluator"}
    server = tf.distribute.Server(
        spec, job_name=cluster.task_type, task_index=index, protocol=_RPC_LAYER, start=True
    )
    presence = Presence(cluster.spec["chief"][0], heartbeat_timeout_s)
    cause = _wait_for_end(cluster, presence, told, preempted, timeout_s)
    del server
    if cause:
        print(f"error: {cause}", file=sys.stderr)
        processes.end_process(environment.PEER_LOST)
    # The chief still waits for the answer to its goodbye.
    time.sleep(0.2)
    processes.end_process(environment.PREEMPTED if preempted.is_set() else code[0])


def _take_one_gpu(task_type) -> None:
    """Leaves a worker its first GPU, and a server none.

    With several TensorFlow would count each as a replica, divide the losses by their number, and
    compute on the first.
    """
    visible = gpus.list_visible()
    if visible:
        devices.see_gpus(visible[0] if task_type == "worker" else gpus.NO_GPU)


def _wait_for_end(cluster, presence, told, preempted, timeout_s) -> str | None:
    """Waits until the chief is done, and returns None, or the reason why it counts as lost."""
    chief, name = presence.address, f"{cluster.task_type} {cluster.task_index}"
    began = preempted_at = time.monotonic()
    while not told.wait(_POLL_S):
        now = time.monotonic()
        preempted_at = preempted_at if preempted.is_set() else now
        if now - preempted_at > _LAST_S:
            return None
        lost = presence.check()
        if lost and presence.has_been_there:
            return (
                f"{name} serves the chief, and ends with it. Received: no chief at {chief} any "
                f"more: {lost}. Look at the chief's output, and start all again: they resume from "
                "the last checkpoint."
            )
        if not presence.has_been_there and now - began > timeout_s + _LAST_S:
            return (
                f"{name} serves a chief, which must start within `start_timeout`. Received: no "
                f"chief at {chief} in {now - began:.0f} s. Start the chief, or raise start_timeout."
            )
    return None


def end_stuck_chief(error: ServerLost) -> NoReturn:
    """Ends the chief's process, which waits in TensorFlow without a timeout for a server."""
    code = end_chief(error)
    command_line.show_error(error, False)
    # TensorFlow's exit handlers would wait for a lost task.
    processes.exit_at_once(code)


def _token(function: Callable, arguments: list[int]) -> str:
    """Returns the name by which the chief can call a Python function of this process."""
    with tf.Graph().as_default():
        inputs = [tf.constant(argument, tf.int64) for argument in arguments]
        return tf.numpy_function(function, inputs, tf.int64).op.get_attr("token").decode()


def who_computes() -> tf.Tensor:
    """Returns the number and the process id of the worker that runs a step, int64 of shape (2,)."""
    [found] = tf.raw_ops.PyFunc(input=[], token=_WHO, Tout=[tf.int64])
    return tf.ensure_shape(found, [2])


def say_goodbye(strategy: ParameterServerStrategy, code: int = 0) -> None:
    """Tells the workers and the servers that the chief is done, so that they end too."""
    for name, address in task_names(strategy.cluster).items():
        kind, index = name.split()
        if not is_reachable(address):
            continue
        try:
            with tf.device(f"/job:{kind}/replica:0/task:{index}/device:CPU:0"):
                number = tf.constant(code, tf.int64)
                tf.raw_ops.PyFunc(input=[number], token=_SAY_GOODBYE, Tout=[tf.int64])
        except tf.errors.OpError:
            # The task has ended meanwhile, or was restarted and has not reconnected.
            continue


def find_lost_server(error: BaseException | None, cluster: Cluster) -> ServerLost | None:
    """Returns the error for a lost server if an error of TensorFlow means that, else None."""
    if not isinstance(error, tf.errors.OpError):
        return None
    gone = [
        f"ps {index} ({address})"
        for index, address in enumerate(cluster.spec[SERVER_TYPE])
        if not is_reachable(address)
    ]
    if not gone and isinstance(error, _UNAVAILABLE):
        # A server that was restarted has lost its variables.
        gone = [f"ps {index}" for index in sorted(set(_FROM_SERVER.findall(str(error))))]
    return lost_error(gone) if gone else None


def is_lost_worker(error: BaseException) -> bool:
    """Whether an error means that a worker was lost together with a result that it had."""
    if "/job:worker" not in str(error):
        return False
    return isinstance(error, _UNAVAILABLE) or _UNKNOWN_TO_WORKER in str(error)


def lost_error(names: Iterable[str]) -> ServerLost:
    """Returns the error for lost servers."""
    return ServerLost(
        "Each parameter server must be running: it holds a part of the model. "
        f"Received: {', '.join(names)} is lost. Start all again: with "
        "tfmulti.callbacks.Checkpoint or --workdir they resume from the last checkpoint."
    )


def _end_with(strategy) -> None:
    """Ends workers and servers when this process exits normally; other exits they detect."""
    _chiefs.append(strategy)
    previous = sys.excepthook

    def hook(kind, error, traceback):
        previous(kind, error, traceback)
        processes.end_process(end_chief(error))

    def end():
        if not strategy.has_failed:
            thread = threading.Thread(target=say_goodbye, args=(strategy,), daemon=True)
            thread.start()
            thread.join(_GOODBYE_S)
            if thread.is_alive() and not processes.is_ending():
                # While TensorFlow waits for a lost worker to return, nothing can be sent, and
                # Python's shutdown waits too. The other tasks notice that the chief has gone.
                processes.exit_at_once(0)

    sys.excepthook = hook
    atexit.register(end)


_chiefs: list[ParameterServerStrategy] = []


def end_chief(error: BaseException) -> int | None:
    """Keeps the chief from reporting success to workers and servers, after an error.

    Args:
        error: The error that ends this process.

    Returns:
        The exit code: 144 if another task was lost, else 1. None if this process is not the chief.
    """
    for strategy in _chiefs:
        strategy.has_failed = True
    if not _chiefs:
        return None
    if isinstance(error, ServerLost | WorkersLost):
        return environment.PEER_LOST
    return command_line.ERROR if isinstance(error, Exception) else command_line.INTERRUPTED
