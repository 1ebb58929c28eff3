"""Sparse gradients: the rows of an embedding table that a step read, and their gradients.

Optimizers and clipping square the values, so it matters how often a row occurs in a gradient.
There are three kinds of reads:

- tokens: on one device too, a row occurs as often as the token. The replicas' gradients are
  concatenated.
- positions: an `Embedding` of `arange(length)` reads the same rows on every replica. The values
  are added. Where replicas pad their rows to different lengths, the shorter ones get zeros.
- unique rows, as with sparse inputs (`tf.nn.embedding_lookup_sparse`, `tf.unique`): the replicas'
  gradients are concatenated, and those of equal rows added.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from absl import logging

from tfmulti import keras_compat, marks, topology
from tfmulti.step.row_axis import OF_SHAPES, inputs_of, only_waits
from tfmulti.step.sums import add_by_dtype

TOKENS, POSITIONS, UNIQUE = "tokens", "positions", "unique"
_COPIES = ("Cast", "Identity", "Reshape", "SelectV2", "StopGradient")


def kind_of(grad) -> str:
    """Returns, from the graph, how the rows of a sparse gradient's table were read.

    Args:
        grad: A gradient that a tape returned.

    Returns:
        `TOKENS`, `POSITIONS` or `UNIQUE`; `TOKENS` for a dense gradient.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return TOKENS
    # A tape flattens the indices, whatever their shape was.
    flat = grad.indices.op
    return _kind(flat.inputs[0] if flat.type == "Reshape" else grad.indices)


def add_equal_rows(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds the values of each row that occurs several times."""
    rows, places = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, grad.dense_shape)


def with_equal_lengths(grads, kinds) -> list:
    """Gives the gradients of positions the number of rows of the replica that has most.

    Only where the graph does not know the number: then it is a collective.

    Args:
        grads: Gradients that a tape returned.
        kinds: For each, how the rows of its table were read.
    """
    is_eager, made = tf.executing_eagerly(), list(grads)
    places = [
        place
        for place, (grad, kind) in enumerate(zip(grads, kinds))
        if kind == POSITIONS and (is_eager or grad.indices.shape[0] is None)
    ]
    if not places:
        return made
    context = tf.distribute.get_replica_context()
    index = topology.replica_batch_index(context)
    counts = tf.stack([tf.size(grads[place].indices) for place in places])
    # The collective adds, so each replica writes to its own column; as float32, for GPUs.
    one_hot = tf.one_hot(index, context.num_replicas_in_sync)
    counts = context.all_reduce("SUM", tf.cast(counts, tf.float32)[:, None] * one_hot)
    longest = tf.unstack(tf.argmax(counts, axis=1, output_type=tf.int32))
    largest = tf.unstack(tf.cast(tf.reduce_max(counts, axis=1), tf.int32))
    missing = [most - tf.size(grads[place].indices) for place, most in zip(places, largest)]
    padded = [tf.pad(grads[place].indices, [[0, more]]) for place, more in zip(places, missing)]
    sent = [tf.where(index == one, own, 0) for own, one in zip(padded, longest)]
    for place, more, positions in zip(places, missing, add_by_dtype(sent)):
        made[place] = _padded(grads[place], more, positions)
    return made


def _padded(grad, missing, positions):
    """Returns a gradient at all `positions`, which is 0 at those that are missing in it."""
    check = tf.debugging.assert_equal(
        grad.indices,
        positions[: tf.size(grad.indices)],
        "Where replicas have sequences of different lengths, the positions that a table of "
        "positions is read at must begin alike. Received: others, as of a range that counts "
        "down. Count up from a fixed number, or pad all sequences of a batch to one length.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        paddings = tf.pad([[0, missing]], [[0, tf.rank(grad.values) - 1], [0, 0]])
        values = tf.pad(grad.values, paddings)
    values = tf.ensure_shape(values, [None, *grad.values.shape[1:]])
    return tf.IndexedSlices(values, positions, grad.dense_shape)


def parts_of(grad) -> list:
    """Splits the gradient of a table that was read more than once into one part for each read.

    Tokens and positions can use the same table. A tape concatenates their rows.

    Args:
        grad: A gradient that a tape returned.
    """
    if not isinstance(grad, tf.IndexedSlices) or tf.executing_eagerly():
        return [grad]
    indices, values = grad.indices.op, grad.values.op
    if not indices.type == values.type == "ConcatV2" or len(indices.inputs) != len(values.inputs):
        return [grad]
    # The last input of a concatenation is its axis.
    pairs = list(zip(indices.inputs, values.inputs))[:-1]
    return [
        part
        for place, rows in pairs
        for part in parts_of(tf.IndexedSlices(rows, place, grad.dense_shape))
    ]


def join(parts):
    """Concatenates the parts that `parts_of` returned."""
    if len(parts) == 1:
        return parts[0]
    values = tf.concat([part.values for part in parts], axis=0)
    indices = tf.concat([part.indices for part in parts], axis=0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def note_positions(model: keras.Model, peek) -> None:
    """Finds a model's position tables, for steps that run eagerly and have no graph.

    If the model cannot be traced, nothing is recorded.

    Args:
        model: A model that is built.
        peek: Function that returns a batch, as the replicas receive it.
    """
    if marks.TABLE_READS.get(model) is not None:
        return
    x = keras.utils.unpack_x_y_sample_weight(peek())[0]
    x = keras_compat.gather_local(model.distribute_strategy, x)
    try:
        reads = _trace_reads(model, x)
    except Exception as error:
        logging.info("Position embeddings could not be identified: %s", error)
        return
    found = {}
    for table, kind in reads:
        # A table that is read in several ways has a gradient in which rows occur several times.
        found[table] = kind if found.get(table, kind) == kind else TOKENS
    marks.TABLE_READS.set(model, found)


def noted_kind(grad, variable, model: keras.Model | None) -> str:
    """Returns how the rows of a gradient's table are read, as `note_positions` recorded it.

    Args:
        grad: A gradient of a step that runs eagerly.
        variable: The table.
        model: The model of the step.

    Raises:
        ValueError: If nothing was recorded for the model.
    """
    if not isinstance(grad, tf.IndexedSlices):
        return TOKENS
    found = marks.TABLE_READS.get(model)
    if found is None:
        raise ValueError(
            "An `Embedding` on several replicas needs a step that can be traced: the trace shows "
            "whether it reads positions or tokens. Received: a step that runs eagerly, a sparse "
            f"gradient of {getattr(variable, 'path', 'a table')}, and a model without a `call`, or "
            "with one that cannot be traced. Leave out run_eagerly, give the model a `call` that "
            'can be traced, or train on one replica: create_strategy("one_device").'
        )
    return found.get(id(variable), TOKENS)


def _trace_reads(model, x) -> list[tuple[int, str]]:
    """Returns, for each read of rows, the id of the table and the kind of the read."""
    variables = model.trainable_variables
    frozen, reads = model.non_trainable_variables, []
    # A sharded one may not be readable now, and says nothing of rows that are read.
    held = [each for each in frozen if isinstance(each, keras_compat.HeldVariable)]
    is_held = {id(each) for each in held}
    known = [None if id(each) in is_held else tf.convert_to_tensor(each) for each in frozen]

    def call(tables, held, x):
        rest = iter(held)
        others = [next(rest) if value is None else value for value in known]
        model.stateless_call(tables, others, x, training=True)
        ids = {table.op.name: id(variable) for table, variable in zip(tables, variables)}
        graph = tf.compat.v1.get_default_graph()
        for gather in [op for op in graph.get_operations() if op.type == "GatherV2"]:
            table = gather.inputs[0].op
            while table.type in _COPIES:
                # A checkpointed layer reads a copy.
                table = table.inputs[0].op
            if table.name in ids:
                reads.append((ids[table.name], _kind(gather.inputs[1])))

    specs = [[tf.TensorSpec(v.shape, v.dtype) for v in some] for some in (variables, held)]
    rows = tf.nest.map_structure(keras_compat.without_rows, x)
    tf.function(call, autograph=False).get_concrete_function(*specs, rows)
    return reads


def _kind(indices) -> str:
    if are_positions(indices):
        return POSITIONS
    operation = indices.op
    while operation.type in _COPIES or only_waits(operation):
        # `keras.ops.take` selects between wrapped negative indices and, the last input, others.
        operation = operation.inputs[-1 if operation.type == "SelectV2" else 0].op
    return UNIQUE if operation.type in ("Unique", "UniqueV2") else TOKENS


def are_positions(indices) -> bool:
    """Whether rows of a table are read by position: the same ones on every replica."""
    found = _sources(indices)
    if found != {"shapes"}:
        return not found
    # Positions repeated for each row of the batch are concatenated, as tokens are.
    rank, shape = indices.shape.rank, indices.shape
    return rank == 1 or rank is not None and rank > 0 and shape[0] == 1


def _sources(tensor) -> set[str]:
    """Returns what a tensor depends on besides constants: "shapes" of data, "data", or both."""
    seen, waiting, found = set(), [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in OF_SHAPES:
            found.add("shapes")
        elif operation.type == "Placeholder" and not _is_captured_value(operation):
            found.add("data")
        # Variables have the same value on all replicas; random numbers need not have.
        elif operation.op_def.is_stateful and operation.type != "ReadVariableOp":
            found.add("data")
        else:
            waiting += [each.op for each in inputs_of(operation)]
    return found


def _is_captured_value(placeholder) -> bool:
    """Whether a placeholder stands for a tensor that existed before the trace."""
    return any(
        inner is placeholder.outputs[0] and hasattr(outer, "numpy")
        for outer, inner in getattr(placeholder.graph, "captures", ())
    )
