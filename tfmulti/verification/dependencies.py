"""Follows through the graph of a step what depends on one replica's own rows, and who made it."""

from __future__ import annotations

import os
from pathlib import Path

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step.row_axis import OF_ALL_ROWS, OF_SHAPES, inputs_of

_PACKAGES = [Path(module.__file__).parent for module in (tf, keras)]
_TENSORFLOW, _KERAS = (f"{folder}{os.sep}" for folder in _PACKAGES)
# Keras's functions of tensors and of step counts are called by everybody's code.
_CALLED = ("ops", "backend", os.path.join("optimizers", "schedules"))
_KERAS_FUNCTIONS = tuple(f"{_KERAS}src{os.sep}{name}{os.sep}" for name in _CALLED)
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def dependencies(graph, rows_of_replicas: list[list[tf.Tensor]]) -> dict:
    """Returns for each operation of a graph the replicas on whose rows its outputs depend.

    What is made from the rows of all of them is the same on all; together with the rows of one it
    depends on that one: a loss of new weights, which all rows have changed. A replica's part of a
    sum over replicas, such as the state of a metric, was made from its rows in earlier steps.

    Args:
        graph: The graph of the step on the local replicas.
        rows_of_replicas: For each local replica, the tensors of its rows.
    """
    everything = frozenset(range(max(len(rows_of_replicas), 2)))
    rows = {
        tensor.op: frozenset([replica])
        for replica, tensors in enumerate(rows_of_replicas)
        for tensor in tensors
    }
    depends: dict = {}
    # What variables hold so far, by their handles.
    held = _parts_of_sums(graph)
    # Operations come after those that they read.
    for each in graph.get_operations():
        known = [depends.get(source(tensor), frozenset()) for tensor in inputs_of(each)]
        if each.type == "ReadVariableOp":
            known.append(held.get(each.inputs[0].ref(), frozenset()))
        elif each.type.startswith("Assign") and each.inputs[0].dtype == tf.resource:
            handle = each.inputs[0].ref()
            before = held.get(handle, ()) if each.type != "AssignVariableOp" else ()
            held[handle] = _together(everything, *known, before)
        if each in rows:
            depends[each] = rows[each]
        elif each.type in OF_SHAPES:
            depends[each] = frozenset()
        elif is_reduction(each):
            depends[each] = everything
        else:
            depends[each] = _together(everything, *known)
    return depends


def _parts_of_sums(graph) -> dict:
    """Returns for the handles of variables of which each replica has a part, that replica."""
    parts = {}
    for outside, inside in graph.captures:
        variable = keras_compat.container_of(outside)
        if variable is not None and is_added(variable):
            for replica, part in enumerate(variable.values):
                if part.handle is outside:
                    parts[inside.ref()] = frozenset([replica])
    return parts


def is_added(variable) -> bool:
    """Whether each replica has a part of a variable, whose value is their sum.

    Args:
        variable: A variable of TensorFlow.
    """
    return (
        variable.aggregation == tf.VariableAggregation.SUM
        and variable.synchronization == tf.VariableSynchronization.ON_READ
    )


def source(tensor):
    """Returns the operation that made a tensor: custom gradients pass several on at once."""
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op


def _together(everything, *replicas) -> frozenset:
    some = frozenset().union(*(each for each in replicas if each != everything))
    return some or frozenset().union(*replicas)


def is_reduction(operation) -> bool:
    """Whether the outputs of an operation depend on what other replicas have in theirs.

    Args:
        operation: The operation.
    """
    if operation.type not in ("If", "StatelessIf"):
        return _reduces(operation)
    # TensorFlow gathers sparse gradients of workers within a branch.
    return any(map(_reduces, keras_compat.operations_inside(operation)))


def _reduces(operation) -> bool:
    if calls_python(operation):
        # Reductions over MPI, not those of the user's own functions.
        frame = _frame_of(operation)
        return frame is not None and frame.filename.startswith(_OURS)
    kinds = ("Collective", "Nccl")
    return any(name in operation.type for name in kinds) or OF_ALL_ROWS in operation.name


def calls_python(operation) -> bool:
    """Whether an operation calls a Python function in each run.

    Args:
        operation: The operation.
    """
    return "PyFunc" in operation.type


def place_of(operation) -> str:
    """Returns the file and line that made an operation; "" if they are Keras's or ours.

    Args:
        operation: The operation.
    """
    frame = _frame_of(operation)
    if frame is None or frame.filename.startswith((_KERAS, _OURS)):
        return ""
    path = frame.filename
    path = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return f"{path}:{frame.lineno}"


def _frame_of(operation):
    """Returns the last frame of the code that made an operation, by TensorFlow or `keras.ops`."""
    for frame in reversed(operation.traceback):
        if not frame.filename.startswith((_TENSORFLOW, *_KERAS_FUNCTIONS)):
            return frame
    return None
