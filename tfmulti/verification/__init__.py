"""Verifies the user's step before its first run.

A few rows go through the step twice: once whole on every replica, with nothing reduced, which is
what one device computes; and once split into replica batches, as in training. A difference raises
an error that names it. All state is restored afterwards.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, topology
from tfmulti.verification import attributes, quiet, telling
from tfmulti.verification import rows as rows_lib
from tfmulti.verification.looking import Workers, find_out, same_random_numbers
from tfmulti.verification.own import is_stock
from tfmulti.verification.runs import Case, Distributed


class Feed(NamedTuple):
    """Describes the data of a step.

    Attributes:
        look: Function that returns a batch, of all local replicas.
        static: Whether all batches have the same number of rows.
        counted: Whether the data pipeline provides the number of rows of a step.
        padded: Whether it pads replica batches with rows of weight 0.
    """

    look: Callable
    static: bool = False
    counted: bool = False
    padded: bool = False


def verify_once(
    model: keras.Model, kind: str, feed: Feed, workers: Workers, *, early: bool = False
) -> None:
    """Verifies a step of a model, once for each `compile` and each form of data.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        feed: The description of its data.
        workers: Collective functions of the workers.
        early: Whether the step will get other data later. If it cannot run on the data at hand,
            it is verified with the later data.

    Raises:
        ValueError: If the result on several replicas differs from that of one device.
    """
    strategy = model.distribute_strategy
    if not _is_wanted(strategy, model, kind, feed):
        return
    batch = rows_lib.gather_local(strategy, feed.look())
    if not rows_lib.can_be_cut(batch):
        _warn(kind, "a part of the batch has no rows")
        return
    rows = rows_lib.Rows(batch)
    case = Case(model, kind, rows, feed.static, feed.counted, feed.padded)
    if not _is_first_time(case):
        return
    rows.parts = rows.spread(case.most_rows(), padded=feed.padded)
    if topology.num_workers(strategy) > 1:
        rows.parts = rows_lib.of_the_chief(rows.parts, strategy, workers.broadcast)
    begin = time.perf_counter()
    with attributes.restored(model), quiet.quiet_tensorflow(), quiet.announced(kind):
        error, reason = find_out(case, workers)
    seconds = time.perf_counter() - begin
    strategy.seconds_verified += seconds
    logging.info("Verified %s_step in %.2f s.", kind, seconds)
    if workers.compare(strategy, int(bool(error)))[1]:
        # Another attempt shall verify, and raise, again.
        model.tfmulti_verified[1].discard(_key(case))
        raise error or ValueError(telling.elsewhere(kind))
    if reason and early:
        model.tfmulti_verified[1].discard(_key(case))
    elif reason:
        _warn(kind, reason)


def build_by_step(model: keras.Model, kind: str, batch) -> bool:
    """Builds a model by tracing its step, in cases that Keras's own build could miss.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        batch: A batch, as the replicas receive it.

    Returns:
        Whether it built the model.
    """
    batch = rows_lib.gather_local(model.distribute_strategy, batch)
    dense = all(isinstance(p, tf.Tensor) for p in tf.nest.flatten(batch) if p is not None)
    own = keras_compat.has_own_step(model, kind)
    if not rows_lib.can_be_cut(batch) or (dense and not own):
        return False
    case = Case(model, kind, rows_lib.Rows(batch))
    try:
        with attributes.restored(model), same_random_numbers():
            Distributed(case, case.rows.first(case.most_rows()), only_build=True)
    except Exception:
        # A step that runs eagerly need not be traceable.
        if not case.eager:
            raise
        return False
    return True


def _is_wanted(strategy, model, kind, feed) -> bool:
    supported = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    several = strategy.num_replicas_in_sync > 1 and isinstance(strategy, supported)
    if not several or strategy.verify == "never":
        return False
    return strategy.verify == "always" or feed.padded or not is_stock(model, kind)


def _is_first_time(case) -> bool:
    compiled = keras_compat.compiled_state(case.model)
    done = getattr(case.model, "tfmulti_verified", None)
    if done is None or done[0] is not compiled:
        done = (compiled, set())
        object.__setattr__(case.model, "tfmulti_verified", done)
    if _key(case) in done[1]:
        return False
    done[1].add(_key(case))
    return True


def _key(case):
    return case.kind, case.rows.form(), case.padded


def _warn(kind, reason):
    warnings.warn(f"`{kind}_step` was not verified: {reason}.", stacklevel=3)
