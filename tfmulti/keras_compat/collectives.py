"""TensorFlow's collectives between workers: their keys, dtypes, and those it has no method for."""

from __future__ import annotations

import contextlib
import itertools

import tensorflow as tf

from tfmulti import marks
from tfmulti.runtime.scoped import with_attributes

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


def exchange_rows(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """Sends each row of a tensor to one worker, and returns the rows that workers sent to this one.

    Row i goes to, or comes from, the worker at place i of the order that `order_of_workers` has.

    Args:
        strategy: A strategy with one replica for each worker, on CPUs.
        value: A tensor with a row for each worker, of the same shape on all workers.
    """
    launcher, key = _next_collective(strategy)
    with tf.device(launcher._device):
        return tf.raw_ops.CollectiveAllToAllV2(
            input=value, ordering_token=[], communication_hint="ring", timeout_seconds=0, **key
        )


def order_of_workers(strategy: tf.distribute.Strategy, worker: int) -> list[int]:
    """Returns the numbers of all workers, in the order in which collectives have their tensors.

    It is a collective of its own. TensorFlow sorts the names of tasks as texts.

    Args:
        strategy: A strategy with one replica for each worker, on CPUs.
        worker: The number of this worker.
    """
    numbers = tf.fill([strategy.num_replicas_in_sync, 1], worker)
    return exchange_rows(strategy, numbers)[:, 0].numpy().tolist()


def broadcast_from(strategy: tf.distribute.Strategy, value, shape, is_owner: bool) -> tf.Tensor:
    """Returns one worker's tensor on all workers.

    Args:
        strategy: A strategy with one replica for each worker, on CPUs.
        value: The tensor on the worker that has it; elsewhere one of the same dtype.
        shape: Its shape.
        is_owner: Whether this worker has it.
    """
    launcher, key = _next_collective(strategy)
    key |= {"communication_hint": "ring", "timeout_seconds": 0}
    with tf.device(launcher._device):
        if is_owner:
            received = tf.raw_ops.CollectiveBcastSendV2(input=value, **key)
        else:
            received = tf.raw_ops.CollectiveBcastRecvV2(T=value.dtype, shape=tuple(shape), **key)
    _run_in_any_case(received)
    return received


def _run_in_any_case(tensor):
    """Keeps an op of a graph whose result nothing may need, for which other workers wait."""
    if tf.is_symbolic_tensor(tensor):
        control = tensor.graph.experimental_acd_manager
        if control is not None:
            control.run_independently(tensor.op)


def _next_collective(strategy) -> tuple:
    """Returns the launcher of a strategy's collectives, and what identifies the next one."""
    [launcher] = strategy.extended._cross_device_ops._launchers
    return launcher, {
        "group_size": launcher._group_size,
        "group_key": launcher._group_key,
        "instance_key": launcher._next_instance_key(),
    }


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
