"""Finds workers that call MPI in different orders: they would wait for each other for ever."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Callable

import tensorflow as tf

from tfmulti import keras_compat

# Workers that differ have come this far past the first call in which they do, at most.
_KEPT = 64
_LOOK_MS = 100


class CallOrder:
    """The latest MPI calls of this worker that all workers must make alike.

    Args:
        rank: The rank of this worker.
        exchange: Function that takes a text for the other workers, and returns the latest text of
            each of them that has one, by its rank.
    """

    def __init__(self, rank: int, exchange: Callable[[str], dict[int, str]] = lambda text: {}):
        self._rank, self._exchange = rank, exchange
        self._numbers = itertools.count(1)
        self._latest: collections.deque = collections.deque(maxlen=_KEPT)

    def note(self, call: str, shape: tuple[int, ...]) -> None:
        """Notes a call before it is made.

        Args:
            call: What it does.
            shape: The shape of what it sends or receives, the same on all workers.
        """
        self._latest.append((next(self._numbers), f"{call} of shape {tuple(shape)}"))

    def compare(self) -> None:
        """Compares the latest calls with those of all others that have waited as long.

        Raises:
            RuntimeError: If one of them differs.
        """
        own = dict(self._latest)
        for rank, text in self._exchange(json.dumps(list(own.items()))).items():
            for number, call in json.loads(text):
                if own.get(number, call) != call:
                    raise RuntimeError(
                        "All workers must add, gather and broadcast in the same order, or each "
                        f"waits for the others for ever. Received: on worker {self._rank} "
                        f"{own[number]}, on worker {rank} {call}, both as call {number} of MPI. "
                        "Look for gradients or layers whose order depends on the worker."
                    )


def through_service(rank: int, size: int) -> Callable[[str], dict[int, str]]:
    """Returns the `exchange` of a `CallOrder` that uses TensorFlow's coordination service.

    Args:
        rank: The rank of this worker.
        size: The number of workers.
    """
    key = "tfmulti/mpi_calls/{}".format

    def exchange(text: str) -> dict[int, str]:
        with contextlib.suppress(tf.errors.OpError):
            keras_compat.republish(key(rank), text)
        others = (other for other in range(size) if other != rank)
        found = {other: keras_compat.read_if_published(key(other), _LOOK_MS) for other in others}
        return {other: text for other, text in found.items() if text is not None}

    return exchange
