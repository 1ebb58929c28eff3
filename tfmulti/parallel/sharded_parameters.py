"""Shards large weights of a model at their creation; layers gather them for each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel.activations import call_that_runs_once, recomputed
from tfmulti.step import model_contents, parameters, slots
from tfmulti.step.split_weights import SplitParameter

# Layers that gather the weights of those within them: loops gather once for all of their steps,
# and the last one assigns the weight that the inner layer reads next.
_GATHERING_INNER_WEIGHTS = (
    keras.layers.RNN,
    keras.layers.TimeDistributed,
    keras.layers.SpectralNormalization,
)


@contextlib.contextmanager
def sharded_parameters() -> Iterator[None]:
    """Shards large weights as layers create them, so that no worker ever has the whole model.

    Keras creates all weights of a subclassed model at once if a call builds it: have its `build`
    build its layers. What `keras.models.load_model` compiles gets a sharded optimizer.

    Without it, `DistributedOptimizer(optimizer, shard="parameters")` shards the weights of a built
    model, which must fit on each worker until then. In one process large weights stay in host
    memory after their creation until `pipeline` moves them to the devices of their stages; those
    that it does not move go to the strategy's device when the context ends.

    Raises:
        ValueError: If it is not used in a strategy's scope, or a worker has several replicas.

    Example:
        >>> import tfmulti
        >>> strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
        >>> with strategy.scope(), tfmulti.sharded_parameters():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

    Sources: Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models"; Zhao et al., 2023, "PyTorch FSDP".
    """
    strategy = tf.distribute.get_strategy()
    if not tf.distribute.has_strategy():
        raise ValueError(
            "`sharded_parameters` must be used in a strategy's scope. Received: no scope. "
            "Write `with strategy.scope(), tfmulti.sharded_parameters():`."
        )
    if strategy.num_replicas_in_sync == 1:
        with _in_host_memory(strategy):
            yield
        return
    parameters.refuse_several_replicas(strategy, "sharded_parameters")
    sharded = parameters.of_strategy(strategy)

    def shard(variable):
        if variable.trainable:
            sharded.shard(variable)

    with keras_compat.after_add_weight(shard):
        yield


@contextlib.contextmanager
def _in_host_memory(strategy) -> Iterator[None]:
    """Keeps large weights that layers create in host memory until the context ends."""
    device, moved = strategy.extended.worker_devices[0], []
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy) or device.endswith("CPU:0"):
        yield
        return

    def move(variable):
        if keras_compat.is_initialized(variable) and parameters.is_large(variable):
            keras_compat.put_on(variable, "CPU:0")
            moved.append(variable)

    with keras_compat.after_add_weight(move):
        yield
    for variable in moved:
        if not marks.IN_STAGE.get(variable):
            keras_compat.put_on(variable, device)


def gather_in_calls(model: keras.Model) -> None:
    """Makes each layer gather its sharded weights only during its calls, and again for gradients.

    Args:
        model: A built model.
    """
    optimizer = keras_compat.inner_optimizer(model.optimizer)
    shards = marks.SHARDS.get(optimizer)
    if shards is not None and shards.shards_parameters:
        sharded = parameters.of_strategy(model.distribute_strategy)
        for layer in keras_compat.all_layers(model):
            for variable in keras_compat.own_weights(layer):
                if not parameters.is_state(variable, layer):
                    sharded.shard(variable, keep=True)
    gather_present(model)


def gather_present(model: keras.Model) -> None:
    """Does so for weights that are sharded already, before a trace that builds the rest.

    Args:
        model: A model, of which some layers may not be built.
    """
    if marks.PARAMETERS.get(model.distribute_strategy) is None:
        return
    for layer in _gathering_layers(model):
        # Of a checkpointed layer too: gathering runs it again for gradients anyway.
        call = call_that_runs_once(layer)
        layer.call = recomputed(layer, call, gathered=lambda layer=layer: _sharded(layer))
        marks.GATHERS.set(layer, True)


def recompute_as_if_sharded(model: keras.Model) -> None:
    """Makes layers compute again for gradients as sharded ones do, with weights that are whole.

    Args:
        model: A built model.
    """
    for layer in _outermost(model, lambda layer: any(map(parameters.is_large, _weights(layer)))):
        layer.call = recomputed(layer, layer.call)


def refuse_other_optimizers(model: keras.Model) -> None:
    """Raises ValueError if a model with sharded weights has an optimizer that needs them whole."""
    if not parameters.has_sharded(model):
        return
    for optimizer in model_contents.optimizers_in_use(model, nested=True):
        inner = keras_compat.inner_optimizer(optimizer)
        shards = marks.SHARDS.get(inner)
        if shards is None or not shards.shards_parameters:
            raise ValueError(
                "Sharded weights need an optimizer that updates each on its owner. Received: "
                f"{model.name!r} with sharded weights, and {inner.name} without "
                "shard='parameters'. Compile with tfmulti.DistributedOptimizer(optimizer, "
                "shard='parameters'); if it is that of an inner model that the step does not "
                "update, set trainable = False in that model."
            )


def forget_values(model: keras.Model) -> None:
    """Forgets the values of other workers' weights, before steps that change them."""
    for variable in model.variables:
        if isinstance(variable, parameters.ShardedParameter):
            slots.forget_kept(variable)


def _gathering_layers(model):
    """Returns layers with sharded weights, without those whose weights an outer layer gathers."""
    found = _outermost(model, _sharded)
    return [layer for layer in found if not marks.GATHERS.get(layer)]


def _outermost(model, has_weights):
    layers = keras_compat.all_layers(model)
    outer = [layer for layer in layers if isinstance(layer, _GATHERING_INNER_WEIGHTS)]
    within = {id(inner) for layer in outer for inner in keras_compat.all_layers(layer)}
    return [layer for layer in layers if id(layer) not in within and has_weights(layer)]


def _sharded(layer):
    """Returns the sharded weights that a layer gathers for its calls."""
    own = _weights(layer)
    if any(isinstance(each, SplitParameter) for each in own):
        # A second run of a split layer would exchange its rows again.
        return []
    return [each for each in own if isinstance(each, parameters.ShardedParameter)]


def _weights(layer):
    """Returns a layer's own weights, or all within it if they are gathered for it."""
    has_inner = isinstance(layer, _GATHERING_INNER_WEIGHTS)
    return layer.weights if has_inner else keras_compat.own_weights(layer)
