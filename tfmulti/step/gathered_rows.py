"""Finds whether the rows of a tensor are those of the whole batch, from `gather_batch`.

A sum over such rows is the same number on every replica, and must not be added over replicas. The
number of rows does not tell: two views of half of the rows are as many as all rows. So TensorFlow
infers the shape in a copy of the graph, in which only gathered tensors have a known number of rows.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti.step.rows import current_replica_batch

# A number of rows that no other tensor has; nothing of this size is computed.
_MARK = 100_003


def note(tensors) -> None:
    """Notes tensors that `gather_batch` returns in the step that is traced."""
    replica_batch = current_replica_batch()
    if replica_batch is not None and not tf.executing_eagerly():
        replica_batch.gathered.extend(tensors)


def has_gathered_rows(tensor) -> bool:
    """Whether the first axis of a tensor is that of gathered rows.

    It is False where that is unknown, as in an eager step.

    Args:
        tensor: A tensor of the step that is traced.
    """
    replica_batch = current_replica_batch()
    if replica_batch is None or not replica_batch.gathered or not tf.is_symbolic_tensor(tensor):
        return False
    if tensor.shape.rank == 0:
        return False
    gathered = {each.name: each for each in replica_batch.gathered if each.graph is tensor.graph}
    if tensor.name in gathered:
        return True
    nodes, reached = _ancestors(tensor, gathered)
    try:
        rows = _infer_rows(tensor, nodes, [gathered[name] for name in reached]) if reached else None
    except ValueError:
        # Other rows do not fit, so the tensor needs both; or the graph has more than 2 GiB.
        return False
    return bool(rows) and rows % _MARK == 0


def _ancestors(tensor, gathered) -> tuple[set, list]:
    """Returns the names of the nodes from which a tensor is computed after the gathered ones."""
    nodes, reached, left = set(), {}, [tensor]
    while left:
        each = left.pop()
        if each.name in gathered:
            reached[each.name] = True
        elif each.op.name not in nodes:
            nodes.add(each.op.name)
            left += each.op.inputs
    return nodes, list(reached)


def _infer_rows(tensor, nodes, gathered) -> int | None:
    """Returns the number of rows of a tensor if gathered tensors have `_MARK` rows."""
    whole, part = tensor.graph.as_graph_def(), tf.compat.v1.GraphDef()
    part.versions.CopyFrom(whole.versions)
    part.library.CopyFrom(whole.library)
    for node in whole.node:
        if node.name in nodes:
            copy = part.node.add()
            copy.CopyFrom(node)
            copy.attr.pop("_class", None)
            copy.input[:] = [name for name in node.input if not name.startswith("^")]
    with tf.Graph().as_default():
        known = {
            each.name: tf.compat.v1.placeholder(each.dtype, [_MARK, *each.shape[1:]])
            for each in gathered
        }
        [copied] = tf.graph_util.import_graph_def(part, known, [tensor.name], name="")
    return copied.shape[0] if copied.shape.rank else None
