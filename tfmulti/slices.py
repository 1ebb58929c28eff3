"""Sparse gradients: which rows of a table a step has read, and with what gradient."""

from __future__ import annotations

import tensorflow as tf

from tfmulti import shares

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
    count = grad.indices.shape.num_elements()
    if count is None or not _is_without_data(grad.indices):
        return False
    share = shares.current_share()
    rows = None if share is None else tf.get_static_value(share.num_rows)
    # Where batches have a fixed size, positions may have been repeated for each of their rows.
    return rows is None or count % rows != 0


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
