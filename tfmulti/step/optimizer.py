"""`DistributedOptimizer`: makes a Keras optimizer work on many replicas as on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from tfmulti import keras_compat, marks, topology
from tfmulti.choices import COMPRESSIONS, SHARDS
from tfmulti.settings import check_choice, check_whole_number
from tfmulti.step import (
    apply,
    finite,
    gradients,
    local_steps,
    model_contents,
    parameters,
    sharded_state,
)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer | str | dict,
    *,
    compression: str | None = None,
    shard: str | None = None,
    synchronize_every: int | None = None,
) -> keras.optimizers.Optimizer:
    """Makes a Keras optimizer distributed, with options for how gradients are sent and state kept.

    Under `fit` tapes return the gradients of the whole batch, so every optimizer works unwrapped:
    clipping, weight decay, accumulation, moving averages and loss scaling happen as on one
    device. This function is needed for its arguments, and to reduce gradients that come from no
    tape, such as those of `tf.gradients`. The idiom is Horovod's (Sergeev and Del Balso, 2018, https://arxiv.org/abs/1802.05799).

    It modifies the given object and keeps its class, so saving and loading work as before. With
    one replica it has no effect.

    Args:
        optimizer: A Keras optimizer, or a `LossScaleOptimizer` around one; also, as in `compile`,
            a name (`"adam"`) or a configuration. Under the policy `mixed_float16` you may wrap the
            inner optimizer or the `LossScaleOptimizer`, also the one that `compile` adds.
        compression: `"bfloat16"` or `"float16"` to send dense gradients in half the bytes: each
            replica's gradient is rounded to 8 or 11 bits, and so is their sum. Over GPUs
            TensorFlow cannot add bfloat16, so that it saves nothing. None sends full precision.
        shard: `"state"` to keep the optimizer's slots, such as Adam's two for each weight, on one
            worker each (ZeRO stages 1 and 2, Rajbhandari et al., 2020,
            https://arxiv.org/abs/1910.02054): of N workers each holds 1/N of them.
            `"parameters"` to shard large weights as well (stage 3); see `sharded_parameters`.
            Workers need one replica each. None keeps everything everywhere.
        synchronize_every: How many steps each worker takes by itself before all workers average
            weights and slots (local SGD, Stich, 2019, https://arxiv.org/abs/1805.09767), for slow
            networks; the result differs from that of one device. 1, the default, adds gradients in
            every step. Workers need one replica each.

    A later call for the same optimizer may add settings, and keeps those that it does not give.

    Returns:
        The same optimizer; for a name or a configuration, a new one.

    Raises:
        ValueError: If it is not a Keras 3 optimizer, an argument is invalid or incompatible with
            another or with an earlier call's, the state cannot be sharded, or workers cannot take
            local steps.

    Example:
    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=1.0))
    >>> type(optimizer).__name__
    'SGD'
    """
    optimizer = _get(optimizer)
    advice = "Use 'bfloat16' for half the bytes."
    check_choice("compression", compression, (None, *COMPRESSIONS), advice)
    check_choice("shard", shard, (None, *SHARDS), "Use 'state' for the optimizer's slots.")
    inner = keras_compat.inner_optimizer(optimizer)
    compression, shard, synchronize_every = _settings(
        optimizer, inner, compression, shard, synchronize_every
    )
    if synchronize_every > 1:
        local_steps.take_local_steps(inner, synchronize_every)
    if inner is not optimizer and marks.SYNCHRONIZE_EVERY.get(inner) > 1:
        # A worker without rows has no update, but takes part in whether all gradients are finite.
        if marks.DISTRIBUTED.get(optimizer):
            _undo(optimizer)
        _distribute(inner)
        return optimizer
    if compression is not None:
        marks.COMPRESSION.set(optimizer, compression)
    if shard is not None:
        sharded_state.shard_state(inner, shard)
    # Loss scaling must judge by the sums of all replicas, so the outer one reduces.
    if inner is not optimizer and marks.DISTRIBUTED.get(inner):
        _undo(inner)
    _distribute(optimizer)
    return optimizer


def _settings(optimizer, inner, compression, shard, synchronize_every):
    """Returns the settings with those of earlier calls, if they can be combined."""
    before = marks.COMPRESSION.get(optimizer) or marks.COMPRESSION.get(inner)
    compression = _kept("compression", compression, before)
    shard = _kept("shard", shard, _what_is_sharded(inner))
    before = marks.SYNCHRONIZE_EVERY.get(inner)
    synchronize_every = _kept("synchronize_every", synchronize_every, before, 1)
    _refuse_several(inner, shard=shard, synchronize_every=synchronize_every)
    _check_shard(compression, shard)
    _check_local_steps(synchronize_every, compression, shard)
    strategy = keras_compat.strategy_of(inner)
    for name, value, default in (
        ("compression", compression, None),
        ("shard", shard, None),
        ("synchronize_every", synchronize_every, 1),
    ):
        if value != default:
            topology.refuse_servers(strategy, f"{name}={value!r}", "Leave it out.")
    return compression, shard, synchronize_every


def _kept(name, given, before, default=None):
    """Returns a setting: what is given, or what an earlier call has set."""
    if given is None:
        return before
    if before not in (default, given):
        raise ValueError(
            f"`{name}` of an optimizer cannot be changed. Received: {name}={given!r}, for an "
            f"optimizer with {name}={before!r}. Create a new optimizer: "
            "type(optimizer).from_config(optimizer.get_config())."
        )
    return given


def _what_is_sharded(optimizer):
    shards = marks.SHARDS.get(optimizer)
    if shards is None:
        return None
    return "parameters" if shards.shards_parameters else "state"


def _distribute(optimizer) -> None:
    if not marks.DISTRIBUTED.get(optimizer):
        inner = keras_compat.inner_optimizer(optimizer)
        marks.UPDATES_ALIKE.set(inner, True)
        apply.install(optimizer, _apply)
        marks.DISTRIBUTED.set(optimizer, True)


def _refuse_several(inner, **settings) -> None:
    """Raises ValueError for settings of an optimizer that hands its updates to others within it.

    The slots that would be sharded are theirs, and each counts its own updates, which a local step
    without rows would have to do for it.
    """
    name, value = next(((n, v) for n, v in settings.items() if v not in (None, 1)), (None, None))
    # `MultiOptimizer` creates those within it when it is built.
    has_inner = hasattr(inner, "optimizers") or model_contents.optimizers_within(inner)
    if name is not None and has_inner:
        raise ValueError(
            f"`{name}` needs an optimizer that updates all weights itself. Received: "
            f"{name}={value!r} for a {type(inner).__name__}, which holds other optimizers. Leave "
            f"{name} out, or use several optimizers in your own `train_step`."
        )


def _check_shard(compression, shard) -> None:
    if compression is not None and shard == "parameters":
        raise ValueError(
            "Gradients of sharded parameters are sent in full precision. Received: "
            f"shard='parameters', compression={compression!r}. Leave compression out."
        )


def _check_local_steps(synchronize_every, compression, shard) -> None:
    advice = "Use 1 to add gradients in every step, 8 to average weights after every 8 steps."
    check_whole_number("synchronize_every", synchronize_every, advice)
    if synchronize_every > 1 and shard is not None:
        raise ValueError(
            "`synchronize_every` above 1 needs all weights and slots on every worker. "
            f"Received: synchronize_every={synchronize_every}, shard={shard!r}. "
            "Leave one of them out."
        )
    if synchronize_every > 1 and compression is not None:
        raise ValueError(
            "`compression` has no effect with `synchronize_every` above 1, which sends no "
            f"gradients. Received: synchronize_every={synchronize_every}, "
            f"compression={compression!r}. Leave compression out."
        )


def _get(optimizer) -> keras.optimizers.Optimizer:
    found = optimizer
    if isinstance(optimizer, str | dict):
        with contextlib.suppress(ValueError, TypeError):
            found = keras.optimizers.get(optimizer)
    if not isinstance(found, keras.optimizers.Optimizer):
        raise ValueError(
            "`optimizer` must be a Keras 3 optimizer, or a name that keras.optimizers.get knows. "
            f"Received: optimizer={optimizer!r}. Use for example keras.optimizers.Adam()."
        )
    return found


def distribute_optimizers(
    model: keras.Model,
    compression: str | None = None,
    shard: str | None = None,
    synchronize_every: int | None = None,
) -> None:
    """Makes every optimizer that a model holds distributed, such as the two of a GAN."""
    for optimizer in model_contents.optimizers_of(model):
        DistributedOptimizer(
            optimizer, compression=compression, shard=shard, synchronize_every=synchronize_every
        )


def distribute_loaded(model: keras.Model) -> None:
    """Makes the optimizers of a model that was loaded in a strategy's scope distributed.

    If the model was loaded within `sharded_parameters`, they update each weight on its owner.
    """
    strategy = model.distribute_strategy
    if keras_compat.is_ours(strategy) and strategy.num_replicas_in_sync > 1:
        shard = "parameters" if parameters.has_sharded(model) else None
        distribute_optimizers(model, shard=shard)


def _undo(optimizer):
    apply.uninstall(optimizer)
    marks.DISTRIBUTED.delete(optimizer)


def _apply(self, grads, trainable_variables=None):
    """Applies gradients of the whole batch; reduces them first if no tape has done so."""
    variables = None if trainable_variables is None else list(trainable_variables)
    with gradients.one_update(grads) as reduced:
        finite.update_of(self)(self, reduced, variables)


@contextlib.contextmanager
def update_of_keras(optimizer, grads, variables) -> Iterator[list]:
    """Yields the gradients that Keras's own `apply` takes, in a context with what is held here.

    An `apply` of the user's own, which calls it, has whole gradients and reads whole weights.

    Args:
        optimizer: The optimizer, or a `LossScaleOptimizer`.
        grads: Its gradients; reduced first if no tape has done so.
        variables: Their variables; None for those that it was built for.
    """
    shards = marks.SHARDS.get(optimizer)
    if shards is not None:
        shards.updates.assign_add(1)
    with gradients.one_update(grads) as reduced, keras_compat.held_values():
        yield sharded_state.held_gradients(optimizer, reduced, variables)
