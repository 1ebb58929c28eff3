"""Replaces a model's call by a pass through the stages of a pipeline, wherever these are."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel.cutting import Cut
from tfmulti.parallel.stage_run import Plan
from tfmulti.parallel.stages import Boundary, stages_of, trace_stages
from tfmulti.step import normalization


class StagedCall:
    """Replaces a model's call; subclasses know where the stages are.

    Args:
        model: A built Functional or Sequential model.
        starts: Positions, in the order of the model's layer calls, at which the second and later
            stages begin.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps only its inputs, and runs again for gradients.
    """

    def __init__(self, model, starts: list[int], num_micro_batches: int, recomputes: bool):
        self._model, self._strategy = model, model.distribute_strategy
        self._cut = Cut(model, starts)
        self._num_micro_batches, self._recomputes = num_micro_batches, recomputes
        self._original_call, self._traces = model.call, {}

    def install(self) -> None:
        """Places each weight with its stage, and replaces the model's call."""
        self._place_weights()
        self._stages = stages_of(self._cut)
        self._model.call = self.call
        # A function that `predict` has already traced reads the weights where they were before.
        self._model.predict_function = None

    def call(self, inputs, training=None, mask=None, **kwargs):
        """Passes a batch through the stages within a step; elsewhere runs the model's own call."""
        if not self._is_step() or keras_compat.is_symbolic(inputs):
            return self._original_call(inputs, training=training, mask=mask, **kwargs)
        _refuse_inputs(keras.tree.flatten(inputs))
        values = self._cut.values_of(inputs, mask)
        before, flat = Boundary.of(list(values), values, [])
        plan = self._plan(before, training)
        values, losses = plan.outputs.values(self._run_stages(plan, before, flat))
        for loss in losses:
            keras.layers.Layer.add_loss(self._model, tf.reduce_mean(loss))
        return self._cut.pack_outputs(values)

    def _place_weights(self) -> None:
        """Moves each weight to the worker or device of its stage."""
        raise NotImplementedError

    def _is_step(self) -> bool:
        """Whether this is a step, in which rows pass through the stages."""
        raise NotImplementedError

    def _run_stages(self, plan: Plan, before: Boundary, flat) -> list[tf.Tensor]:
        """Returns the outputs of the last stage.

        Args:
            plan: The plan.
            before: Describes `flat`.
            flat: The model's inputs, with their masks.
        """
        raise NotImplementedError

    def _plan(self, before, training) -> Plan:
        context = keras_compat.call_context()
        with keras_compat.draws_of() as draws:
            key = (before, training, draws is None)
        if key not in self._traces:
            with context():
                self._traces[key] = trace_stages(self._stages, before, training)
        needs_whole = training and normalization.synchronized_layers(self._model)
        number = 1 if needs_whole else self._num_micro_batches
        return Plan(self._stages, self._traces[key], number, self._recomputes, training, context)


def refuse_second_derivative(gradients, sources) -> list[tf.Tensor]:
    """Returns the same gradients, and makes differentiating them again an error.

    MPI calls have no gradient, so a second derivative would silently leave them out.

    Args:
        gradients: Gradients that have passed through the stages.
        sources: The tensors that they depend on.
    """

    @tf.custom_gradient
    def once(*tensors):
        def gradient(*upstream):
            raise RuntimeError(
                "A pipeline supports first derivatives only. Received: a gradient of a gradient "
                "that passed through its stages, as for a penalty on gradients. Use "
                "shard='parameters' without tfmulti.pipeline."
            )

        return [tf.identity(tensor) for tensor in tensors[: len(gradients)]], gradient

    return list(once(*gradients, *sources)) if gradients else []


def spread_over(before: Boundary, of_floats, are_wanted: bool) -> list:
    """Returns a gradient, or None, for each input tensor of the first stage.

    Args:
        before: Describes these tensors.
        of_floats: The gradients of the floating-point ones.
        are_wanted: Whether anyone asks for them.
    """
    gradients = iter(of_floats)
    return [next(gradients) if each and are_wanted else None for each in before.is_float]


def _refuse_inputs(flat):
    for value in flat:
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise ValueError(
                "The inputs of a pipeline must be dense tensors of numbers. Received: a "
                f"{getattr(value, 'dtype', '')} {type(value).__name__} as an input of the model. "
                "Convert it in the dataset."
            )
