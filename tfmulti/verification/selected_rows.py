"""Finds in the graph of a step means over rows that were selected, as by `tf.boolean_mask`."""

from __future__ import annotations

import tensorflow as tf

from tfmulti.step.row_axis import OF_SHAPES, has_rows_of
from tfmulti.verification.dependencies import place_of

_SELECTING = {"Where", "DynamicPartition"}
# Their outputs have a value for each row again, or for each group of rows.
_PUTTING_BACK = ("DynamicStitch", "ParallelDynamicStitch", "Scatter", "TensorScatter", "Segment")
_PUTTING_BACK += ("SparseSegment", "SparseToDense", "UnsortedSegment")


def means_of_selected(operations, rows: list[tf.Tensor]) -> list[tf.Operation]:
    """Returns the user's means over rows of which an unknown number was selected.

    The mean of the replicas' means is that of one device only if all select equally many rows.

    Args:
        operations: The operations of a graph, in their order.
        rows: The tensors of the rows that replicas are given.
    """
    selected: set = set()
    means = []
    for each in operations:
        if each.type == "Mean" and _is_over_selected(each, selected):
            means.append(each)
        elif each.type in _SELECTING or _keeps_selection(each, selected):
            selected.add(each)
    # It copies the graph, so few tensors are asked for.
    return [each for each in means if place_of(each) and not has_rows_of(each.inputs[0], rows)]


def _is_over_selected(mean, selected) -> bool:
    values, axes = mean.inputs
    axes = tf.get_static_value(axes)
    if values.op not in selected or axes is None or not values.shape.rank:
        return False
    return 0 in axes.reshape(-1) % values.shape.rank


def _keeps_selection(operation, selected) -> bool:
    """Whether the first axis of an operation's outputs is that of selected rows."""
    inputs, kind = operation.inputs, operation.type
    if kind in OF_SHAPES or kind.startswith(_PUTTING_BACK) or not _has_open_axis(operation):
        return False
    if kind == "GatherV2":
        inputs = [inputs[1]]
    elif kind == "ConcatV2" and tf.get_static_value(inputs[-1]) == 0:
        # All parts together can be all rows.
        return False
    return any(tensor.op in selected for tensor in inputs)


def _has_open_axis(operation) -> bool:
    return any(each.shape.rank and each.shape[0] is None for each in operation.outputs)
