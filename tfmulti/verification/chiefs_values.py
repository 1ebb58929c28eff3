"""Compares numbers of this worker with the chief's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfmulti import topology

_MOST_ENTRIES = 1024


def some_of(value: np.ndarray) -> np.ndarray:
    """Returns entries from all over an array, at most about a thousand.

    >>> some_of(np.arange(4096).reshape(64, 64))[:3]
    array([0, 4, 8])
    """
    flat = np.asarray(value).reshape(-1)
    return flat[:: max(1, flat.size // _MOST_ENTRIES)][:_MOST_ENTRIES]


def receive_from_chief(
    strategy: tf.distribute.Strategy, values: Sequence[np.ndarray], broadcast: Callable
) -> list[np.ndarray] | None:
    """Returns the chief's arrays, or None if they have other sizes; every worker must call it.

    Args:
        strategy: The strategy of this worker.
        values: This worker's own arrays.
        broadcast: Function of a strategy and bytes, which are None except on the chief; returns
            the chief's bytes.
    """
    own = b"".join(value.tobytes() for value in values)
    data = broadcast(strategy, own if topology.is_chief(strategy) else None)
    if len(data) != len(own):
        return None
    found, start = [], 0
    for value in values:
        part = data[start : start + value.nbytes]
        found.append(np.frombuffer(part, value.dtype).reshape(value.shape))
        start += value.nbytes
    return found
