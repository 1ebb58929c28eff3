"""Ends a call of `fit` in which this worker would wait for one whose call has failed.

An error that a program does not catch ends its process, and the others learn of that. One that it
catches, on one worker alone, leaves the others waiting in the next reduction.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.runtime import processes

GRACE_S = 20.0
"""How long a worker may take to end a call by itself after another worker's has failed."""
_LOOK_MS, _PAUSE_S = 2_000, 1.0
_LENGTH = 400


class _Call(NamedTuple):
    """A call that all workers make: its key for an error, its name, and whether it has ended."""

    key: str
    name: str
    ended: threading.Event


_numbers = itertools.count()
_under_way: list[_Call] = []
_failure: list[str] = []


@contextlib.contextmanager
def shared_call(strategy: tf.distribute.Strategy, name: str) -> Iterator[None]:
    """Tells the other workers of an error in a call that all make, and ends it if theirs fails.

    Args:
        strategy: The strategy of this worker.
        name: The name of the call, such as `"fit"`. One within another is a part of it.

    Raises:
        RuntimeError: If another worker's call has failed, and this one would wait for it.
    """
    is_cluster = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not is_cluster or topology.num_workers(strategy) == 1:
        yield
        return
    if _under_way:
        _under_way.append(_under_way[0])
        try:
            yield
        finally:
            _under_way.pop()
        return
    # Workers make the same calls in the same order.
    call = _Call(f"tfmulti/failed_call/{next(_numbers)}", name, threading.Event())
    _under_way.append(call)
    _start_watching()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if _failure and isinstance(error, Exception):
            raise RuntimeError(_failure[0]) from error
        said = f": {error}" if str(error) else ""
        text = f"worker {topology.worker_index(strategy)}: {type(error).__name__}{said}"
        with contextlib.suppress(tf.errors.OpError):
            # Refused if another worker has published an error before.
            keras_compat.publish_failure(call.key, text[:_LENGTH])
        raise
    except SystemExit as error:
        # At Python's own exit MPI would wait for the others, which wait for this worker.
        if "mpi4py.MPI" in sys.modules:
            by_itself = error.code if isinstance(error.code, int) else int(error.code is not None)
            processes.end_process_at_exit(by_itself)
        raise
    finally:
        call.ended.set()
        _under_way.clear()


def is_under_way() -> bool:
    """Whether a call is under way that all workers make."""
    return bool(_under_way)


def is_nested() -> bool:
    """Whether a call is made within another, as by a callback."""
    return len(_under_way) > 1


def raise_if_others_failed() -> None:
    """Raises RuntimeError if this call has failed on another worker, which does something else.

    Call it where that shows. As the two no longer do the same, all later calls fail here, too.
    """
    call = next(iter(_under_way), None)
    text = call and keras_compat.read_if_published(call.key, _LOOK_MS)
    if text:
        _give_up(call, text)
        raise RuntimeError(_failure[0])


def _give_up(call, text):
    _failure.append(
        f"All workers must run `{call.name}` together. Received: an error on only one of them, "
        f"{text}. Let that error end its program, so that all can be restarted."
    )
    keras_compat.abort_collectives(_failure[0])


@functools.cache
def _start_watching():
    threading.Thread(target=_watch, name="tfmulti-failed-calls", daemon=True).start()


def _watch():
    while not _failure:
        call = next(iter(_under_way), None)
        text = call and keras_compat.read_if_published(call.key, _LOOK_MS)
        if not text:
            time.sleep(_PAUSE_S)
        elif not call.ended.wait(GRACE_S):
            _give_up(call, text)
