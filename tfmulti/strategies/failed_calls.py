"""Ends a call of `fit` in which this worker would wait for one whose call has failed.

An error that a program does not catch ends its process, and the others learn of that. One that it
catches, on one worker alone, leaves the others waiting in the next reduction.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import tensorflow as tf

from tfmulti import keras_compat, topology

GRACE_S = 20.0
"""How long a worker may take to end a call by itself after another worker's has failed."""
_LOOK_MS, _PAUSE_S = 2_000, 1.0
_LENGTH = 400
_numbers = itertools.count()
_failure: list[str] = []


@contextlib.contextmanager
def shared_call(strategy: tf.distribute.Strategy, name: str) -> Iterator[None]:
    """Tells the other workers of an error in a call that all make, and ends it if theirs fails.

    Args:
        strategy: The strategy of this worker.
        name: The name of the call, such as `"fit"`.

    Raises:
        RuntimeError: If another worker's call has failed, and this one would wait for it.
    """
    is_cluster = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not is_cluster or topology.num_workers(strategy) == 1:
        yield
        return
    # Workers make the same calls in the same order.
    key, ended = f"tfmulti/failed_call/{next(_numbers)}", threading.Event()
    watch = threading.Thread(target=_watch, args=(key, name, ended), daemon=True)
    watch.name = "tfmulti-failed-calls"
    watch.start()
    try:
        yield
    except Exception as error:
        if _failure:
            raise RuntimeError(_failure[0]) from error
        text = f"worker {topology.worker_index(strategy)}: {type(error).__name__}: {error}"
        with contextlib.suppress(tf.errors.OpError):
            # Refused if another worker has published an error before.
            keras_compat.publish(key, text[:_LENGTH])
        raise
    finally:
        ended.set()


def raise_if_failed() -> None:
    """Raises RuntimeError if a call on another worker has failed, and left this one waiting."""
    if _failure:
        raise RuntimeError(_failure[0])


def _watch(key, name, ended):
    while not ended.is_set():
        text = keras_compat.read_if_published(key, _LOOK_MS)
        if text is None:
            ended.wait(_PAUSE_S)
        elif not ended.wait(GRACE_S):
            _failure.append(
                f"All workers must go through `{name}` together. Received: an error on one of them "
                f"alone, {text}. Let that error end its program, so that all can start again."
            )
            keras_compat.abort_collectives(_failure[0])
            return
