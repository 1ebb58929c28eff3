"""Coordinates workers: they compare what they do, agree on requests, and exchange texts.

They use small reductions, and texts in TensorFlow's coordination service.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.strategies import failed_calls, program_order

_UNKNOWN = -1
# A number of bytes is compared in two parts, below and above this: floats are exact up to 2**24.
_DIGIT = 2**20
# The int32 words that one reduction of `broadcast` sends.
_CHUNK = 2**18
# A step of a few rows, which workers start together, takes much less.
_ARRIVAL_MS = 20_000
_failure_numbers, _end_numbers = itertools.count(), itertools.count()


def min_and_max(strategy: tf.distribute.Strategy, number: int) -> tuple[int, int]:
    """Returns the minimum and the maximum of a number over all workers.

    It is a collective: every worker must call it.

    Args:
        strategy: The strategy of this worker.
        number: A whole number below 2**24 in size.
    """
    if topology.num_workers(strategy) == 1:
        return number, number
    function = getattr(strategy, "compare_function", None)
    if function is None:
        function = strategy.compare_function = _create_compare_function(strategy)
    table = function(tf.constant(number, tf.float32))
    table = strategy.experimental_local_results(table)[0].numpy()
    return int(table.min()), int(table.max())


def any_worker(strategy: tf.distribute.Strategy, condition: bool) -> bool:
    """Returns whether a condition holds on any worker; every worker must call it."""
    return bool(min_and_max(strategy, int(bool(condition)))[1])


def _create_compare_function(strategy):
    def add(number):
        # The collective adds, so each replica writes to its own entry of a table.
        context = tf.distribute.get_replica_context()
        place = tf.one_hot(context.replica_id_in_sync_group, strategy.num_replicas_in_sync)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, place * number)

    return tf.function(lambda number: strategy.run(add, args=(number,)))


def align_collectives(strategy: tf.distribute.Strategy) -> None:
    """Lets workers continue together after some of them could not trace, or run, a function.

    TensorFlow numbers collectives in the order in which each worker traces them, and matches them
    by number. Every worker must call this.

    Args:
        strategy: The strategy of this worker.
    """
    if topology.num_workers(strategy) > 1:
        _, highest = min_and_max(strategy, keras_compat.next_collective_key(strategy))
        keras_compat.skip_collective_keys(strategy, highest)


def all_fail(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all workers have failed: whether all call this within some seconds."""
    return _all_arrive(strategy, f"failure/{next(_failure_numbers)}")


@contextlib.contextmanager
def call_together(model: keras.Model, name: str) -> Iterator[None]:
    """Makes a call on all workers, which end it together, also where it fails on one of them.

    Args:
        model: The model.
        name: `"fit"`, `"evaluate"` or `"predict"`.
    """
    strategy, is_part = model.distribute_strategy, failed_calls.is_under_way()
    try:
        with failed_calls.shared_call(strategy, name):
            yield
            # `fit` and `evaluate` end theirs before they read results.
            if name == "predict":
                program_order.end_pass(model)
    except BaseException:
        if not is_part:
            leave_together(strategy, waits=False)
        raise
    if not is_part:
        leave_together(strategy)


def leave_together(strategy: tf.distribute.Strategy, waits: bool = True) -> None:
    """Waits some seconds for the other workers at a place where the program may end.

    A worker that ended earlier could close a connection on which another still receives.

    Args:
        strategy: The strategy of this worker.
        waits: Whether to wait; if not, this only tells the others not to wait for this worker.
    """
    if not getattr(strategy, "checks_call_order", False):
        return
    place = f"end/{next(_end_numbers)}"
    # The chief, through which they exchange texts, may have ended.
    with contextlib.suppress(tf.errors.OpError):
        if waits:
            _all_arrive(strategy, place)
        else:
            keras_compat.publish_failure(_place_key(strategy, place), "failed")


def _place_key(strategy, place) -> str:
    return f"tfmulti/{place}/{topology.worker_index(strategy)}"


def _all_arrive(strategy, place) -> bool:
    """Returns whether all workers come to a place of the program within some seconds.

    It is not a collective, because the other workers may be waiting in one for this worker.
    """
    workers = range(topology.num_workers(strategy))
    if len(workers) == 1:
        return True
    keras_compat.publish(_place_key(strategy, place), "here")
    keys = (f"tfmulti/{place}/{worker}" for worker in workers)
    return all(keras_compat.read_if_published(key, _ARRIVAL_MS) for key in keys)


def broadcast(strategy: tf.distribute.Strategy, data: bytes | None) -> bytes:
    """Sends one worker's bytes to all workers; every worker must call it.

    Args:
        strategy: The strategy of this worker.
        data: The bytes, on the worker that sends, such as the chief; None on the others.
    """
    sizes = divmod(len(data), _DIGIT) if data is not None else (0, 0)
    size = sum(min_and_max(strategy, n)[1] * unit for n, unit in zip(sizes, (_DIGIT, 1)))
    if topology.num_workers(strategy) == 1 or not size:
        return data or b""
    function = strategy.add_function = getattr(
        strategy, "add_function", None
    ) or _create_add_function(strategy)
    words = np.zeros(-(-size // (4 * _CHUNK)) * _CHUNK, np.int32)
    if data is not None:
        words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)
    for start in range(0, len(words), _CHUNK):
        # A collective requires the same shape in all calls.
        added = function(tf.constant(words[start : start + _CHUNK]))
        words[start : start + _CHUNK] = strategy.experimental_local_results(added)[0].numpy()
    return words.view(np.uint8)[:size].tobytes()


def _create_add_function(strategy):
    def add(chunk):
        own = tf.where(topology.is_first_local_replica(), chunk, tf.zeros_like(chunk))
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    return tf.function(
        lambda chunk: strategy.run(add, args=(chunk,)),
        input_signature=[tf.TensorSpec([_CHUNK], tf.int32)],
    )


def before_pass(strategy, epoch_iterator) -> None:
    """Prepares Keras's iterator over the batches of a `fit` or an `evaluate`.

    Workers with different numbers of batches all continue to the end of the longest data. Keras
    counts only local batches, so one worker would stop while another waits for it. A worker that
    has no more data takes part with empty replica batches until all are done.
    """
    keras_compat.follow_position(epoch_iterator)
    if marks.AGREED.get(epoch_iterator):
        # A validation iterator, which `fit` reuses after every epoch.
        return
    marks.AGREED.set(epoch_iterator, True)
    count = keras_compat.number_of_batches(epoch_iterator, topology.num_local_replicas(strategy))
    least, most = min_and_max(strategy, _UNKNOWN if count is None else count)
    if least != most:
        logging.warning(
            "Workers have different numbers of batches: %s to %d. All continue until the longest "
            "dataset ends; a worker that has run out participates with empty batches.",
            "an unknown number" if least == _UNKNOWN else least,
            most,
        )
    keras_compat.set_number_of_batches(epoch_iterator, None if least == _UNKNOWN else most)


def agree_on_stopping(model) -> None:
    """Stops all workers after the epoch in which one of them sets `stop_training`."""
    strategy = model.distribute_strategy
    if not keras_compat.is_ours(strategy) or topology.num_workers(strategy) == 1:
        return
    program_order.compare_with_chief(strategy, "the end of an epoch")
    if any_worker(strategy, model.stop_training) and not model.stop_training:
        logging.warning("Stopping after this epoch, because another worker stops.")
        model.stop_training = True


REQUESTS = ("stop", "save")


class CoordinationRequests:
    """The requests of this worker, and those that have reached all workers.

    `ask` may be called from a signal handler.
    """

    def __init__(self, num_replicas: int):
        self._alone = num_replicas == 1
        self._asked, self._sent, self._agreed = (dict.fromkeys(REQUESTS, False) for _ in range(3))
        zeros = np.zeros(len(REQUESTS), "float32")
        with tf.init_scope(), tf.device("CPU:0"):
            # This worker's requests, and the sum of all workers' since `receive` read it.
            self._wanted = tf.Variable(zeros, trainable=False, name="tfmulti_requests")
            self._heard = tf.Variable(zeros, trainable=False, name="tfmulti_requests")

    def reset(self) -> None:
        """Clears all requests; called when a `fit` begins, before any step."""
        self._asked, self._agreed = (dict.fromkeys(REQUESTS, False) for _ in range(2))
        self._heard.assign(np.zeros(len(REQUESTS), "float32"))

    def ask(self, name: str) -> None:
        """Requests an action, one of `REQUESTS`, of all workers."""
        self._asked[name] = True

    def send(self) -> None:
        """Adds the requests to the reduction of the next step; called before that step."""
        if self._alone or self._sent == self._asked:
            return
        self._sent = dict(self._asked)
        self._wanted.assign([float(asked) for asked in self._sent.values()])

    def receive(self) -> bool:
        """Reads the requests that the last step reduced; returns whether there is one."""
        if self._alone:
            self._agreed |= {name: True for name, asked in self._asked.items() if asked}
        else:
            heard = self._heard.numpy()
            if heard.any():
                self._agreed |= {name: True for name, h in zip(REQUESTS, heard) if h}
                self._heard.assign(np.zeros(len(REQUESTS), "float32"))
        return any(self._agreed.values())

    def agree_to_stop(self, strategy: tf.distribute.Strategy) -> None:
        """Lets a request to stop reach all workers between two steps; every worker must call it."""
        self._agreed["stop"] |= any_worker(strategy, self._asked["stop"])

    def is_late(self) -> bool:
        """Whether a request to stop has come that the workers have not agreed on."""
        return self._asked["stop"] and not self._agreed["stop"]

    def must_stop(self) -> bool:
        """Whether a request to stop has reached all workers."""
        return self._agreed["stop"]

    def clear(self, name: str) -> None:
        """Clears a request that was fulfilled."""
        self._asked[name] = self._agreed[name] = False

    def part_of_step(self) -> tf.Tensor:
        """Returns this replica's term in the step's reduction, a float32 vector."""
        return tf.where(
            topology.is_first_local_replica(), self._wanted.read_value(), tf.zeros(len(REQUESTS))
        )

    def note(self, added: tf.Tensor) -> None:
        """Stores the reduced requests, within the step."""
        self._heard.assign(tf.maximum(self._heard, added))


def requests_of(strategy: tf.distribute.Strategy) -> CoordinationRequests:
    """Returns the requests of a strategy, or a new object if the strategy has none."""
    requests = getattr(strategy, "requests", None)
    return requests if requests is not None else CoordinationRequests(1)


# The value is published already, so the timeout only covers the network.
_FIRST_MS, _NEXT_MS = 2_000, 100
# A key can be used once in a process.
_fit_numbers = itertools.count()


class EpochTexts:
    """The texts that workers publish during one `fit`.

    All workers wait for one another after each epoch (`agree_on_stopping`). Afterwards a text that
    was published before is available, or will never come: a worker that published nothing is not
    read again.

    Args:
        strategy: The strategy of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        several = topology.num_workers(strategy) > 1
        self._enabled = several and keras_compat.is_ours(strategy)
        self.worker, self._tasks = topology.worker_name(strategy), topology.worker_names(strategy)
        self._fit = next(_fit_numbers)
        self._silent: set[str] = set()

    def publish(self, epoch: int, text: str) -> None:
        """Publishes a text of an epoch for all workers."""
        if self._enabled:
            keras_compat.publish(self._key(epoch, self.worker), text)

    def read(self, epoch: int) -> tuple[dict[str, str], set[str]]:
        """Returns the others' texts of an epoch, and the workers missing for the first time.

        Call it for the previous epoch, when an epoch begins or `fit` ends.
        """
        texts, missing = {}, set()
        others = set(self._tasks) - {self.worker} - self._silent if self._enabled else ()
        for task in sorted(others):
            # A short timeout after the first: many workers may have published nothing.
            timeout_ms = _NEXT_MS if missing else _FIRST_MS
            text = keras_compat.read_if_published(self._key(epoch, task), timeout_ms)
            if text is None:
                missing.add(task)
            else:
                texts[task] = text
        self._silent |= missing
        return texts, missing

    def _key(self, epoch, task) -> str:
        return f"tfmulti/texts/{self._fit}/{epoch}/{task.replace(' ', '/')}"
