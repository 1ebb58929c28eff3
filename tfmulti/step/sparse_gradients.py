"""Sparse gradients: which rows of a table a step has read, and with what gradient.

An `Embedding` of positions, which is given `arange(length)`, reads the same rows on every replica,
whatever its batch. Values of such gradients must be added; one behind the other, as those of
tokens are, they would be rows that one device has once. Optimizers and clipping square each by
itself.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from absl import logging

_SHAPES = ("Rank", "Shape", "ShapeN", "Size")


def same_on_all(grad) -> bool:
    """Whether a sparse gradient is of rows that every replica reads, told by the graph.

    Args:
        grad: A gradient, as a tape gives it.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return False
    # A gradient has them in one row, whatever shape they were given in.
    flat = grad.indices.op
    return _are_positions(flat.inputs[0] if flat.type == "Reshape" else grad.indices)


def parts_of(grad) -> list:
    """Returns the parts of a gradient of one table that was read more than once.

    Tokens and positions can be of one table. A tape puts their rows one behind the other.

    Args:
        grad: A gradient, as a tape gives it.
    """
    if not isinstance(grad, tf.IndexedSlices) or tf.executing_eagerly():
        return [grad]
    indices, values = grad.indices.op, grad.values.op
    if not indices.type == values.type == "ConcatV2" or len(indices.inputs) != len(values.inputs):
        return [grad]
    pairs = list(zip(indices.inputs, values.inputs))[:-1]
    return [
        part
        for place, rows in pairs
        for part in parts_of(tf.IndexedSlices(rows, place, grad.dense_shape))
    ]


def join(parts):
    """Puts together what `parts_of` has taken apart."""
    if len(parts) == 1:
        return parts[0]
    values = tf.concat([part.values for part in parts], axis=0)
    indices = tf.concat([part.indices for part in parts], axis=0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def note_positions(model: keras.Model, x) -> None:
    """Finds a model's tables of positions, for steps that run eagerly, where no graph tells.

    A model that cannot be traced is left without the note.

    Args:
        model: A model that is built.
        x: Some rows of its input.
    """
    if hasattr(model, "tfmulti_positions"):
        return
    try:
        reads = _trace_reads(model, x)
    except Exception as error:
        logging.info("Tables of positions could not be found: %s", error)
        return
    of_tokens = {table for table, is_of_positions in reads if not is_of_positions}
    found = frozenset(table for table, _ in reads if table not in of_tokens)
    object.__setattr__(model, "tfmulti_positions", found)


def noted_same_on_all(grad, variable, model: keras.Model | None) -> bool:
    """Whether a sparse gradient is of rows that every replica reads, as `note_positions` found.

    Args:
        grad: A gradient of a step that runs eagerly.
        variable: What it is the gradient of.
        model: The model of the step.

    Raises:
        ValueError: Where nothing was found out.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return False
    found = getattr(model, "tfmulti_positions", None)
    if found is None:
        raise ValueError(
            "An `Embedding` on several replicas needs a step that can be traced, which tells "
            "positions from tokens. Received: a step that runs eagerly, a sparse gradient of "
            f"{getattr(variable, 'path', 'a table')}, and a model without a `call`, or with one "
            "that cannot be traced. Leave run_eagerly out, give the model a `call` of "
            'operations alone, or train on one replica: create_strategy("one_device").'
        )
    return id(variable) in found


def _trace_reads(model, x) -> list[tuple[int, bool]]:
    """Returns, for each read of rows, the id of the table and whether positions were read."""
    variables = model.trainable_variables
    others = [tf.convert_to_tensor(each) for each in model.non_trainable_variables]
    reads = []

    def call(tables, x):
        model.stateless_call(tables, others, x, training=True)
        ids = {table.op.name: id(variable) for table, variable in zip(tables, variables)}
        graph = tf.compat.v1.get_default_graph()
        for gather in [each for each in graph.get_operations() if each.type == "GatherV2"]:
            if gather.inputs[0].op.name in ids:
                table = ids[gather.inputs[0].op.name]
                reads.append((table, _are_positions(gather.inputs[1])))

    tables = [tf.TensorSpec(table.shape, table.dtype) for table in variables]
    rows = tf.nest.map_structure(_of_any_number, x)
    tf.function(call, autograph=False).get_concrete_function(tables, rows)
    return reads


def _of_any_number(part):
    if not isinstance(part, tf.Tensor | np.ndarray):
        return tf.type_spec_from_value(part)
    return tf.TensorSpec([None, *part.shape[1:]], part.dtype)


def _are_positions(indices) -> bool:
    found = _sources(indices)
    if found != {"shapes"}:
        return not found
    # With a row for each of the batch, they are repeated as tokens are.
    rank, shape = indices.shape.rank, indices.shape
    return rank == 1 or rank is not None and rank > 0 and shape[0] == 1


def _sources(tensor) -> set[str]:
    """Tells what a tensor is computed from, but for constants: "shapes" of data, or "data"."""
    seen, waiting, found = set(), [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in _SHAPES:
            found.add("shapes")
        elif operation.type == "Placeholder" and not _is_captured_value(operation):
            found.add("data")
        elif operation.op_def.is_stateful and operation.type != "ReadVariableOp":
            found.add("data")
        else:
            waiting += [each.op for each in operation.inputs]
    return found


def _is_captured_value(placeholder) -> bool:
    """Whether a function has a tensor from before it was traced: a table that a model has made."""
    return any(
        inner is placeholder.outputs[0] and hasattr(outer, "numpy")
        for outer, inner in getattr(placeholder.graph, "captures", ())
    )
