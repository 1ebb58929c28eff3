"""Checkpointed activations save memory at the cost of a second forward pass.

A layer runs without keeping its activations, and runs again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel import components, kept_tensors, prefetch, repeatable
from tfmulti.parallel.blocks import find_layers, layers_with_layers
from tfmulti.parallel.cutting import Cut, refuse_own_call, starts_by_activations
from tfmulti.settings import check_type
from tfmulti.step.parameters import (
    ShardedParameter,
    gather,
    in_replica,
    is_stage,
    note_read,
    receive,
)
from tfmulti.step.row_axis import AFTER
from tfmulti.step.rows import in_branch


def checkpoint_activations(
    model: keras.Model, layers: str | Iterable[str | keras.layers.Layer] | None = None
) -> keras.Model:
    """Makes blocks of a model keep only their inputs, and compute activations again for gradients.

    A stack of n equal blocks then holds the activations of one block and the inputs of all n,
    instead of all activations. Each block's forward pass runs twice in a training step, with the
    same weights, statistics and seeds, so results do not change; the state of layers is updated
    once. It works under every strategy and on one device. Saved files do not contain the setting.

    Args:
        model: A built model.
        layers: The layers that are blocks: a name, a pattern such as `"block_*"`, a layer, or
            several of them. None for every layer of the model that contains layers and has
            weights; a Functional or Sequential model without such layers is cut into about as many
            parts as the square root of the number of its layers.

    Returns:
        The same model.

    Raises:
        ValueError: If the model has not been built, is in a pipeline, or has no such layers; if it
            would be cut, and has a `call` of its own; when it is called, if it was cut and its
            layers have changed.
        RuntimeError: In training, if the second run of a block would differ from the first.

    Example:
        >>> hidden = [keras.layers.Dense(4, activation="gelu") for _ in range(9)]
        >>> model = keras.Sequential([keras.Input((4,)), *hidden])
        >>> model = checkpoint_activations(model)

    Sources: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    check_type("model", model, keras.Model, "a Keras model", "Pass a built model.")
    if not keras_compat.has_built_layers(model):
        raise ValueError(
            "`checkpoint_activations` needs a model that has been built. Received: "
            f"{model.name!r}, which has not. Give it an `Input`, or call it on a batch first."
        )
    if any(getattr(v, "stages", None) or marks.IN_STAGE.get(v) for v in model.variables):
        raise ValueError(
            "`tfmulti.checkpoint_activations` cannot be combined with a pipeline, which has its "
            f"own option for it. Received: {model.name!r}, which tfmulti.pipeline has cut. Use "
            "tfmulti.pipeline(..., checkpoint_activations=True)."
        )
    blocks = layers_with_layers(model) if layers is None else find_layers(model, layers)
    # Another call for the same layers would make each of them run three times.
    new = [layer for layer in blocks or [model] if not marks.CHECKPOINTED.get(layer)]
    for layer in new:
        if blocks:
            layer.call = recomputed(layer, layer.call)
        else:
            _checkpoint_parts(model)
        marks.CHECKPOINTED.set(layer, True)
    # Functions that `fit` and others have traced call the layers as they were; Keras makes new
    # ones.
    model.train_function = model.test_function = model.predict_function = None
    return model


def _checkpoint_parts(model):
    nodes = keras_compat.nodes_of(model)
    if nodes is None or len(nodes) < 4:
        raise ValueError(
            "`checkpoint_activations` needs blocks: layers that hold other layers, or a Functional "
            "model of at least four layers besides its inputs. Received: "
            f"{model.name!r} with {[layer.name for layer in model.layers]}. "
            "Name the layers in `layers`."
        )
    refuse_own_call(model, "checkpoint_activations", "Name the layers in `layers`.")
    cut = Cut(model, starts_by_activations(model))
    # The backward pass uses the last part's activations at once: a second run would save nothing.
    for part in cut.parts[:-1]:
        part.model.call = recomputed(part.model, part.model.call, model)
    model.call = cut.call


def recomputed(
    layer: keras.layers.Layer | None,
    call: Callable,
    model: keras.Model | None = None,
    gathered: Callable[[], list[ShardedParameter]] = list,
) -> Callable:
    """Returns a call that keeps only its inputs, and runs again in the backward pass.

    Both runs start from the same weights, statistics and seeds, which are read before the first.
    Variables that the call assigns are assigned once, after the first run. Within a stage of a
    pipeline, which is given its weights and may run again itself, the call runs unchanged.

    Args:
        layer: The layer whose variables the call uses; None for a function, whose updates are
            found when it runs.
        call: The call.
        model: The model that receives the losses that the layer adds; None for the layer itself.
        gathered: Function that returns the sharded parameters that each run gathers first. Other
            ones are gathered wherever they are read.

    Raises:
        RuntimeError: When it is called, if a second run would differ from the first: the call draws
            random numbers from a state that is not Keras's, or assigns to a `tf.Variable`.
    """
    keras_compat.install_for_repeated_calls(recomputed)
    known = repeatable.Known()

    @functools.wraps(call)
    def run(*args, **kwargs):
        unbuilt = layer is not None and not keras_compat.has_built_layers(layer)
        if unbuilt or keras_compat.is_symbolic((args, kwargs)) or is_stage():
            return call(*args, **kwargs)
        sharded = gathered()
        if sharded and (in_branch() or not in_replica()):
            return call(*args, **kwargs)
        # TensorFlow converts the operations of such a loop, and loses gradients of our own.
        if keras_compat.in_vectorized_loop():
            return call(*args, **kwargs)
        # Forward-mode differentiation does not look into a gradient of our own.
        if keras_compat.is_differentiating_forward() or known.runs_once:
            return call(*args, **kwargs)
        repeatable.refuse_assigned(sharded)
        each = _RepeatedCall(layer, call, args, kwargs, model or layer, sharded, known)
        number = keras_compat.num_draws()
        try:
            return each.outputs()
        except keras_compat.AssignsInInnerGraph:
            keras_compat.forget_draws_after(number)
            known.note_kept(layer or call)
            return call(*args, **kwargs)

    run.is_recomputed = True
    return run


def call_that_runs_once(layer: keras.layers.Layer) -> Callable:
    """Returns a layer's call as it was before `recomputed` replaced it."""
    return layer.call.__wrapped__ if getattr(layer.call, "is_recomputed", False) else layer.call


class _RepeatedCall:
    """One call of a layer or a function that runs twice: for its outputs, and for gradients.

    Args:
        layer: The layer, or None for a function.
        call: The layer's own call, or the function.
        args: Its arguments.
        kwargs: Its keyword arguments.
        loss_owner: The layer or model that receives added losses; None for a function.
        gathered: The sharded parameters that each run gathers first.
        known: What earlier calls have found.

    Attributes:
        name: The name for messages.
        known: What earlier calls have found.
        tensors: The tensors that the first run was given: inputs, their masks, values of variables,
            and this worker's parts of the gathered parameters.
        num_inputs: How many of them are inputs.
        num_gathered: How many of them, the last ones, are parts of gathered parameters.
        whole: The gathered parameters of the first run, where a graph is built.
        runs_again: Whether a tape records it.
        reads: Checks which tensors the call and code outside of it read.
    """

    def __init__(self, layer, call, args, kwargs, loss_owner, gathered, known):
        self.name = repeatable.name_of(layer or call)
        self.known = known
        self._call, self._loss_owner = call, loss_owner
        self._arguments = (args, kwargs)
        self._kept = kept_tensors.KeptTensors(layer)
        self._inputs = [*components.tensors_of(self._arguments), *self._kept.found]
        self.num_inputs = len(components.parts_of(self._inputs))
        self._masks = [keras_compat.mask_of(value) for value in self._inputs]
        variables = components.variables_of(self._arguments)
        if layer is not None:
            variables += layer.variables
        by_id = {id(variable): variable for variable in variables}
        self._variables = [v for v in by_id.values() if not isinstance(v, ShardedParameter)]
        self._gathered, self.num_gathered = gathered, len(gathered)
        self.tensors, self.whole, self.runs_again = [], [], False
        self._context = keras_compat.call_context()
        # Variables of other layers that the first run has updated, with their values before it.
        self._others = []
        self.reads = kept_tensors.Reads(self.name, layer)

    def outputs(self):
        """Runs the call, assigns the variables that it updated, and returns its outputs."""
        masks = [mask for mask in self._masks if mask is not None]
        for each in self._gathered:
            note_read(each)
        held = [each.held() for each in self._gathered]
        state = keras_compat.values_of(self._variables)
        tensors = [*components.parts_of(self._inputs), *masks, *state, *held]
        self.runs_again = keras_compat.is_recorded(tensors)
        results = list(_without_activations(self)(*tensors))
        for value in self._unmasked:
            keras_compat.remove_mask(value)
        if self.runs_again:
            prefetch.of_step().expect_gradient(self)
        return self._unpack(results)

    def first_run(self, tensors):
        """Runs the call, and returns its outputs, losses and masks as a flat list of tensors."""
        self.tensors = tensors
        gathers = prefetch.of_step()
        whole = []
        if self._gathered:
            whole = self.receive(tensors, gathers.begin(tensors[: self.num_inputs]))
        self.whole = [] if tf.executing_eagerly() else whole
        with gathers.within(is_second=False):
            outputs, scope = self._run(tensors, whole)
        self._updated = list(scope.updated.values())
        own = {id(variable) for variable in [*self._variables, *self._gathered]}
        others = [v for v in self._updated if id(v) not in own]
        self._others = list(zip(others, keras_compat.values_of(others)))
        self._outputs = outputs
        self._tensors = components.tensors_of(outputs)
        masks = [keras_compat.mask_of(value) for value in self._tensors]
        flat = components.parts_of(self._tensors)
        if self._gathered:
            gathers.end(flat)
        self._with_logits = [keras_compat.WithLogits(value) for value in flat]
        flat = [tensor for output in self._with_logits for tensor in output.tensors]
        flat += self._kept.left()
        self._output_masks = [mask is not None for mask in masks]
        self._num_losses = len(scope.losses)
        if scope.losses and self._loss_owner is None:
            raise RuntimeError(
                "A function passed to `keras.remat` cannot call `add_loss`. Received: "
                f"{self.name}, which calls a layer that does. Pass the layer itself to "
                "`keras.remat`, or use tfmulti.checkpoint_activations."
            )
        # Not returned with the outputs: where a new value leaves `tf.custom_gradient` together with
        # results computed from the old one, TensorFlow 2.21 may assign before it reads.
        self._updates = [scope.get_current_value(variable) for variable in self._updated]
        return [*flat, *scope.losses, *[mask for mask in masks if mask is not None]]

    def others(self) -> list[tf.Tensor]:
        """Returns tensors of the first run that are used later, beside those it has returned."""
        states = [value for _, value in self._others]
        return [*states, *self._updates, *components.parts_of(self._tensors)]

    def second_run(self, tensors, whole):
        """Runs the call again, and returns its outputs and losses, which have gradients."""
        with self._kept.again() as kept:
            outputs, scope = self._run(tensors, whole)
        flat = components.parts_of(components.tensors_of(outputs))
        with_logits = [tensor for x in flat for tensor in keras_compat.WithLogits(x).tensors]
        return [*with_logits, *kept, *scope.losses]

    def num_weights(self, tensors: list[tf.Tensor]) -> int:
        """Returns how many of a run's tensors are differentiable weights."""
        first = len(tensors) - len(self._variables) - self.num_gathered
        return sum(_is_differentiable(tensor) for tensor in tensors[first:])

    def receive(self, tensors: list[tf.Tensor], after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the whole values of the gathered parameters.

        Args:
            tensors: The tensors of a run.
            after: Tensors that are computed first. TensorFlow would gather all weights at once.
        """
        held = tensors[len(tensors) - self.num_gathered :]
        with tf.control_dependencies(after):
            return [receive(v, tf.identity(part)) for v, part in zip(self._gathered, held)]

    def _run(self, tensors, whole):
        tensors = list(tensors)
        inputs = components.take(self._inputs, tensors)
        masked = [value for value, mask in zip(inputs, self._masks) if mask is not None]
        for value in masked:
            keras_compat.set_mask(value, tensors.pop(0))
        args, kwargs = components.filled(self._arguments, inputs)
        self._kept.give(inputs[len(inputs) - len(self._kept.found) :])
        held = tensors[len(self._variables) :]
        gathered = zip(self._gathered, held, whole)
        whole = [gather(v, part, whole=value) for v, part, value in gathered]
        state = [*zip(self._variables, tensors), *zip(self._gathered, whole), *self._others]
        with self._context(), keras_compat.RecordingScope(state) as scope:
            # The trace of a function would hold the tensors of the run in which it was made.
            with keras_compat.traces_of_its_own(), repeatable.explaining_values(self.name):
                # A variable that it returns has a value of this run.
                outputs = components.without_variables(self._call(*args, **kwargs))
        # Attention takes away the masks of its inputs.
        masked = zip(masked, [x for x, mask in zip(self._inputs, self._masks) if mask is not None])
        self._unmasked = [x for own, x in masked if keras_compat.mask_of(own) is None]
        return outputs, scope

    def _unpack(self, results):
        """Returns the outputs from the flat results of the first run; adds losses and assigns."""
        restored = [
            output.restored([results.pop(0) for _ in output.tensors])
            for output in self._with_logits
        ]
        self._kept.replace([results.pop(0) for _ in range(self._kept.number)])
        flat = components.take(self._tensors, restored)
        for loss in [results.pop(0) for _ in range(self._num_losses)]:
            # `Functional.add_loss` takes symbolic tensors only.
            keras.layers.Layer.add_loss(self._loss_owner, loss)
        for value, has_mask in zip(flat, self._output_masks):
            if has_mask:
                keras_compat.set_mask(value, results.pop(0))
        for variable, value in zip(self._updated, self._updates):
            variable.assign(value)
        return components.filled(self._outputs, flat)


def _without_activations(run: _RepeatedCall) -> Callable:
    """Returns the call as a function of tensors with a gradient that computes it again."""

    @tf.custom_gradient
    def compute(*tensors):
        # No tape records tensors after `stop_gradient`, so no activation is kept.
        stopped = [tf.stop_gradient(x) if _is_differentiable(x) else x for x in tensors]
        outputs = repeatable.first_run(run, stopped)

        def gradient(*upstream, variables=None):
            run.reads.refuse_later()
            again = _computed_after(upstream, tensors, run.num_inputs)
            gathers = prefetch.of_step()
            whole = gathers.take(run, again, again[: run.num_inputs])
            sources = [tensor for tensor in again if _is_differentiable(tensor)]
            with gathers.within(is_second=True):
                with tf.GradientTape() as tape:
                    tape.watch(sources)
                    results = run.second_run(again, whole)
                pairs = [(y, dy) for y, dy in zip(results, upstream) if _is_differentiable(y)]
                of_sources, of_variables = tape.gradient(
                    [y for y, _ in pairs],
                    [sources, list(variables or ())],
                    output_gradients=[dy for _, dy in pairs],
                )
            # Gradients of weights, which come last, may be sparse: those of embedding tables.
            num_dense = len(sources) - run.num_weights(again)
            dense = [None if g is None else tf.convert_to_tensor(g) for g in of_sources[:num_dense]]
            rest = iter([*dense, *of_sources[num_dense:]])
            gradients = [next(rest) if _is_differentiable(x) else None for x in again]
            return (gradients, of_variables) if variables else gradients

        return outputs, gradient

    return compute


def _computed_after(upstream, tensors, num_inputs):
    """Returns copies of tensors on which nothing can be computed before the upstream gradients.

    Otherwise TensorFlow would see that the second run repeats the first and keep the first one's
    activations, or run the second early. XLA ignores control dependencies: there the inputs get a
    zero added that depends on the gradients, and that no compiler can prove to be zero.
    """
    present = [grad for grad in upstream if grad is not None]
    with tf.control_dependencies(present):
        tensors = [tf.identity(tensor) for tensor in tensors]
    # For an output of whole numbers or bools a tape passes zeros of that dtype.
    numbers = [grad for grad in present if _is_differentiable(grad)]
    if tf.executing_eagerly() or not numbers:
        return tensors
    entry = tf.reduce_max(tf.math.real(tf.reshape(numbers[0], [-1])[:1]))
    zero = tf.math.is_nan(entry) & tf.math.is_inf(entry)
    inputs = [
        tf.add(x, tf.cast(zero, x.dtype), name=AFTER)
        if _is_differentiable(x) or x.dtype.is_integer
        else x
        for x in tensors[:num_inputs]
    ]
    return [*inputs, *tensors[num_inputs:]]


def _is_differentiable(tensor):
    return tensor.dtype.is_floating or tensor.dtype.is_complex
