"""TensorFlow's coordination service: what workers tell one another beside their tensors."""

from __future__ import annotations

import contextlib
import functools
import threading
from concurrent import futures

import tensorflow as tf
from tensorflow.python.eager import context

_INTERNAL = 13
_FAILURE = "tfmulti/failure"
_LOOK_MS, _HEALTH_MS = 2_000, 8_000
_WORD_S = 1.0


def report_error(text: str, task: str) -> None:
    """Tells all workers of an error on this one; nothing happens where there is no cluster.

    Else they learn of it by missing heartbeats, ten seconds later, and without the reason.

    Args:
        text: The error.
        task: This worker, as `/job:worker/replica:0/task:1`.
    """
    here = context.context()
    if here.coordination_service is None:
        return
    with contextlib.suppress(tf.errors.OpError, ValueError):
        # Refused where another worker was the first.
        publish(_FAILURE, f"Error reported from {task}: {text}")
    with contextlib.suppress(tf.errors.OpError, ValueError):
        here.report_error_to_cluster(_INTERNAL, text)


def publish(key: str, value: str) -> None:
    """Lets all workers of the cluster read a text; a key can be used once."""
    context.context().set_config_key_value(key, value)


def read_published(key: str, job: str, index: int) -> str:
    """Returns what another worker has published; waits for it as long as that worker answers.

    Args:
        key: The key.
        job: The type of the task that publishes it.
        index: Its index.

    Raises:
        RuntimeError: Where that worker does not answer.
    """
    here = context.context()
    task = f"/job:{job}/replica:0/task:{index}"
    while True:
        try:
            return here.get_config_key_value(key, timeout_in_ms=_LOOK_MS)
        except tf.errors.DeadlineExceededError:
            pass
        check_peers([task])


def read_if_published(key: str, timeout_ms: int) -> str | None:
    """Returns what another worker has published, or None where it has not within that time."""
    with contextlib.suppress(tf.errors.OpError):
        return context.context().get_config_key_value(key, timeout_in_ms=timeout_ms)
    return None


def check_peers(tasks: list[str]) -> None:
    """Raises RuntimeError where another worker does not answer, or has told of an error.

    Args:
        tasks: The others, as `/job:worker/replica:0/task:1`.
    """
    here = context.context()
    told = _failure_of_another()
    for task in tasks:
        try:
            here.check_collective_ops_peer_health(task, timeout_in_ms=_HEALTH_MS)
        except tf.errors.OpError as error:
            # Who fails tells it before it goes, and the word may still be on its way.
            with contextlib.suppress(TimeoutError, futures.TimeoutError):
                raise RuntimeError(told.result(_WORD_S)) from error
            silent = isinstance(error, tf.errors.DeadlineExceededError)
            what = "does not answer heartbeats" if silent else "is gone: failed to connect"
            raise RuntimeError(f"{task} {what}: {error}") from error
    if told.done():
        raise RuntimeError(told.result())


@functools.cache
def _failure_of_another() -> futures.Future[str]:
    """Returns what will hold the words of the first worker that fails.

    A thread waits for them: to ask the service for the states of workers has no deadline, and
    stops all of Python where the chief, whose service it is, is frozen.
    """
    words: futures.Future[str] = futures.Future()

    def listen():
        with contextlib.suppress(tf.errors.OpError):
            words.set_result(context.context().get_config_key_value(_FAILURE))

    threading.Thread(target=listen, name="tfmulti-listen", daemon=True).start()
    return words


@contextlib.contextmanager
def heartbeats(timeout_s: float | None):
    """Has a cluster that is begun within notice a silent worker after `timeout_s` seconds.

    `MultiWorkerMirroredStrategy` sets up TensorFlow's coordination service without asking.
    """
    here = context.context()
    if timeout_s is None:
        yield
        return
    original = here.configure_coordination_service
    milliseconds = int(timeout_s * 1000)
    here.configure_coordination_service = functools.partial(
        original, heartbeat_timeout_in_ms=milliseconds
    )
    try:
        yield
    finally:
        del here.configure_coordination_service
