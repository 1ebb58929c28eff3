"""Checkpointed activations: less memory for a second forward pass.

A layer runs without keeping its activations, and once more in the backward pass.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel import ahead
from tfmulti.parallel.cutting import Cut, balanced_starts
from tfmulti.step.parameters import (
    ShardedParameter,
    gather,
    in_replica,
    is_stage,
    note_read,
    receive,
)


def checkpoint_activations(
    model: keras.Model, layers: str | Iterable[str | keras.layers.Layer] | None = None
) -> keras.Model:
    """Lets blocks of a model keep their inputs only, and compute the rest again for gradients.

    A stack of n equal blocks then holds the activations of one block and n inputs in place of
    those of all. Each block's forward pass runs twice in a training step, from the same weights,
    statistics and seeds, so that the result is that of the model without it; layers' state
    changes once. It works under every strategy and on one device. Saved files do not have it.

    Args:
        model: A built model.
        layers: Which layers are blocks: a name, a pattern such as `"block_*"`, a layer, or several
            of them. None for every layer of the model that holds layers of its own; a Functional
            or Sequential model that has none is cut into about as many parts as the square root
            of its layers.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has not been built, or nothing is found.
        RuntimeError: When it trains, if a block would not do the same the second time.

    Example:
        >>> hidden = [keras.layers.Dense(4, activation="gelu") for _ in range(9)]
        >>> model = keras.Sequential([keras.Input((4,)), *hidden])
        >>> model = checkpoint_activations(model)

    Sources: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if not model.built or not all(layer.built for layer in keras_compat.all_layers(model)):
        raise ValueError(
            "`checkpoint_activations` needs a model that has been built. Received: "
            f"{model.name!r}, which has not. Give it an `Input`, or call it on a batch first."
        )
    chosen = _blocks(model) if layers is None else _named(model, layers)
    for layer in chosen:
        layer.call = recomputed(layer, layer.call)
    if not chosen:
        _checkpoint_parts(model)
    return model


def _blocks(model):
    """The layers of a model that hold layers; not what is within them."""
    return [each for each in model.layers if each.weights and keras_compat.all_layers(each)]


def _named(model, layers):
    wanted = [layers] if isinstance(layers, (str, keras.layers.Layer)) else list(layers)
    every = keras_compat.all_layers(model)
    found = []
    for each in wanted:
        matches = [layer for layer in every if layer is each or _matches(layer, each)]
        if not matches:
            raise ValueError(
                "`layers` must be names or patterns of layers of the model. Received: "
                f"{each!r}, which fits none of {[layer.name for layer in every]}. Give one of them."
            )
        found += matches
    within = {id(inner) for layer in found for inner in keras_compat.all_layers(layer)}
    return list({id(layer): layer for layer in found if id(layer) not in within}.values())


def _matches(layer, pattern):
    return isinstance(pattern, str) and fnmatch.fnmatchcase(layer.name, pattern)


def _checkpoint_parts(model):
    nodes = keras_compat.nodes_of(model)
    if nodes is None or len(nodes) < 4:
        raise ValueError(
            "`checkpoint_activations` needs blocks: layers that hold other layers, or a Functional "
            f"model of at least four layers. Received: {model.name!r} with layers "
            f"{[layer.name for layer in model.layers]}. Name the layers in `layers`."
        )
    cut = Cut(model, balanced_starts(model))
    # The last part's activations are needed at once, so that it gains nothing from a second run.
    for part in cut.parts[:-1]:
        part.model.call = recomputed(part.model, part.model.call, model)
    model.call = cut.call


def recomputed(
    layer: keras.layers.Layer | None,
    call: Callable,
    model: keras.Model | None = None,
    gathered: Callable[[], list[ShardedParameter]] = list,
) -> Callable:
    """Returns a call that keeps its inputs alone, and is run again in the backward pass.

    Both runs start from the same weights, statistics and seeds, which are read before the first.
    What the call assigns is assigned once, after the first run.

    Args:
        layer: The layer whose variables it uses; None for a function, whose updates are found when
            it runs.
        call: The call.
        model: The model that has the layer's added losses, where the layer is none of its own.
        gathered: Function that returns the sharded parameters which each run gathers. Others are
            gathered wherever they are read.

    Within a stage of a pipeline, which is given its weights and may run again itself, the call is
    run as it is.

    Raises:
        RuntimeError: When it is called and a second run would not do the same: it draws numbers
            from a state that is not Keras's, or assigns to a `tf.Variable`.
    """

    @functools.wraps(call)
    def run(*args, **kwargs):
        unbuilt = layer is not None and not keras_compat.is_built(layer)
        if unbuilt or keras_compat.is_symbolic((args, kwargs)) or is_stage():
            return call(*args, **kwargs)
        whole = gathered()
        if whole and not in_replica():
            return call(*args, **kwargs)
        return _Recomputed(layer, call, args, kwargs, model or layer, whole).outputs()

    return run


class _Recomputed:
    """One call, which runs twice."""

    def __init__(self, layer, call, args, kwargs, holder, gathered):
        self.name = getattr(layer or call, "name", getattr(call, "__qualname__", "a function"))
        self._call, self._holder = call, holder
        self._arguments = (args, kwargs)
        flat = keras.tree.flatten(self._arguments)
        self._inputs = [value for value in flat if tf.is_tensor(value)]
        self.num_inputs = len(self._inputs)
        self._masks = [keras_compat.mask_of(value) for value in self._inputs]
        variables = layer.variables if layer is not None else []
        self._variables = [v for v in variables if not isinstance(v, ShardedParameter)]
        self._gathered, self.num_gathered = gathered, len(gathered)
        # What the first run is given.
        self.tensors = []
        self._context = keras_compat.call_context()
        # Variables of others that the first run has updated, with their values before it.
        self._others = []

    def outputs(self):
        """Runs the call, writes what it assigned, and returns its outputs."""
        masks = [mask for mask in self._masks if mask is not None]
        for each in self._gathered:
            note_read(each)
        values = [each.held() for each in self._gathered]
        values = [*keras_compat.values_of(self._variables), *values]
        tensors = [*self._inputs, *masks, *values]
        results = list(_without_activations(self)(*tensors))
        if keras_compat.is_recorded(tensors):
            ahead.of_step().expect_gradient(self)
        return self._received(results)

    def first_run(self, tensors):
        """Runs the call, and returns all that comes of it as a flat list of tensors."""
        self.tensors = tensors
        gathers = ahead.of_step()
        whole = []
        if self._gathered:
            whole = self.receive(tensors, gathers.begin(tensors[: self.num_inputs]))
        with gathers.within(is_second=False):
            outputs, scope = self._run(tensors, whole)
        self._updated = list(scope.updated.values())
        known = {id(variable) for variable in self._variables}
        others = [v for v in self._updated if id(v) not in known]
        self._others = list(zip(others, keras_compat.values_of(others)))
        self._outputs = outputs
        flat = [value for value in keras.tree.flatten(outputs) if tf.is_tensor(value)]
        masks = [keras_compat.mask_of(value) for value in flat]
        if self._gathered:
            gathers.end(flat)
        self._sent = [keras_compat.WithLogits(value) for value in flat]
        flat = [tensor for each in self._sent for tensor in each.tensors]
        self._output_masks = [mask is not None for mask in masks]
        self._num_losses = len(scope.losses)
        if scope.losses and self._holder is None:
            raise RuntimeError(
                "A function whose activations are computed again cannot call `add_loss`. Received: "
                f"{self.name}, with a layer that does. Give the layer itself to `keras.remat`, or "
                "use tfmulti.checkpoint_activations."
            )
        # Not with the outputs: TensorFlow 2.21 lets a variable be read after the assignment of a
        # value that leaves `tf.custom_gradient` together with what was computed of the read one.
        self._updates = [scope.get_current_value(variable) for variable in self._updated]
        return [*flat, *scope.losses, *[mask for mask in masks if mask is not None]]

    def second_run(self, tensors, whole):
        """Runs the call, and returns what gradients come from: its outputs and its losses."""
        outputs, scope = self._run(tensors, whole)
        values = [value for value in keras.tree.flatten(outputs) if tf.is_tensor(value)]
        flat = [tensor for value in values for tensor in keras_compat.WithLogits(value).tensors]
        return [*flat, *scope.losses]

    def num_values(self, tensors: list[tf.Tensor]) -> int:
        """Returns how many of the tensors that a run is given are differentiable weights."""
        first = len(tensors) - len(self._variables) - self.num_gathered
        return sum(_is_differentiable(tensor) for tensor in tensors[first:])

    def receive(self, tensors: list[tf.Tensor], after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole values of what the call gathers.

        Args:
            tensors: What a run is given.
            after: The tensors that come first. TensorFlow would gather all weights at once.
        """
        held = tensors[len(tensors) - self.num_gathered :]
        with tf.control_dependencies(after):
            return [receive(v, tf.identity(part)) for v, part in zip(self._gathered, held)]

    def _run(self, tensors, whole):
        tensors = list(tensors)
        inputs = [tensors.pop(0) for _ in self._inputs]
        for value, mask in zip(inputs, self._masks):
            if mask is not None:
                keras_compat.set_mask(value, tensors.pop(0))
        args, kwargs = _filled(self._arguments, inputs)
        held = tensors[len(self._variables) :]
        gathered = zip(self._gathered, held, whole)
        whole = [gather(v, part, whole=value) for v, part, value in gathered]
        state = [*zip(self._variables, tensors), *zip(self._gathered, whole), *self._others]
        with self._context(), keras_compat.RecordingScope(state) as scope:
            return self._call(*args, **kwargs), scope

    def _received(self, results):
        flat = [each.restored([results.pop(0) for _ in each.tensors]) for each in self._sent]
        for loss in [results.pop(0) for _ in range(self._num_losses)]:
            # `Functional.add_loss` is for symbolic tensors alone.
            keras.layers.Layer.add_loss(self._holder, loss)
        for value, has_mask in zip(flat, self._output_masks):
            if has_mask:
                keras_compat.set_mask(value, results.pop(0))
        for variable, value in zip(self._updated, self._updates):
            variable.assign(value)
        return _filled(self._outputs, flat)


def _filled(structure, tensors):
    """Returns a structure with other tensors in the places of its own."""
    remaining = list(tensors)
    return keras.tree.map_structure(
        lambda value: remaining.pop(0) if tf.is_tensor(value) else value, structure
    )


def _without_activations(run: _Recomputed) -> Callable:
    """Returns the call as a function of tensors with a gradient that computes it again."""

    @tf.custom_gradient
    def compute(*tensors):
        # What is stopped is on no tape, and so no activation is kept.
        outputs = _refusing_unrepeatable(run, [_stopped(tensor) for tensor in tensors])

        def gradient(*upstream, variables=None):
            given = _after(upstream, tensors, run.num_inputs)
            gathers = ahead.of_step()
            whole = gathers.take(run, given, given[: run.num_inputs])
            sources = [tensor for tensor in given if _is_differentiable(tensor)]
            with gathers.within(is_second=True):
                with tf.GradientTape() as tape:
                    tape.watch(sources)
                    again = run.second_run(given, whole)
                pairs = [(y, dy) for y, dy in zip(again, upstream) if _is_differentiable(y)]
                found = tape.gradient(
                    [y for y, _ in pairs],
                    [sources, list(variables or ())],
                    output_gradients=[dy for _, dy in pairs],
                )
            dense = iter(_dense(found[0], len(sources) - run.num_values(given)))
            gradients = [next(dense) if _is_differentiable(x) else None for x in given]
            return (gradients, found[1]) if variables else gradients

        return outputs, gradient

    return compute


def _refusing_unrepeatable(run, tensors):
    if tf.executing_eagerly():
        return run.first_run(tensors)
    since = keras_compat.next_op()
    outputs = run.first_run(tensors)
    found = keras_compat.unrepeatable_ops(since)
    if found:
        raise RuntimeError(
            "A layer whose activations are checkpointed runs twice, and must do the same both "
            f"times. Received: {run.name}, which uses {', '.join(found)}. Draw with `keras.random` "
            "and a `keras.random.SeedGenerator`, keep state in `self.add_weight`, or leave the "
            "layer out of `layers`."
        )
    return outputs


def _after(upstream, tensors, num_inputs):
    """Returns the tensors in a way that lets nothing be computed of them before the gradients.

    Otherwise TensorFlow would find that the second run computes what the first did, and keep
    that; or run it first of all. XLA knows no order but that of data: the zero, which no
    compiler knows to be one, makes the inputs depend on the gradients.
    """
    given = [each for each in upstream if each is not None]
    with tf.control_dependencies(given):
        tensors = [tf.identity(tensor) for tensor in tensors]
    if tf.executing_eagerly() or not given:
        return tensors
    entry = tf.reduce_max(tf.reshape(given[0], [-1])[:1])
    zero = tf.math.is_nan(entry) & tf.math.is_inf(entry)
    inputs = [x if x.dtype == tf.bool else x + tf.cast(zero, x.dtype) for x in tensors[:num_inputs]]
    return [*inputs, *tensors[num_inputs:]]


def _stopped(tensor):
    return tf.stop_gradient(tensor) if _is_differentiable(tensor) else tensor


def _is_differentiable(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _dense(gradients, num_dense):
    """Makes gradients dense, but for those of weights, which come last: a table's are of rows."""
    dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients[:num_dense]]
    return [*dense, *gradients[num_dense:]]
