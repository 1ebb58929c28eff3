"""Follows the axis of rows through the graph of a step, by TensorFlow's own inference of shapes.

A copy of the graph, in which chosen tensors have a number of rows that nothing else has, shows
which tensors have rows too, and where rows are combined. The copy is never run.
"""

from __future__ import annotations

import tensorflow as tf

# A number of rows that no other tensor has; nothing of this size is computed.
_MARK = 100_003
OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}
"""Operations whose outputs depend on the shapes of their inputs alone."""
OF_ALL_ROWS = "tfmulti_of_all_rows"
"""Scope of operations whose inputs, computed on one worker, are of the rows of all replicas."""
AFTER = "tfmulti_after"
"""Name of additions of a zero that is there only to be computed first: the second input."""

_ALONG_LAST_AXIS = {"TopKV2", "Softmax", "LogSoftmax"}
# The index of the input that holds the axis.
_ALONG_GIVEN_AXIS = {"Cumsum": 1, "Cumprod": 1, "ReverseV2": 1, "Roll": 2}


def only_waits(operation) -> bool:
    """Whether an operation passes on its first input as it is, once it has the second.

    Args:
        operation: The operation.
    """
    return operation.name.rpartition("/")[2].startswith(AFTER)


def inputs_of(operation) -> list[tf.Tensor]:
    """Returns the inputs on whose values an operation's outputs depend.

    Args:
        operation: The operation.
    """
    return list(operation.inputs)[: 1 if only_waits(operation) else None]


def has_rows_of(tensor: tf.Tensor, marked: list[tf.Tensor]) -> bool:
    """Whether the first axis of a tensor is that of other tensors' rows.

    It is False where that is unknown.

    Args:
        tensor: A symbolic tensor with at least one axis.
        marked: Tensors of the same graph.
    """
    copy = _copy(tensor, marked)
    return copy is not None and bool(copy.shape.rank) and _is_mark(copy.shape[0])


def combines_rows(tensor: tf.Tensor, marked: list[tf.Tensor]) -> bool:
    """Whether a tensor is computed from a sum, a maximum, an order or the like of rows.

    It is False where that is unknown, as within a loop.

    Args:
        tensor: A symbolic tensor.
        marked: Tensors of the same graph.
    """
    copy = _copy(tensor, marked)
    if copy is None:
        return False
    operations = copy.graph.get_operations()
    return any(_reduces_rows(op) or _is_along_rows(op) for op in operations)


def _reduces_rows(operation) -> bool:
    """Whether an operation has fewer axes of rows than what it is given."""
    return (
        operation.type not in OF_SHAPES
        and all(_is_known(output) for output in operation.outputs)
        and _num_marked(operation.outputs) < _num_marked(operation.inputs)
    )


def _is_along_rows(operation) -> bool:
    """Whether an operation sorts, adds up, normalizes or moves values along an axis of rows."""
    if operation.type in _ALONG_LAST_AXIS:
        axes = [-1]
    elif operation.type in _ALONG_GIVEN_AXIS:
        given = tf.get_static_value(operation.inputs[_ALONG_GIVEN_AXIS[operation.type]])
        axes = [] if given is None else given.reshape(-1).tolist()
    else:
        return False
    shape = operation.inputs[0].shape
    return bool(shape.rank) and any(_is_mark(shape[axis]) for axis in axes)


def _is_known(tensor) -> bool:
    # A list of tensors, such as a loop's, is a scalar that can hold rows.
    return tensor.shape.is_fully_defined() and tensor.dtype not in (tf.variant, tf.resource)


def _num_marked(tensors) -> int:
    """Returns the largest number of axes of rows that any of the tensors has."""
    return max(
        (sum(map(_is_mark, tensor.shape)) for tensor in tensors if tensor.shape.rank), default=0
    )


def _is_mark(size) -> bool:
    # A multiple is rows that were flattened together with another axis.
    return bool(size) and size % _MARK == 0


def _copy(tensor, marked) -> tf.Tensor | None:
    """Returns a tensor in a copy of what computes it, in which some tensors have `_MARK` rows."""
    by_name = {each.name: each for each in marked if each.graph is tensor.graph}
    nodes, reached = _ancestors(tensor, by_name)
    if not reached:
        return None
    whole, part = tensor.graph.as_graph_def(), tf.compat.v1.GraphDef()
    part.versions.CopyFrom(whole.versions)
    part.library.CopyFrom(whole.library)
    for node in whole.node:
        if node.name in nodes:
            copy = part.node.add()
            copy.CopyFrom(node)
            # Colocations and control inputs name nodes that the copy leaves out.
            copy.attr.pop("_class", None)
            copy.input[:] = [name for name in node.input if not name.startswith("^")]
    try:
        with tf.Graph().as_default():
            known = {
                name: tf.compat.v1.placeholder(
                    by_name[name].dtype, [_MARK, *by_name[name].shape[1:]]
                )
                for name in reached
            }
            return tf.graph_util.import_graph_def(part, known, [tensor.name], name="")[0]
    except ValueError:
        # Other rows do not fit, so the tensor needs both; or the graph has more than 2 GiB.
        return None


def _ancestors(tensor, by_name) -> tuple[set, list]:
    """Returns the names of the nodes that compute a tensor after the marked ones, and of these."""
    nodes, reached, waiting = set(), {}, [tensor]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in by_name:
            reached[tensor.name] = True
        elif tensor.op.name not in nodes:
            nodes.add(tensor.op.name)
            waiting += tensor.op.inputs
    return nodes, list(reached)
