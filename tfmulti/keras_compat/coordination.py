"""Messages between workers through TensorFlow's coordination service; keys of collectives."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
import time
from concurrent import futures

import tensorflow as tf
from tensorflow.python.eager import context

from tfmulti import marks
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


# A key of a collective has 32 bits: the number of the collective, and its rows. Numbers repeat
# after 8190 traced collectives of a process.
_MAX_ROWS, _MAX_COLLECTIVES = 2**18, 2**13 - 2
# A prime: sizes that differ by some rows differ modulo it, unless it divides the size of a row.
_MAX_SIZE = 262_139


# More than the groups of devices of one strategy.
_GROUPS = 1000
_strategies = itertools.count(1)


def use_own_groups(strategy: tf.distribute.MirroredStrategy) -> None:
    """Numbers the groups of devices of a strategy apart from those of all others.

    TensorFlow numbers the groups of each strategy from 1, and the collectives of each group from
    100, but keeps one table of them for the process: a second strategy cannot reduce on GPUs.

    Args:
        strategy: A strategy, before its `__init__`.
    """
    strategy._collective_key_base = _GROUPS * next(_strategies)


def mark_launchers(strategy: tf.distribute.Strategy) -> None:
    """Marks the launchers of collectives of a strategy of ours, wherever they are used."""
    # TensorFlow keeps one set of launchers for the devices, and one for tensors of the host.
    for each in vars(strategy.extended).values():
        for launcher in getattr(each, "_launchers", ()):
            marks.LAUNCHES.set(launcher, True)


def gather_from_workers(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Concatenates the tensors of all workers along the first axis, in any order.

    Unlike `ReplicaContext.all_gather` it can be called in a branch, if all workers take it.

    Args:
        strategy: A strategy with one replica for each worker.
        value: A tensor, of the same shape on all workers.
    """
    [launcher] = strategy.extended._cross_device_ops._launchers
    return launcher._all_gather(value, None)


def next_collective_key(strategy: tf.distribute.Strategy) -> int:
    """Returns the highest number that the next collective of this worker would get.

    Args:
        strategy: A strategy of several workers.
    """
    return max(max(of_group.values()) for of_group in _keys_of(strategy))


def skip_collective_keys(strategy: tf.distribute.Strategy, number: int) -> None:
    """Makes the next collectives of this worker get a number.

    This skips the numbers that only other workers have used.

    Args:
        strategy: A strategy of several workers.
        number: The number, at least that of `next_collective_key`.
    """
    for of_group in _keys_of(strategy):
        of_group.update(dict.fromkeys(of_group, number))


def _keys_of(strategy):
    return strategy.extended._collective_keys._instance_key_table.values()


SENT_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}
"""For dtypes of integers that collectives cannot send, the dtypes in which they are sent."""
_ADDED_OVER_GPUS_AS = {tf.bfloat16: tf.float32, tf.int32: tf.int64}
_GATHERED_AS = {**SENT_AS, tf.bfloat16: tf.float32}
# The bytes of an int32, as which texts are gathered.
_WORD = 4


def gather_by_shape(original):
    """Gives gathers a key for each number of rows, because TensorFlow binds a key to one shape.

    A tensor that TensorFlow cannot gather, as of bfloat16, is sent in a dtype with all its values,
    and texts as numbers.
    """

    def all_gather(self, input_tensor, options):
        if input_tensor.dtype == tf.string:
            return _gather_texts(input_tensor, lambda part: all_gather(self, part, options))
        sent_as = _GATHERED_AS.get(input_tensor.dtype)
        if sent_as is not None:
            gathered = all_gather(self, tf.cast(input_tensor, sent_as), options)
            return tf.cast(gathered, input_tensor.dtype)
        if input_tensor.shape.is_fully_defined():
            return original(self, input_tensor, options)
        # The shape is taken where the tensor is, which would else be copied to the host.
        rows = tf.shape(input_tensor)[0]
        with tf.device("CPU:0"):
            rows %= _MAX_ROWS
        with _key_of(self, rows):
            return original(self, input_tensor, options)

    return all_gather


def _gather_texts(texts, gather) -> tf.Tensor:
    """Gathers texts as whole numbers of four bytes each, all filled up to the longest text.

    Args:
        texts: A tensor of strings.
        gather: Function that gathers a tensor of int32.
    """
    with tf.device("CPU:0"):
        lengths = gather(tf.strings.length(texts))
        longest = tf.maximum(tf.reduce_max(lengths), 1)
        size = -(-longest // _WORD) * _WORD
        words = tf.io.decode_raw(texts, tf.int32, fixed_length=size)
        # In one row of numbers, by whose length the gather gets its key.
        words = gather(tf.reshape(words, [-1]))
        codes = tf.reshape(tf.bitcast(words, tf.uint8), tf.concat([tf.shape(lengths), [size]], 0))
        letters = tf.gather([bytes([code]) for code in range(256)], tf.cast(codes, tf.int32))
        filled = tf.strings.reduce_join(letters, axis=-1)
        gathered = tf.strings.substr(filled, tf.zeros_like(lengths), lengths)
    return tf.ensure_shape(gathered, lengths.shape)


def reduce_by_size(original):
    """Gives sums a key for each number of elements, if the graph does not know the number.

    Numbers that TensorFlow cannot add over GPUs are added in a dtype with all their values.
    """

    def all_reduce(self, input_tensor, control_input=None, options=None):
        wider = _ADDED_OVER_GPUS_AS.get(input_tensor.dtype) if "GPU" in self._device else None
        if wider is not None:
            added = all_reduce(self, tf.cast(input_tensor, wider), control_input, options)
            return tf.cast(added, input_tensor.dtype)
        if input_tensor.shape.is_fully_defined():
            return original(self, input_tensor, control_input, options)
        size = tf.size(input_tensor)
        with tf.device("CPU:0"):
            size %= _MAX_SIZE
        with _key_of(self, size):
            return original(self, input_tensor, control_input, options)

    return all_reduce


@contextlib.contextmanager
def _key_of(launcher, size):
    """Gives collectives that a launcher starts in the context a key of their own for this size."""
    number = launcher._next_instance_key()
    with tf.device("CPU:0"):
        # Plus 1, so that no key is as small as those of collectives of known shape.
        key = (tf.cast(number, tf.int32) % _MAX_COLLECTIVES + 1) * _MAX_ROWS + size
    with with_attributes(launcher, _next_instance_key=lambda: key):
        yield
