"""How long training steps wait for their rows."""

from __future__ import annotations

import tensorflow as tf


def can_measure() -> bool:
    """Whether a step may read the clock: not where only deterministic operations are allowed."""
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


class Waiting:
    """Adds up, in the step itself, the seconds from asking for a batch to having it.

    Three small operations on the CPU a step. Where one call of the training function does several
    steps nothing is measured: TensorFlow then draws a batch while the step before it computes, and
    the two cannot be told apart.
    """

    def __init__(self):
        self._seconds = None

    def prepare(self) -> None:
        """Makes the variable, which cannot be made within a step."""
        if self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    def measure(self, draw):
        """Returns what a function draws from the pipeline, and adds the time it took."""
        with tf.device("CPU:0"):
            began = tf.timestamp()
        with tf.control_dependencies([began]):
            drawn = draw()
        tensors = [t for t in tf.nest.flatten(drawn, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors), tf.device("CPU:0"):
            self._seconds.assign_add(tf.timestamp() - began)
        return drawn

    @property
    def seconds(self) -> float | None:
        """Seconds since the first step; None before it."""
        return None if self._seconds is None else float(self._seconds.numpy())
