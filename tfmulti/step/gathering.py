"""The rows of the whole global batch on every replica, for losses that compare rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import losses, parameters
from tfmulti.step.rows import current_replica_batch, distributed_batch
from tfmulti.step.sums import add_by_dtype, from_sent, to_send


def gather_batch(structure):
    """Gathers the rows of the whole global batch on every replica, in the batch's order.

    Use it for values that depend on rows of other replicas: contrastive losses, in-batch
    negatives, in-batch retrieval, batch statistics. For Keras losses and metrics that need the
    whole batch, use `WholeBatchLoss` and `WholeBatchMetric`. A mean or a sum over rows does not
    need it.

    It is differentiable: each replica's rows receive the sum of the gradients of all replicas'
    losses. The replicas' losses are weighted with weights that add up to one, so a loss over all
    rows, which is the same on every replica, has the same gradient as on one device.

    Replica batches may be uneven or empty; padding rows are removed. On one replica, and outside
    a replica's step, it returns the structure unchanged. All replicas must make the same calls,
    and not within `tf.cond` or `tf.while_loop`.

    Gather two views of the same examples as two tensors. If you concatenate them first, they
    come back replica by replica: `[a0, b0, a1, b1]` and not `[a0, a1, b0, b1]`.

    With B bytes in the whole batch and n replicas, each replica sends and receives
    2 (n - 1) / n B bytes, and as many again for gradients; exchanging the numbers of rows takes
    4 n bytes for each tensor. During the call a replica holds 2 B bytes; the B bytes of the result
    stay until the backward pass. The output of a softmax or a sigmoid takes twice that: Keras
    computes its cross-entropy from the logits, which are gathered too. A batch of 4,096
    embeddings of 256 floats has 4 MiB.

    Args:
        structure: A tensor of shape `(rows, ...)` with this replica's rows, or a nested structure
            of such tensors; None stays None. Any numeric type: bool and small integers are sent as
            int32, floats of any precision as they are.

    Returns:
        The same structure, with tensors of shape `(rows of the global batch, ...)`.

    Raises:
        ValueError: For strings, ragged and sparse tensors, a scalar, and Keras's symbolic tensors,
            which belong to no replica.

    Example: the positive of each row is its partner; all other rows of the batch are negatives.

    >>> def contrastive_loss(images, texts, temperature=0.1):
    ...     images, texts = gather_batch((images, texts))
    ...     logits = tf.matmul(images, texts, transpose_b=True) / temperature
    ...     labels = tf.range(tf.shape(logits)[0])
    ...     losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    ...     return tf.reduce_mean(losses)
    >>> float(contrastive_loss(tf.eye(3), tf.eye(3))) < 1e-3
    True
    """
    context = tf.distribute.get_replica_context()
    parts = tf.nest.flatten(structure, expand_composites=False)
    indices = [index for index, part in enumerate(parts) if part is not None]
    for part in parts:
        if isinstance(part, keras.KerasTensor):
            raise _refusal("rows of a step", part, "Call it in the `call` of a custom layer.")
    # Stages on the devices of one replica have micro-batches, too.
    if parameters.is_stage():
        raise RuntimeError(
            "A layer of a pipeline has the rows of one micro-batch at a time. Received: "
            "gather_batch in a layer's call. Call it in the loss or in `train_step`, or leave "
            "tfmulti.pipeline out."
        )
    if context is None or context.num_replicas_in_sync == 1 or not indices:
        return structure
    # In a loss of the whole batch these are the rows of all replicas already.
    if losses.has_whole_batch():
        return structure
    replica_batch = current_replica_batch()
    sent = [keras_compat.WithLogits(parts[index]) for index in indices]
    own = [_own_rows(tensor, replica_batch) for each in sent for tensor in each.tensors]
    whole = _gather(own)
    if replica_batch is not None:
        replica_batch.note_gathered(whole)
    gathered = iter(whole)
    for index, each in zip(indices, sent):
        parts[index] = each.restored([next(gathered) for _ in each.tensors])
    return tf.nest.pack_sequence_as(structure, parts, expand_composites=False)


def local_rows(structure):
    """Takes this replica's rows out of tensors with the rows of the whole global batch.

    It reverses `gather_batch`: gather the rows, combine or reorder them as on one device, and
    continue with this replica's. Random numbers that are drawn between the two must be the same on
    all replicas: use `tf.random.stateless_uniform` with a seed made from `optimizer.iterations`.

    On one replica, and outside a replica's step, it returns the structure unchanged. All replicas
    must make the same calls, and not within `tf.cond` or `tf.while_loop`: it exchanges the numbers
    of rows, 4 n bytes with n replicas. It is differentiable.

    Args:
        structure: A tensor of shape `(rows of the global batch, ...)`, or a nested structure of
            such tensors; None stays None.

    Returns:
        The same structure, with tensors of shape `(rows, ...)`; a replica without rows has the
        one row of padding that its batch has.

    Raises:
        ValueError: For a structure that `gather_batch` refuses.

    Example: mixup, in which each row is mixed with the one on the other side of the batch.

    >>> def mixed(rows):
    ...     whole = gather_batch(rows)
    ...     return local_rows(0.75 * whole + 0.25 * tf.reverse(whole, [0]))
    >>> mixed(tf.constant([[0.0], [1.0]])).numpy().tolist()
    [[0.25], [0.75]]
    """
    replica_batch = distributed_batch()
    if replica_batch is None:
        return structure
    parts = tf.nest.flatten(structure, expand_composites=False)
    if all(part is None for part in parts) or losses.has_whole_batch():
        return structure
    empty = replica_batch.num_real == 0
    count = tf.where(empty, 0, replica_batch.num_rows)
    [start], _ = row_positions([count])
    # An empty replica batch takes any row in place of its dummy row, whose weight is 0.
    start, count = tf.where(empty, 0, start), tf.where(empty, replica_batch.num_rows, count)
    checked = [None if part is None else _own_rows(part, None) for part in parts]
    taken = [None if part is None else part[start : start + count] for part in checked]
    return tf.nest.pack_sequence_as(structure, taken, expand_composites=False)


def row_positions(counts: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns where this replica's rows begin among those of all replicas, and how many all have.

    It is a collective.

    Args:
        counts: How many rows this replica has of each tensor, int32 scalars.
    """
    context = tf.distribute.get_replica_context()
    index = topology.replica_batch_index(context)
    # The collective adds, so each replica writes to its own column.
    one_hot = tf.one_hot(index, context.num_replicas_in_sync)
    # Sent as float32, which GPUs can add; exact up to 2**24.
    counts = context.all_reduce("SUM", tf.cast(tf.stack(counts), tf.float32)[:, None] * one_hot)
    counts = tf.unstack(tf.cast(counts, tf.int32))
    return [tf.reduce_sum(count[:index]) for count in counts], list(map(tf.reduce_sum, counts))


def _own_rows(part, replica_batch) -> tf.Tensor:
    """Returns this replica's rows of a tensor, without a dummy row."""
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        raise _refusal("dense tensors", part, "Use .to_tensor() or tf.sparse.to_dense first.")
    part = tf.convert_to_tensor(part)
    if part.dtype == tf.string:
        raise _refusal("numbers", part, "Use numbers instead, as keras.layers.Hashing gives them.")
    if part.shape.rank == 0:
        raise _refusal(
            "tensors with rows", part, "Leave out scalars: every replica has them already."
        )
    return part if replica_batch is None else replica_batch.real_rows(part)


def _refusal(rule, part, advice) -> ValueError:
    kind = type(part).__name__ if not isinstance(part, tf.Tensor) else "tensor"
    return ValueError(
        f"`structure` must hold {rule}. Received: a {kind} of shape {part.shape} and type "
        f"{tf.as_dtype(part.dtype).name}. {advice}"
    )


def _gather(own) -> list[tf.Tensor]:
    """Writes each replica's rows to their positions in a tensor of zeros, and adds all of these.

    Every transport supports sums, MPI included, and they allow different numbers of rows.
    """
    starts, totals = row_positions([tf.shape(part)[0] for part in own])
    placed = [
        _place(to_send(tf.stop_gradient(part)), start, total)
        for part, start, total in zip(own, starts, totals)
    ]
    gathered = add_by_dtype(placed)
    gathered = [from_sent(whole, part.dtype) for part, whole in zip(own, gathered)]
    return [
        _with_gradient(part, whole, start)
        if part.dtype.is_floating or part.dtype.is_complex
        else whole
        for part, whole, start in zip(own, gathered, starts)
    ]


def _place(part, start, total):
    after = total - start - tf.shape(part)[0]
    paddings = tf.pad([[start, after]], [[0, tf.rank(part) - 1], [0, 0]])
    placed = tf.pad(part, paddings)
    # With paddings that are computed, `tf.pad` forgets the sizes of all axes.
    return tf.ensure_shape(placed, None if part.shape.rank is None else [None, *part.shape[1:]])


def _with_gradient(own, whole, start):
    """Returns `whole` with a gradient for `own`, this replica's rows, which begin at `start`.

    Each tensor has its own reduction, so tensors that are not differentiated cost nothing.
    """
    rows = tf.shape(own)[0]

    @tf.custom_gradient
    def attach(own, whole):
        def gradient(cotangent):
            context = tf.distribute.get_replica_context()
            cotangent = tf.convert_to_tensor(cotangent)
            added = context.all_reduce("SUM", to_send(cotangent))
            part = from_sent(added[start : start + rows], cotangent.dtype)
            return tf.ensure_shape(part, own.shape), None

        return tf.identity(whole), gradient

    return attach(own, tf.stop_gradient(whole))
