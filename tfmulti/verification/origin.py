"""Finds the first layer whose outputs on replica batches differ from those on one device.

The step runs eagerly once more each way, and the inputs and outputs of each layer are compared row
by row. A layer whose inputs are equal and whose outputs differ is the origin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.runtime.scoped import with_attributes
from tfmulti.sharding import replica_slice
from tfmulti.step.rows import count_rows
from tfmulti.verification.case import Case
from tfmulti.verification.differences import CLOSE, compare
from tfmulti.verification.python_values import Numbers
from tfmulti.verification.runs import Distributed, Reference
from tfmulti.verification.state import State


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a difference begins.

    Attributes:
        layer: The layer; None if the outputs of every layer are equal.
        adds: Whether the difference is in a loss that the layer adds, not in its outputs.
        sums: Whether that loss on one device is the sum of the replicas' losses.
        changes_number: Whether the call of the layer changes a Python number that the layer holds.
    """

    layer: keras.Layer | None = None
    adds: bool = False
    sums: bool = False
    changes_number: bool = False


@dataclasses.dataclass
class _Event:
    """A call of a layer, or a loss that it added; `gives` then holds only that loss."""

    layer: keras.Layer
    given: list[np.ndarray] | None
    gives: list[np.ndarray]
    changes_number: bool = False


def find_origin(case: Case, state: State, examples: list, close: float) -> Origin | None:
    """Returns where a difference begins, or None if that cannot be determined.

    Args:
        case: The verified step.
        state: Its variables, with the values before the first step; they are changed.
        examples: The rows of each step, up to the first one that differs.
        close: The fraction of the largest number that counts as rounding.
    """
    strategy = case.strategy
    # With several workers an error on one would make the others wait.
    if topology.num_workers(strategy) > 1 or case.padded or case.rows.are_unequal:
        return None
    begin, before = state.read(), tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        whole, *_ = _events(case, Reference(case, examples[0]), examples)
        state.write(begin)
        distributed = _events(case, Distributed(case, examples[0]), examples)
    except Exception:
        # A layer that cannot run eagerly proves nothing.
        return None
    finally:
        tf.config.run_functions_eagerly(before)
    return _first(whole, distributed, int(count_rows(examples[-1][0])), close)


@contextlib.contextmanager
def watched_layers(layers, on_call: Callable, on_loss: Callable = lambda layer, loss: None):
    """Intercepts the calls and the added losses of layers within the context.

    Args:
        layers: The layers.
        on_call: Function of a layer, its original `call`, its positional and its keyword
            arguments. It returns the output of the layer.
        on_loss: Function of a layer and a loss that it adds.
    """

    def watch_call(layer, call):
        @functools.wraps(call)
        def watched(*args, **kwargs):
            return on_call(layer, call, args, kwargs)

        return watched

    def watch_loss(layer, add_loss):
        def watched(loss):
            on_loss(layer, loss)
            return add_loss(loss)

        return watched

    layers = list({id(layer): layer for layer in layers}.values())
    with contextlib.ExitStack() as stack:
        for layer in layers:
            call, add_loss = watch_call(layer, layer.call), watch_loss(layer, layer.add_loss)
            stack.enter_context(with_attributes(layer, call=call, add_loss=add_loss))
        yield


def _events(case, run, examples) -> list[list[_Event]]:
    """Runs steps, and returns the events of the last one for each replica."""
    found: dict[int, list[_Event]] = {}
    # Each replica runs in its own thread.
    mine = threading.local()

    def note(*event):
        if tf.distribute.get_replica_context() is not None:
            if not hasattr(mine, "events"):
                mine.events = found[len(found)] = []
            mine.events.append(_Event(*event))

    def on_call(layer, call, args, kwargs):
        given, numbers = _arrays((args, kwargs)), Numbers(layer)
        outputs = call(*args, **kwargs)
        note(layer, given, _arrays(outputs), bool(numbers.changed()))
        return outputs

    layers = [case.model, *keras_compat.all_layers(case.model)]
    with watched_layers(layers, on_call, lambda layer, loss: note(layer, None, _arrays(loss))):
        for parts in examples:
            found.clear()
            mine = threading.local()
            run(parts)
    return [found[replica] for replica in sorted(found)]


def _first(whole, distributed, num_rows, close) -> Origin | None:
    number = len(distributed)
    parts = [replica_slice(num_rows, number, replica) for replica in range(number)]
    for index, event in enumerate(whole):
        here = [each[index] for each in distributed if index < len(each)]
        if len(here) < number or any(each.layer is not event.layer for each in here):
            return None
        if event.given is None:
            if not all(x.shape == event.gives[0].shape for e in here for x in e.gives):
                return Origin(event.layer, adds=True, sums=True)
            weights = [(stop - start) / num_rows for start, stop in parts]
            pairs = list(zip(weights, (each.gives[0] for each in here), parts))
            mean = sum(weight * x for weight, x, (start, stop) in pairs if stop > start)
            if _unlike(mean, event.gives[0], close):
                added = sum(x for _, x, (start, stop) in pairs if stop > start)
                return Origin(event.layer, True, not _unlike(added, event.gives[0], close))
            continue
        rows = [(e, part) for e, part in zip(here, parts) if part[1] > part[0]]
        if any(_differ(e.gives, event.gives, part, num_rows, close) for e, part in rows):
            if not any(_differ(e.given, event.given, part, num_rows, close) for e, part in rows):
                return Origin(event.layer, changes_number=event.changes_number)
    return Origin()


def _differ(some, whole, part, num_rows, close) -> bool:
    return len(some) == len(whole) and any(
        _is_other(a, b, part, num_rows, close) for a, b in zip(some, whole)
    )


def _is_other(some, whole, part, num_rows, close) -> bool:
    """Whether rows of a replica batch differ from the whole batch's, for each way to fold rows."""
    if not whole.ndim or not whole.shape[0] or whole.shape[0] % num_rows:
        return _unlike(some, whole, close)
    start, stop = part
    inner = whole.shape[1:]
    by_row = whole.reshape(num_rows, -1, *inner)[start:stop].reshape(-1, *inner)
    by_view = whole.reshape(-1, num_rows, *inner)[:, start:stop].reshape(-1, *inner)
    return _unlike(some, by_row, close) and _unlike(some, by_view, close)


def _unlike(value, reference, close) -> bool:
    return compare(value, reference, close=max(close, CLOSE["float32"])) is not None


def _arrays(structure) -> list[np.ndarray]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [value.numpy() for value in flat if isinstance(value, tf.Tensor)]
