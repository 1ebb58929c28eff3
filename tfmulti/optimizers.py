"""`DistributedOptimizer`: the user's Keras optimizer with one device's result on many."""

from __future__ import annotations

import contextlib
import types

import keras
import tensorflow as tf

from tfmulti import finite, keras_compat, shares, slices
from tfmulti.config import COMPRESSIONS


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer | str | dict, *, compression: str | None = None
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer right on several replicas.

    Each replica's loss is weighed by the examples that the replica really saw, the gradients
    are reduced first, and everything else (clipping, weight decay, accumulation, moving
    averages, loss scaling) then happens as on one device. The idiom is Horovod's (Sergeev and
    Del Balso, 2018, https://arxiv.org/abs/1802.05799).

    The object and its class stay the user's, so saving and loading are untouched. With one
    replica it adds nothing.

    Args:
        optimizer: A Keras optimizer, or a `LossScaleOptimizer` around one; as `compile`, also the
            name of one (`"adam"`) or its configuration. Under the policy `mixed_float16` either
            may be wrapped, and what `compile` adds is taken care of.
        compression: `"bfloat16"` or `"float16"` to send dense gradients in half the bytes: each
            replica's is rounded to 8 or 11 bits, and so is their sum. None sends them as they are.

    Returns:
        The same optimizer; where a name was given, a new one.

    Raises:
        ValueError: For something else than a Keras 3 optimizer, or an unknown compression.

    Example:
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=1.0))
    >>> type(optimizer).__name__
    'SGD'
    """
    optimizer = _get(optimizer)
    if compression not in (None, *COMPRESSIONS):
        raise ValueError(
            f"`compression` must be None or one of {', '.join(COMPRESSIONS)}. "
            f"Received: compression={compression!r}. Use 'bfloat16' for half the bytes."
        )
    if compression is not None:
        object.__setattr__(optimizer, "tfmulti_compression", compression)
    if getattr(optimizer, "tfmulti_distributed", False):
        return optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is not optimizer and getattr(inner, "tfmulti_distributed", False):
        _undo(inner)
    keras_compat.update_replicas_alike(inner)
    for name, function in (("scale_loss", _scale_loss), ("apply", _apply)):
        object.__setattr__(optimizer, name, types.MethodType(function, optimizer))
    object.__setattr__(optimizer, "tfmulti_distributed", True)
    return optimizer


def _get(optimizer) -> keras.optimizers.Optimizer:
    found = optimizer
    if isinstance(optimizer, str | dict):
        with contextlib.suppress(ValueError, TypeError):
            found = keras.optimizers.get(optimizer)
    if not isinstance(found, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras 3 optimizer, or what keras.optimizers.get knows. "
            f"Received: optimizer={optimizer!r}. Use for example keras.optimizers.Adam()."
        )
    return found


def distribute_optimizers(model: keras.Model, compression: str | None = None) -> None:
    """Makes every optimizer that a model holds distributed, as a GAN's two."""
    for value in [*vars(model).values(), getattr(model, "optimizer", None)]:
        if isinstance(value, keras.optimizers.Optimizer):
            DistributedOptimizer(value, compression=compression)


def distribute_loaded(model: keras.Model) -> None:
    """Makes the optimizers of a model that was loaded in a strategy's scope distributed."""
    strategy = model.distribute_strategy
    if getattr(strategy, "repairs_keras", False) and strategy.num_replicas_in_sync > 1:
        distribute_optimizers(model)


def take_over_from_inner(optimizer) -> None:
    """Makes a `LossScaleOptimizer` distributed in place of the inner one that is.

    `compile` puts one around the user's optimizer by itself under `mixed_float16`. Gradients
    must be reduced before it looks whether they are finite.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and getattr(inner, "tfmulti_distributed", False):
        compression = getattr(inner, "tfmulti_compression", None)
        DistributedOptimizer(optimizer, compression=compression)


def _undo(optimizer):
    for name in ("scale_loss", "apply", "tfmulti_distributed"):
        object.__delattr__(optimizer, name)


def _scale_loss(self, loss):
    share = shares.current_share()
    if share is not None and share.averages:
        loss = _weigh_loss(loss, share)
        share.weighed.add(id(self))
    return type(self).scale_loss(self, loss)


def _weigh_loss(loss, share):
    """Makes the sum over replicas of the losses the global batch's mean.

    A replica's loss is a mean over its rows plus penalties. The mean must count as its rows do
    among all; weighing it before the gradient is taken keeps layers right whose backward pass
    crosses replicas. The weights of all replicas add to one, so penalties need no care unless
    rows are padded.
    """
    weight = tf.cast(share.weight, loss.dtype)
    if not share.is_padded:
        return loss * weight
    share.penalty = shares.regularization(share.model)
    penalty = tf.cast(share.penalty, loss.dtype)
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return (loss - penalty) * weight + penalty / num_replicas


def _apply(self, grads, trainable_variables=None):
    plain_apply = finite.update_of(self)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return plain_apply(self, grads, trainable_variables)
    grads = list(grads)
    share = shares.current_share()
    if share is not None and share.averages:
        grads = _weigh_gradients(self, grads, share)
    alike = _same_on_all(grads, trainable_variables, share)
    present = [(grad, same) for grad, same in zip(grads, alike) if grad is not None]
    reduced = iter(_reduce(present, getattr(self, "tfmulti_compression", None)))
    grads = [None if grad is None else next(reduced) for grad in grads]
    return plain_apply(self, grads, trainable_variables)


def _same_on_all(grads, variables, share) -> list[bool]:
    """Whether each gradient is of rows that every replica reads."""
    if not tf.executing_eagerly():
        return [slices.same_on_all(grad) for grad in grads]
    model = share.model if share is not None else None
    if variables is None:
        variables = model.trainable_variables if model is not None else [None] * len(grads)
    return [slices.noted_same_on_all(grad, each, model) for grad, each in zip(grads, variables)]


def _reduce(pairs, compression) -> list:
    """Adds gradients over all replicas; dense ones of full precision can travel in half of it.

    Args:
        pairs: Each gradient, and whether it is of rows that every replica reads.
        compression: The type in which to send, or None.
    """
    if not pairs:
        return []
    grads = [grad for grad, _ in pairs]
    rows = [grad if same else None for grad, same in pairs]
    grads = [grad if row is None else row.values for grad, row in zip(grads, rows)]
    types = [grad.dtype for grad in grads]
    full = [not isinstance(grad, tf.IndexedSlices) and grad.dtype.size > 2 for grad in grads]
    if compression is not None:
        grads = [tf.cast(g, compression) if f else g for g, f in zip(grads, full)]
    added = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)
    added = [tf.cast(grad, dtype) if f else grad for grad, dtype, f in zip(added, types, full)]
    return [
        grad if row is None else tf.IndexedSlices(grad, row.indices, row.dense_shape)
        for grad, row in zip(added, rows)
    ]


def _weigh_gradients(self, grads, share):
    """Removes an empty share's gradients; weighs those whose loss was not weighed.

    A custom `train_step` need not call `scale_loss`.
    """
    if id(self) in share.weighed:
        share.weighed.discard(id(self))
    else:
        grads = _map_values(grads, lambda v: [x * tf.cast(share.weight, x.dtype) for x in v])
    if not share.may_be_empty or share.is_padded:
        return grads
    # A product with 0 would keep the NaN that a filler row can make.
    return _map_values(
        grads,
        lambda values: tf.cond(
            share.num_real > 0,
            lambda: [tf.identity(value) for value in values],
            lambda: [tf.zeros_like(value) for value in values],
        ),
    )


def _map_values(grads, function):
    """Applies a function to the list of all gradients' values; sparse ones stay sparse."""
    present = [grad for grad in grads if grad is not None]
    sparse = [isinstance(grad, tf.IndexedSlices) for grad in present]
    values = [g.values if s else tf.convert_to_tensor(g) for g, s in zip(present, sparse)]
    if not values:
        return grads
    values = function(values)
    made = iter(
        tf.IndexedSlices(v, g.indices, g.dense_shape) if s else v
        for v, g, s in zip(values, present, sparse)
    )
    return [None if grad is None else next(made) for grad in grads]
