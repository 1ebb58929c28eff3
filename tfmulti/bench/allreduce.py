"""The all-reduce alone: one worker's side, through the strategy, as gradients go."""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf

from tfmulti.strategies import create_strategy


def create(kind: str) -> Callable[..., dict[str, list[float]]]:
    """Creates the strategy of a transport.

    Args:
        kind: `"ring"` or `"mpi"`.

    Returns:
        A function `reduce(floats, times)`: the seconds of each sum of so many float32 values.
    """
    strategy = create_strategy("multi_worker", communication=kind)

    def add(values):
        # Made on the replica's device: what has none cannot be reduced. Nothing is copied.
        return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(values))

    # Traced for each size: a collective keeps the shape that it had first.
    @tf.function
    def reduce_once(values):
        return strategy.run(add, args=(values,))

    def reduce(floats: int, times: int) -> dict[str, list[float]]:
        with tf.device("CPU:0"):
            values = tf.ones([floats], tf.float32)
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            reduce_once(values)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    return reduce
