"""Messages between workers through TensorFlow's coordination service."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from concurrent import futures

import tensorflow as tf
from tensorflow.python.eager import context

from tfmulti.runtime import processes
from tfmulti.runtime.scoped import with_attributes

# The code of `tf.errors.InternalError`.
_INTERNAL = 13
_FAILURE, _ENDED = "tfmulti/failure", "tfmulti/ended"
_SOON_MS, _LOOK_MS, _HEALTH_MS = 100, 2_000, 8_000
_REPORT_S = 1.0
# How long the service may take to answer, beside the time that a call is to wait. TensorFlow waits
# for many minutes if the network to the chief, which runs the service, is gone.
_ANSWER_S = 30.0
_LAST_WORDS_S = 3.0
# How long a worker may still be finishing a collective whose last words another one has sent.
_ENDED_S = 5.0
# Why collectives were aborted, and the first other worker whose program has ended.
_aborted: list[str] = []
_first_ended: list[str] = []


def report_error(text: str, task: str) -> None:
    """Reports an error of this worker to all others; without a cluster it has no effect.

    Otherwise they notice missing heartbeats after their timeout, and do not learn the reason.

    Args:
        text: The error.
        task: This worker, as `/job:worker/replica:0/task:1`.
    """
    runtime = context.context()
    if runtime.coordination_service is None:
        return
    with contextlib.suppress(tf.errors.OpError, ValueError):
        # Refused if another worker has published an error before.
        publish_failure(_FAILURE, f"Error reported from {task}: {text}")
    with contextlib.suppress(tf.errors.OpError, ValueError):
        _ask(_LAST_WORDS_S, runtime.report_error_to_cluster, _INTERNAL, text)


def publish(key: str, value: str) -> None:
    """Publishes a text to all workers of the cluster; a key can be used once."""
    _ask(_ANSWER_S, context.context().set_config_key_value, key, value)


def republish(key: str, value: str) -> None:
    """Publishes a text in place of what this worker has published under the key before."""
    with contextlib.suppress(tf.errors.OpError):
        _ask(_ANSWER_S, context.context().delete_config_key_value, key)
    publish(key, value)


def publish_failure(key: str, value: str) -> None:
    """Publishes a text before this worker ends, if the others can still be reached."""
    _ask(_LAST_WORDS_S, context.context().set_config_key_value, key, value)


def _ask(seconds, function, *args, **kwargs):
    """Returns what the coordination service answers, or raises `tf.errors.UnavailableError`."""
    try:
        return processes.in_thread(lambda: function(*args, **kwargs), seconds)
    except TimeoutError:
        text = f"the chief's CoordinationService gives no answer in {seconds:g} s"
        raise tf.errors.UnavailableError(None, None, text) from None


def read_published(key: str, job: str, index: int, timeout_s: float = math.inf) -> str:
    """Returns the text that another worker publishes; waits for it as long as that worker answers.

    Args:
        key: The key.
        job: The type of the task that publishes it.
        index: Its index.
        timeout_s: The longest time to wait, in seconds.

    Raises:
        RuntimeError: If that worker does not answer, or collectives of this process were aborted.
        TimeoutError: If it answers, and publishes nothing.
    """
    runtime, end = context.context(), time.monotonic() + timeout_s
    task = f"/job:{job}/replica:0/task:{index}"
    while True:
        try:
            read = runtime.get_config_key_value
            return _ask(_LOOK_MS / 1000 + _ANSWER_S, read, key, timeout_in_ms=_LOOK_MS)
        except tf.errors.DeadlineExceededError:
            pass
        check_peers([task])
        if time.monotonic() > end:
            raise TimeoutError(f"{task} publishes no {key}")


def read_if_published(key: str, timeout_ms: int) -> str | None:
    """Returns the text that another worker has published, or None if none comes in time."""
    with contextlib.suppress(tf.errors.OpError):
        read = context.context().get_config_key_value
        return _ask(timeout_ms / 1000 + _ANSWER_S, read, key, timeout_in_ms=timeout_ms)
    return None


def abort_collectives(text: str) -> None:
    """Makes all that waits for other workers in this process, now or later, fail with a text."""
    _aborted.append(text)
    context.context().abort_collective_ops(_INTERNAL, text)


def report_end(task: str) -> None:
    """Tells the other workers that this one's program ends, where its connections stay open.

    Args:
        task: This worker, as `/job:worker/replica:0/task:1`.
    """
    for key in (f"{_ENDED}{task}", _ENDED):
        with contextlib.suppress(tf.errors.OpError, ValueError):
            # Refused if another worker has ended before.
            publish_failure(key, task)


def listen_for_ends() -> None:
    """Makes `check_peers`, and collectives that wait, fail once another worker's program ends."""

    def listen():
        with contextlib.suppress(tf.errors.OpError):
            task = context.context().get_config_key_value(_ENDED)
            time.sleep(_ENDED_S)
            _first_ended.append(task)
            context.context().abort_collective_ops(_INTERNAL, _ended_text(task))

    threading.Thread(target=listen, name="tfmulti-listen-ends", daemon=True).start()


def _ended_text(task) -> str:
    return f"{task} is gone: its program has ended"


def check_peers(tasks: list[str]) -> None:
    """Raises RuntimeError if another worker does not answer, has ended, or has reported an error.

    It also does so once `abort_collectives` was called.

    Args:
        tasks: The others, as `/job:worker/replica:0/task:1`.
    """
    if _aborted:
        raise RuntimeError(_aborted[0])
    runtime = context.context()
    reported = _failure_of_another()
    for task in tasks:
        try:
            runtime.check_collective_ops_peer_health(task, timeout_in_ms=_HEALTH_MS)
        except tf.errors.OpError as error:
            # A failing worker reports its error before it ends; the report may still be on its way.
            with contextlib.suppress(TimeoutError, futures.TimeoutError):
                raise RuntimeError(reported.result(_REPORT_S)) from error
            silent = isinstance(error, tf.errors.DeadlineExceededError)
            what = "does not answer heartbeats" if silent else "is gone: failed to connect"
            raise RuntimeError(f"{task} {what}: {error}") from error
    if reported.done():
        raise RuntimeError(reported.result())
    for task in tasks if _first_ended else ():
        if task in _first_ended or read_if_published(f"{_ENDED}{task}", _SOON_MS):
            raise RuntimeError(_ended_text(task))


@functools.cache
def _failure_of_another() -> futures.Future[str]:
    """Returns a future with the report of the first worker that fails.

    A thread waits for the report. Asking the service for the states of workers has no timeout, and
    blocks all Python threads if the chief, which runs the service, is frozen.
    """
    report: futures.Future[str] = futures.Future()

    def listen():
        with contextlib.suppress(tf.errors.OpError):
            report.set_result(context.context().get_config_key_value(_FAILURE))

    threading.Thread(target=listen, name="tfmulti-listen", daemon=True).start()
    return report


@contextlib.contextmanager
def heartbeats(timeout_s: float):
    """Sets the timeout after which a cluster that starts in the context notices a silent worker.

    `MultiWorkerMirroredStrategy` configures TensorFlow's coordination service without this option.
    """
    runtime = context.context()
    original = runtime.configure_coordination_service
    milliseconds = int(timeout_s * 1000)
    configure = functools.partial(original, heartbeat_timeout_in_ms=milliseconds)
    with with_attributes(runtime, configure_coordination_service=configure):
        yield
