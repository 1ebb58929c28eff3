"""Sparse gradients: which rows of a table a step has read, and with what gradient."""

from __future__ import annotations

import tensorflow as tf

_SHAPES = ("Rank", "Shape", "ShapeN", "Size")


def same_on_all(grad) -> bool:
    """Whether a sparse gradient is of rows that every replica reads, whatever its batch.

    So it is with an `Embedding` of positions, which is given `arange(length)`. Values of such
    gradients must be added; one behind the other, as those of tokens are, they would be rows that
    one device has once. Optimizers and clipping square each by itself.

    Looks at the graph: eagerly nothing is known, and False is returned.

    Args:
        grad: A gradient, as a tape gives it.
    """
    if not isinstance(grad, tf.IndexedSlices) or tf.executing_eagerly():
        return False
    # A gradient has them in one row, whatever shape they were given in.
    flat = grad.indices.op
    given = flat.inputs[0] if flat.type == "Reshape" else grad.indices
    # With a row for each of the batch, they are repeated as tokens are.
    for_all_rows = given.shape.rank == 1 or given.shape.rank is not None and given.shape[0] == 1
    return for_all_rows and _is_without_data(given)


def _is_without_data(tensor) -> bool:
    seen, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in seen or operation.type in _SHAPES:
            continue
        seen.add(operation.name)
        is_source = not operation.inputs and operation.type != "Const"
        if is_source or operation.op_def.is_stateful:
            return False
        waiting += [each.op for each in operation.inputs]
    return True
