"""The stages of a pipeline: parts of a model as functions from tensors to tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel.cutting import Cut, Part
from tfmulti.step import normalization, parameters
from tfmulti.step.rows import as_current


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Describes the tensors before or after a stage: values, then their masks, then added losses.

    An added loss is passed on as a row of two numbers for each row; see `_loss_by_rows`.

    Attributes:
        tensors: Ids of the model's symbolic tensors whose values are passed on.
        has_mask: Which of them have a mask.
        activations: For each tensor the sigmoid or softmax whose logits are passed on in its
            place, because Keras computes cross-entropy from logits; None for the others.
        specs: The dtype and shape of every tensor that is passed on, with any number of rows.
    """

    tensors: tuple[int, ...]
    has_mask: tuple[bool, ...]
    activations: tuple[Callable | None, ...]
    specs: tuple[tf.TensorSpec, ...]

    @classmethod
    def of(cls, tensors, values: dict, losses: list, like=None) -> tuple[Boundary, list]:
        """Returns the `Boundary` of values and losses, and a flat list of what is passed on.

        Args:
            tensors: Ids of the model's symbolic tensors.
            values: Their values by id.
            losses: Added losses, as `_loss_by_rows` returns them.
            like: A `Boundary` of the same tensors that was made in a graph, where activations
                can be recognized.
        """
        chosen = [values[tensor] for tensor in tensors]
        masks = [keras_compat.mask_of(value) for value in chosen]
        activations = like.activations if like else tuple(map(_activation_of, chosen))
        chosen = [
            value if activation is None else keras_compat.noted_logits(value)
            for value, activation in zip(chosen, activations)
        ]
        flat = [*chosen, *(mask for mask in masks if mask is not None), *losses]
        specs = [tf.TensorSpec([None, *value.shape[1:]], value.dtype) for value in flat]
        has_mask = tuple(mask is not None for mask in masks)
        return cls(tuple(tensors), has_mask, activations, tuple(specs)), flat

    def values(self, flat) -> tuple[dict, list]:
        """Returns the values by id, with their masks, and the losses."""
        flat = list(flat)
        values = {tensor: tf.identity(flat.pop(0)) for tensor in self.tensors}
        for each, activation in zip(self.tensors, self.activations):
            if activation is not None:
                values[each] = keras_compat.activated(activation, values[each])
        for each, has_mask in zip(self.tensors, self.has_mask):
            if has_mask:
                keras_compat.set_mask(values[each], flat.pop(0))
        return values, flat

    def floats(self, flat) -> list:
        """Returns the tensors that have gradients."""
        return [each for each, is_float in zip(flat, self.is_float) if is_float]

    @property
    def is_float(self) -> list[bool]:
        """Which of the tensors have gradients."""
        return [spec.dtype.is_floating or spec.dtype.is_complex for spec in self.specs]


def _activation_of(value):
    noted = keras_compat.noted_logits(value) is not None
    return keras_compat.activation_of(value) if noted else None


@dataclasses.dataclass(frozen=True)
class StageTrace:
    """What tracing a stage has shown.

    Attributes:
        before: Describes the inputs.
        after: Describes the outputs.
        updated: The variables that it updates and no stage before it does.
        shared: The variables that it updates and a stage before it does too.
        num_draws: How many random tensors it draws, where that is counted.
        sources: For each floating-point output, what it has a gradient with respect to: the numbers
            of the floating-point inputs, then, counted on, of the weights.
    """

    before: Boundary
    after: Boundary
    updated: tuple[keras.Variable, ...]
    shared: tuple[keras.Variable, ...]
    num_draws: int
    sources: tuple[frozenset[int], ...]


class Stage:
    """A part of a model that one worker or device computes.

    Args:
        part: The part.
        outputs: Ids of the symbolic tensors whose values it passes on.

    Attributes:
        weights: The weights whose values `run` is given.
    """

    def __init__(self, part: Part, outputs: tuple[int, ...]):
        self._part, self._outputs = part, outputs
        given = {id(each) for each in weights_of(part.model)}
        self.weights = [
            variable
            for variable in part.model.variables
            if id(variable) in given or isinstance(variable, parameters.ShardedParameter)
        ]

    def run(self, before: Boundary, flat, weights, state, training, after=None):
        """Computes the stage on some rows.

        Args:
            before: Describes `flat`.
            flat: The outputs of the stage before.
            weights: Values of `weights`.
            state: Pairs of a variable and its value, for variables that stages update.
            training: As in a layer's call.
            after: Describes the outputs, if a trace has shown them.

        Returns:
            The `Boundary` after the stage, its outputs, and the state after it.
        """
        values, losses = before.values(flat)
        given = [values[each] for each in self._part.inputs]
        scope = keras_compat.RecordingScope([*zip(self.weights, weights), *state])
        # Batch normalization uses the statistics of this micro-batch.
        layers = normalization.synchronized_layers(self._part.model)
        local = normalization.synchronized(layers, False)
        with as_current(None), parameters.stage(), local, scope:
            results = self._part.model(given if len(given) > 1 else given[0], training=training)
        values.update(zip(self._part.outputs, keras.tree.flatten(results)))
        losses += [_loss_by_rows(loss, given[0]) for loss in scope.losses]
        after, flat = Boundary.of(self._outputs, values, losses, after)
        new = {id(variable): (variable, value) for variable, value in state}
        for variable in scope.updated.values():
            new[id(variable)] = variable, scope.get_current_value(variable)
        return after, flat, list(new.values())


def _loss_by_rows(loss, given) -> tf.Tensor:
    """Returns an added loss as two columns: one to take the mean of, and one to add up.

    Keras adds up a loss of several numbers. Those of rows are added over all micro-batches; any
    other loss is of the micro-batch, and the batch's is the mean.
    """
    rows = tf.shape(given)[:1]
    if loss.shape.rank and loss.shape[0] == given.shape[0]:
        of_rows = tf.reduce_sum(loss, axis=range(1, loss.shape.rank))
        return tf.stack([tf.zeros_like(of_rows), of_rows], axis=1)
    of_all = tf.fill(rows, tf.reduce_sum(loss))
    return tf.stack([of_all, tf.zeros_like(of_all)], axis=1)


def added_up(loss: tf.Tensor) -> tf.Tensor:
    """Returns an added loss as one number, from what the stages have passed on."""
    return tf.reduce_mean(loss[:, 0]) + tf.reduce_sum(loss[:, 1])


def stages_of(cut: Cut) -> list[Stage]:
    """Returns the stages of a model that is cut into parts."""
    stages, known = [], [id(x) for x in cut.inputs]
    outputs = [id(x) for x in cut.outputs]
    for place, part in enumerate(cut.parts):
        later = {each for other in cut.parts[place + 1 :] for each in other.inputs} | set(outputs)
        known += [output for output in part.outputs if output not in known]
        is_last = place == len(cut.parts) - 1
        stages.append(Stage(part, tuple(outputs if is_last else [x for x in known if x in later])))
    return stages


def trace_stages(
    stages: list[Stage], before: Boundary, training, *, recomputes: bool = False
) -> list[StageTrace]:
    """Traces all stages one after the other, without running them.

    The traces tell each worker what the others will send.

    Args:
        stages: The stages.
        before: Describes the inputs of the first stage.
        training: As in a layer's call.
        recomputes: Whether stages run again for gradients.

    Raises:
        ValueError: For a stage that cannot be run on other devices, or not again.
    """
    traces: list[StageTrace] = []

    def trace(*flat):
        taken, flat, state = before, list(flat), []
        with keras_compat.draws_of() as draws:
            for stage in stages:
                drawn = draws.number if draws is not None else 0
                weights = [tf.zeros(weight.shape, weight.dtype) for weight in stage.weights]
                before_it = {id(variable): value for variable, value in state}
                given, since = [*taken.floats(flat), *weights], keras_compat.next_op()
                with tf.GradientTape() as tape:
                    after, flat, state = stage.run(taken, flat, weights, state, training)
                if recomputes and training is not False:
                    _refuse_other_results(keras_compat.own_ops(since), len(traces))
                _refuse_other_variables(tape.watched_variables())
                sources = tuple(keras_compat.sources_of(x, given) for x in after.floats(flat))
                _refuse_without_rows(after)
                held = {id(weight) for weight in stage.weights}
                refuse_assigned_weights(v.path for v, _ in state if id(v) in held)
                known = {id(variable) for trace in traces for variable in trace.updated}
                new = tuple(variable for variable, _ in state if id(variable) not in known)
                shared = tuple(
                    variable
                    for variable, value in state
                    if id(variable) in known and before_it[id(variable)] is not value
                )
                number = draws.number - drawn if draws is not None else 0
                traces.append(StageTrace(taken, after, new, shared, number, sources))
                taken = after
        return tf.constant(0)

    tf.function(trace, autograph=False).get_concrete_function(*before.specs)
    return traces


def _refuse_other_results(ops, number):
    """Raises ValueError for operations of a stage whose second run differs from the first."""
    unrepeatable = keras_compat.unrepeatable_ops(ops)
    if unrepeatable:
        raise ValueError(
            "With `checkpoint_activations=True` a pipeline stage runs twice in a step, and must do "
            f"the same both times. Received: stage {number}, which uses {', '.join(unrepeatable)}. "
            "Draw with `keras.random` and a `keras.random.SeedGenerator`, keep state in "
            "`self.add_weight`, or leave out `checkpoint_activations`."
        )


def _refuse_without_rows(after):
    for spec in after.specs:
        if spec.shape.rank is None or spec.shape.rank == 0:
            raise ValueError(
                "Every output of a pipeline stage must have a batch axis. Received: a tensor of "
                f"shape {spec.shape}. Choose other `stages`, so that it stays within one stage."
            )


def _refuse_other_variables(variables):
    """Raises ValueError for variables that a stage reads and that no layer of it has as weights.

    A stage is a function of its weights' values: others would have no gradient, and no place.

    Args:
        variables: The trainable variables of TensorFlow that were read, as no weight is.
    """
    for variable in variables:
        captures = tf.compat.v1.get_default_graph().captures
        held = [inner for outer, inner in captures if outer is variable.handle]
        reads = [op.name for inner in held for op in inner.consumers()]
        raise ValueError(
            "A layer in a pipeline must read variables that are its weights. Received: the "
            f"variable {variable.name}, read in {', '.join(reads[:1]) or 'a layer'}, which is no "
            "weight of the model. Create it with `self.add_weight` in the layer that reads it."
        )


def refuse_assigned_weights(paths: Iterable[str]) -> None:
    """Raises ValueError for weights that layers assign when they are called.

    Args:
        paths: The paths of such weights.
    """
    path = next(iter(paths), None)
    if path is not None:
        raise ValueError(
            "A layer in a pipeline cannot assign to a weight when it is called, as "
            "keras.layers.SpectralNormalization does: each micro-batch would start from a "
            f"different weight. Received: {path}. Leave the layer out of the model, or use "
            "shard='parameters'."
        )


def weights_of(model: keras.Model) -> Iterator[keras.Variable]:
    """Yields a model's floating-point weights, except state that calls change."""
    for layer in keras_compat.all_layers(model):
        for weight in keras_compat.own_weights(layer):
            is_float = keras.backend.is_float_dtype(weight.dtype)
            if is_float and not parameters.is_state(weight, layer):
                yield weight
