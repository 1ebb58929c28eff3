"""`DistributedOptimizer`: the user's Keras optimizer with one device's result on many."""

from __future__ import annotations

import contextlib
import types

import keras

from tfmulti import keras_compat
from tfmulti.choices import COMPRESSIONS
from tfmulti.step import finite, gradients, model_contents


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer | str | dict, *, compression: str | None = None
) -> keras.optimizers.Optimizer:
    """Marks a Keras optimizer as one whose replicas update alike, and sets how gradients travel.

    Under `fit` tapes give the whole batch's gradients, and every optimizer is right as it is:
    clipping, weight decay, accumulation, moving averages and loss scaling happen as on one
    device. This is needed for `compression`, and where gradients come from no tape, as those of
    `tf.gradients`: it reduces them. The idiom is Horovod's (Sergeev and Del Balso, 2018, https://arxiv.org/abs/1802.05799).

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
    keras_compat.mark_updates_alike(inner)
    object.__setattr__(optimizer, "apply", types.MethodType(_apply, optimizer))
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
    for optimizer in model_contents.optimizers_of(model):
        DistributedOptimizer(optimizer, compression=compression)


def distribute_loaded(model: keras.Model) -> None:
    """Makes the optimizers of a model that was loaded in a strategy's scope distributed."""
    strategy = model.distribute_strategy
    if getattr(strategy, "repairs_keras", False) and strategy.num_replicas_in_sync > 1:
        distribute_optimizers(model)


def _undo(optimizer):
    for name in ("apply", "tfmulti_distributed"):
        object.__delattr__(optimizer, name)


def _apply(self, grads, trainable_variables=None):
    """Applies the whole batch's gradients; reduces them first where no tape has done so."""
    grads = gradients.reduce_for_update(grads)
    finite.update_of(self)(self, grads, trainable_variables)
