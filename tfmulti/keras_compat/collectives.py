"""The keys by which workers find the tensors that go together in one collective."""

from __future__ import annotations

import contextlib

import tensorflow as tf

# Keys of collectives are 32 bits: which collective, and its rows.
_MAX_ROWS, _MAX_COLLECTIVES = 2**20, 2**10
# A prime: sizes that differ by some rows differ in it, where a row has not just as many elements.
_MAX_SIZE = 1_048_573


def own_launchers(strategy: tf.distribute.Strategy) -> None:
    """Marks what a strategy of ours has made to launch collectives, wherever it is used."""
    for each in vars(strategy.extended).values():
        for launcher in getattr(each, "_launchers", ()):
            launcher.tfmulti_launches = True


def never_unique(original):
    """Has keys be given while functions are traced, where they reach nested ones."""

    def use_unique_instance_key(self):
        return False

    return use_unique_instance_key


def gather_by_shape(original):
    """Gives the gathers of workers a key for each number of rows: a key stands for one shape."""

    def all_gather(self, input_tensor, options):
        with tf.device("CPU:0"):
            rows = tf.shape(input_tensor)[0] % _MAX_ROWS
        with _key_of(self, rows):
            return original(self, input_tensor, options)

    return all_gather


def reduce_by_size(original):
    """Gives the sums of workers a key for each number of elements, where the graph knows none."""

    def all_reduce(self, input_tensor, control_input=None, options=None):
        if input_tensor.shape.is_fully_defined():
            return original(self, input_tensor, control_input, options)
        with tf.device("CPU:0"):
            size = tf.size(input_tensor) % _MAX_SIZE
        with _key_of(self, size):
            return original(self, input_tensor, control_input, options)

    return all_reduce


@contextlib.contextmanager
def _key_of(launcher, size):
    """Has a launcher's next collective take a key of its own for this size."""
    number = launcher._next_instance_key()
    with tf.device("CPU:0"):
        key = (tf.cast(number, tf.int32) % _MAX_COLLECTIVES + 1) * _MAX_ROWS + size
    launcher._next_instance_key = lambda: key
    try:
        yield
    finally:
        del launcher._next_instance_key
