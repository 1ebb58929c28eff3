"""Finds workers that call MPI's collectives in different orders, which can wait for ever."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
from collections.abc import Callable

import tensorflow as tf

from tfmulti import keras_compat

# MPI buffers short messages: a worker can be some calls past the first one that differs.
_KEPT = 64
_LOOK_MS = 100


class CollectiveOrder:
    """The latest collectives that this worker has called, which all workers must call alike.

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
            call: What it does, in MPI's words.
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
                        "All workers must call MPI's collectives in the same order, or each waits "
                        f"for the others for ever. Received: as collective {number}, "
                        f"{own[number]} on worker {self._rank}, {call} on worker {rank}. "
                        "Look for gradients or layers whose order depends on the worker."
                    )


def through_service(rank: int, size: int) -> Callable[[str], dict[int, str]]:
    """Returns the `exchange` of a `CollectiveOrder` that uses TensorFlow's coordination service.

    Args:
        rank: The rank of this worker.
        size: The number of workers.
    """
    key = "tfmulti/collectives/{}".format

    def exchange(text: str) -> dict[int, str]:
        with contextlib.suppress(tf.errors.OpError):
            keras_compat.republish(key(rank), text)
        others = (other for other in range(size) if other != rank)
        found = {other: keras_compat.read_if_published(key(other), _LOOK_MS) for other in others}
        return {other: text for other, text in found.items() if text is not None}

    return exchange
