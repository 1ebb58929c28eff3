"""Assignments of weights that no worker holds whole, in a step.

All workers take part when such a weight is read. In a branch or a loop, which workers may run more
or less often than each other, they read it before that, and its value there stays what it was.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step.rows import in_branch, in_graph_of_step


def value_to_assign(value):
    """Returns a value that is to be assigned, which all workers read if it is a variable."""
    return keras_compat.values_of([value])[0] if isinstance(value, keras.Variable) else value


def note_assigned(variable) -> None:
    """Notes that a step assigns a variable, before it does.

    Raises:
        RuntimeError: In a loop, where the next round would read the value from before the loop.
    """
    graphs = _graphs_within_step()
    if any(map(keras_compat.is_loop, graphs)):
        raise RuntimeError(
            "A sharded or split weight cannot be assigned in a loop, because all workers read it "
            f"once, before the loop. Received: {variable.path}, assigned in `tf.while_loop`, "
            "`tf.map_fn` or the like. Compute the value in the loop and assign it after the loop, "
            "or use shard='state', which keeps weights whole."
        )
    if graphs:
        variable.assigned_in = weakref.WeakSet([*(variable.assigned_in or ()), *graphs])


def refuse_stale_read(variable) -> None:
    """Raises RuntimeError if the branch that is traced has assigned a variable, and reads it."""
    if variable.assigned_in and any(each in variable.assigned_in for each in _graphs_within_step()):
        raise RuntimeError(
            "A sharded or split weight cannot be read in the branch that has assigned it, because "
            f"all workers read it before the branch. Received: {variable.path}. Use the value that "
            "was assigned, assign it after the branch, or use shard='state', which keeps weights "
            "whole."
        )


def _graphs_within_step() -> list[tf.Graph]:
    """Returns the graph that is traced and those around it, up to that of the step, without it."""
    graphs, graph = [], tf.compat.v1.get_default_graph() if in_branch() else None
    with in_graph_of_step():
        of_step = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not of_step:
        graphs.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return graphs


@contextlib.contextmanager
def explaining_values(
    where: str, reason: str, applies: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raises RuntimeError where code takes a weight's `value`, a tensor, for a variable.

    Args:
        where: The name of the layer, or what a step is called.
        reason: Why the value is a tensor there.
        applies: Whether it may be one; called if code failed so.
    """
    try:
        yield
    except AttributeError as error:
        of_tensor = isinstance(error.obj, tf.Tensor) and hasattr(tf.Variable, error.name or "")
        if not (of_tensor and applies()):
            raise
        raise RuntimeError(
            f"{reason} `weight.value` is a tensor. Received: {where}, which uses `.{error.name}` "
            "of one. Use `weight.assign(...)`, with `keras.ops.scatter_update` for some elements."
        ) from error
