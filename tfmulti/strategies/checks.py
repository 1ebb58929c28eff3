"""Checks before the first step: where a model was created, and what its steps compute."""

from __future__ import annotations

import functools
import warnings
import weakref

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, verification
from tfmulti.parallel import sharded_parameters
from tfmulti.step import (
    accumulation,
    local_steps,
    model_contents,
    parameters,
    replicated,
    rows,
    sparse_gradients,
    whole_batch,
)
from tfmulti.strategies import coordination, feeds, same_weights
from tfmulti.verification import Workers, verified
from tfmulti.verification.case import PREDICT, TEST, TRAIN, Feed
from tfmulti.verification.custom_parts import (
    advice_for_stages,
    local_normalization,
    num_micro_batches,
)

_latest: weakref.ref | None = None


def note_strategy(strategy: tf.distribute.Strategy) -> None:
    """Records the latest strategy of a script, in whose scope its models should be created."""
    global _latest
    _latest = weakref.ref(strategy)


def check_scope(model: keras.Model, name: str, data) -> None:
    """Warns if `fit` trains a model on one device although the script has a larger strategy.

    Args:
        model: The model whose method was called.
        name: The name of the method. Only `"fit"` is checked.
        data: The method's first argument.

    Raises:
        ValueError: If the data were distributed for the replicas of a strategy, or if a part of
            a model in the scope was created outside it.
    """
    strategy = _latest() if _latest is not None else None
    if name != "fit":
        return
    if keras_compat.is_ours(model.distribute_strategy):
        refuse_outside_scope(model)
        refuse_keras_distribution()
        return
    made_for = getattr(data, "strategy", None)
    if made_for is not None and made_for.num_replicas_in_sync > 1:
        raise ValueError(
            "A model must be created in the scope of the strategy that distributes its data. "
            f"Received: data for {made_for.num_replicas_in_sync} replicas, and a model created "
            "outside any scope, which would train on one device only. "
            "Create and compile it within `with strategy.scope():`."
        )
    if hasattr(data, "count_all"):
        data.count_all()
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        warnings.warn(
            f"{model.name} was created outside `with strategy.scope():`, so it trains on one "
            f"device only, not on {strategy.num_replicas_in_sync} replicas. Unless you intend "
            "this, create and compile it within the scope.",
            stacklevel=5,
        )


_TRAIN = "Call tfmulti.train_async(model, data, batch_size=64, epochs=3), say."
_EVALUATE = "Give validation_data to tfmulti.train_async."
_INSTEAD = {
    "fit": _TRAIN,
    "train_on_batch": _TRAIN,
    "test_on_batch": _EVALUATE,
    "evaluate": _EVALUATE,
    "predict": "Call model(x), or save the model and load it on one device.",
}


def refuse_calls_on_servers(model: keras.Model, name: str) -> None:
    """Raises ValueError for `fit`, `evaluate`, `train_on_batch` and the like with servers.

    Args:
        model: The model whose method was called.
        name: The name of the method.
    """
    if keras_compat.has_servers(model.distribute_strategy):
        raise ValueError(
            f"`{name}` does not work with parameter servers, because its steps are synchronous. "
            f"Received: {name} called on {model.name!r}, which was created in the scope of "
            f'create_strategy("parameter_server"). {_INSTEAD[name]}'
        )


def refuse_keras_distribution() -> None:
    """Raises ValueError if a `keras.distribution` is set, which TensorFlow's backend ignores."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ValueError(
            "`keras.distribution` has no effect with TensorFlow: every device holds the whole "
            f"model. Received: {type(distribution).__name__}. Call "
            "keras.distribution.set_distribution(None); tfmulti's strategy distributes the data, "
            "and tfmulti.checkpoint_activations saves memory."
        )


def refuse_outside_scope(model: keras.Model) -> None:
    """Raises ValueError for a variable of the model that was created outside the strategy's scope.

    Such a variable has no copy for each replica, so all replicas would update the same one. The
    check includes variables that are created after their layer, by building or LoRA. With one
    replica, variables may be created outside any scope, but not in one of several replicas.
    """
    strategy = model.distribute_strategy
    several = strategy.num_replicas_in_sync > 1
    optimizer = getattr(model, "optimizer", None)
    owned = [*model.trainable_variables, *model.metrics_variables]
    slots = optimizer.variables if optimizer is not None else []
    # Sharded slots have one owner, and no copies.
    owned += [each for each in slots if not marks.IS_SHARDED.get(each)]
    with keras_compat.held_values():
        outside = [v for v in owned if _is_outside(v.value, strategy, several)]
    if outside:
        raise ValueError(
            "Layers, optimizers and metrics must be created in the strategy's scope. "
            f"Received: the variable {outside[0].path}, created outside it. "
            "Create them within `with strategy.scope():`, or pass them to compile by name; "
            "build the model, enable LoRA and compile within the scope too."
        )
    # That of a model that is only evaluated does not update, as the one that Keras adds.
    if several and _KINDS.get(marks.CALL.get(model)[0]) != TEST:
        sharded_parameters.refuse_other_optimizers(model)


def _is_outside(value, strategy, several) -> bool:
    if not isinstance(value, tf.distribute.DistributedValues):
        return several
    return getattr(value, "distribute_strategy", strategy) is not strategy


_KINDS = {"fit": TRAIN, "train_on_batch": TRAIN, "evaluate": TEST, "test_on_batch": TEST}
WORKERS = Workers(
    coordination.min_and_max,
    coordination.broadcast,
    coordination.align_collectives,
    coordination.all_fail,
)


def build_by_step(model: keras.Model, batch) -> bool:
    """Builds a model by tracing its custom step, as on one device.

    Keras's own build calls the model with the first part of the batch as dense inputs. A custom
    step may use the batch in another way.

    Args:
        model: The model.
        batch: A batch, as the replicas receive it.

    Returns:
        Whether it built the model.
    """
    refuse_stateful(model)
    keras_compat.prepare_global_seeds(model.distribute_strategy)
    sharded_parameters.gather_present(model)
    kind = _KINDS.get(marks.CALL.get(model)[0])
    return kind is not None and verification.build_by_step(model, kind, batch, WORKERS)


def verify_once_built(strategy, model: keras.Model, peek, iterator) -> None:
    """Prepares the losses and metrics of a built model, and verifies its step.

    Args:
        strategy: The model's strategy.
        model: The model, built.
        peek: Function that returns a batch, as the replicas receive it.
        iterator: Keras's iterator over the batches; None for `train_on_batch`.
    """
    if strategy.num_replicas_in_sync == 1:
        # Pipeline stages on the devices of one process split batches too, into micro-batches.
        if num_micro_batches(model) > 1:
            _verify(model, peek, iterator)
        return
    sharded_parameters.gather_in_calls(model)
    if marks.CALL.get(model)[0] == "fit" and parameters.has_sharded(model):
        # Before `_verify` forgets the values that the program has assigned on this worker.
        same_weights.refuse_other_weights(model, sharded=True)
    whole_batch.prepare_losses(model)
    whole_batch.prepare_metrics(model)
    # The metrics of `compile` are there now.
    refuse_outside_scope(model)
    _warn_of_unknown_end(model, iterator)
    _verify(model, peek, iterator)


def _warn_of_unknown_end(model, iterator):
    """Warns where an epoch may end between two updates, and Keras finds that out too late."""
    is_fit = marks.CALL.get(model)[0] == "fit" and iterator is not None
    if is_fit and iterator.num_batches is None and accumulation.defers_reduction(model):
        warnings.warn(
            "With `gradient_accumulation_steps` the number of batches in an epoch should be known. "
            "Received: data of unknown size, as from a generator. If an epoch ends between two "
            "updates, Keras drops on one device the gradients that are not applied yet, and "
            "several replicas keep them. Give steps_per_epoch, or use "
            "dataset.apply(tf.data.experimental.assert_cardinality(number_of_batches)).",
            stacklevel=2,
        )


def _verify(model, peek, iterator):
    name, validates = marks.CALL.get(model)
    if name not in _KINDS:
        return
    if _KINDS[name] == TRAIN:
        sharded_parameters.forget_values(model)
    kind, feed = _KINDS[name], feeds.feed_of(functools.cache(peek), iterator)
    feed.validates = name == "fit" and validates
    marks.SAMPLES.set(model, {**marks.SAMPLES.get(model), kind: feeds.samples_of(iterator)})
    # Of an earlier call that has failed.
    take_pending(model, kind)
    if name == "fit":
        marks.FEED.set(model, None)
    if not feed.by_python:
        verify_feed(model, kind, feed)
    elif keras_compat.has_own_function(model, name):
        if verification.may_be_verified(model, kind):
            reason = f"Python code makes the batches, and the model its function of `{name}`"
            warnings.warn(f"`{kind}_step` was not verified: {reason}.", stacklevel=2)
    elif verified.knows(model, kind, feed):
        marks.FEED.set(model, feed if name == "fit" else None)
    else:
        verify_at_first_batch(model, kind, feed)


def verify_at_first_batch(model: keras.Model, kind: str, feed: Feed) -> None:
    """Has a step verified when its next batch has been drawn.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        feed: The description of its data.
    """
    marks.PENDING.set(model, {**marks.PENDING.get(model), kind: feed})


def take_pending(model: keras.Model, kind: str) -> Feed | None:
    """Returns the data with which a step was to be verified, and no longer is; None if none.

    Steps of other kinds are left alone: a callback may call `predict` before the first step.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    pending = dict(marks.PENDING.get(model))
    feed = pending.pop(kind, None)
    marks.PENDING.set(model, pending)
    return feed


def verify_with(model: keras.Model, kind: str, batch) -> None:
    """Verifies a step with a batch that has been drawn, if it is to be.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        batch: The batch, as the replicas receive it.
    """
    feed = take_pending(model, kind)
    feed.peek = lambda: rows.as_user_sees(batch)
    verify_feed(model, kind, feed)
    verified.note_feed(model, kind, feed)


def verify_feed(model: keras.Model, kind: str, feed: Feed) -> None:
    """Verifies a step, of `fit` the one of validation too, and warns of what differs by choice.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
        feed: The description of its data.
    """
    strategy, is_eager = model.distribute_strategy, keras_compat.runs_eagerly(model)
    if is_eager and kind == TRAIN and model.optimizer and strategy.num_replicas_in_sync > 1:
        sparse_gradients.note_positions(model, feed.peek)
    verification.verify_once(model, kind, feed, WORKERS)
    if marks.CALL.get(model)[0] == "fit" and kind == TRAIN:
        marks.FEED.set(model, feed)
    if kind == TRAIN:
        _warn_of_local_normalization(model)
        _warn_of_local_steps(model)
    if feed.validates:
        verification.verify_once(model, TEST, feed, WORKERS, early=True)


def _warn_of_local_normalization(model):
    """Warns once for each model of layers whose result depends on the number of replicas."""
    is_split = not replicated.is_replicated(model, TRAIN)
    layers = local_normalization(model) if is_split else []
    if layers and not marks.WARNED_OF_STATISTICS.get(model):
        marks.WARNED_OF_STATISTICS.set(model, True)
        names = ", ".join(layer.name for layer in layers[:3]) + (" ..." if layers[3:] else "")
        part, advice = _how_batch_is_split(model)
        warnings.warn(
            f"Unsynchronized batch normalization uses the statistics of each {part} alone, so "
            f"the result differs from that of one device: {names}. To get the same result, "
            f"before compile {advice}.",
            stacklevel=2,
        )


def _how_batch_is_split(model):
    """Returns the name of one part of a batch, and how to have batch statistics of all its rows."""
    advice = advice_for_stages(model)
    if not advice:
        return "replica", "call tfmulti.synchronize_batch_normalization(model)"
    micro_batches = max(map(marks.MICRO_BATCHES.get, [model, *keras_compat.all_layers(model)]))
    return "micro-batch" if micro_batches > 1 else "copy of the stages", advice


def _warn_of_local_steps(model):
    """Warns once for each model that its workers take local steps."""
    number = local_steps.steps_of(model)
    if number > 1 and not marks.WARNED_OF_LOCAL_STEPS.get(model):
        marks.WARNED_OF_LOCAL_STEPS.set(model, True)
        warnings.warn(
            f"With synchronize_every={number} each worker takes {number} steps with its own rows "
            "before weights and slots are averaged, so the result differs from that of one device. "
            "What one device would compute from the whole batch, such as synchronized batch "
            "statistics and gather_batch, is computed from the worker's rows. For the same result "
            "use synchronize_every=1.",
            stacklevel=2,
        )


def before_call(model: keras.Model, name: str, data) -> None:
    """Refuses models that replicas cannot run, and has `predict` verified with rows of its data.

    Those are rows from all over arrays and tensors. Of other data no batch may be read but those
    that Keras draws: it would be lost, or the next pass would have another order.
    """
    strategy = model.distribute_strategy
    in_parts = strategy.num_replicas_in_sync > 1 or num_micro_batches(model) > 1
    if name != "predict" or not (keras_compat.is_ours(strategy) and in_parts):
        return
    refuse_stateful(model)
    keras_compat.prepare_global_seeds(strategy)
    feed = feeds.feed_of_predict(data)
    if not (feed.may_be_unequal or verification.may_be_verified(model, PREDICT)):
        return
    if feeds.are_arrays(data):
        verification.verify_once(model, PREDICT, feed, WORKERS)
    else:
        verify_at_first_batch(model, PREDICT, feed)


def adopt_optimizers(model: keras.Model, name: str) -> None:
    """Lets a model with one replica be compiled again outside of its scope, as on one device.

    Args:
        model: The model whose method was called.
        name: The name of the method.
    """
    strategy = model.distribute_strategy
    if keras_compat.is_ours(strategy) and strategy.num_replicas_in_sync == 1:
        own = [getattr(model, "optimizer", None)]
        # Searching for the optimizers of a custom step in every `train_on_batch` would be slow.
        for optimizer in model_contents.optimizers_of(model) if name == "fit" else own:
            keras_compat.adopt_optimizer(optimizer, strategy)


def refuse_stateful(model: keras.Model) -> None:
    """Raises ValueError for layers that keep a state for each row from one batch to the next."""
    layers, strategy = keras_compat.stateful_layers(model), model.distribute_strategy
    where = "on parameter servers" if keras_compat.has_servers(strategy) else "on several replicas"
    if layers and (strategy.num_replicas_in_sync > 1 or keras_compat.has_servers(strategy)):
        raise ValueError(
            "A layer with `stateful=True` keeps a state for each row of the batch, which cannot be "
            "split over replicas or workers. "
            f"Received: {layers[0].name}, stateful=True, {where}. "
            'Use stateful=False, or create_strategy("one_device").'
        )
