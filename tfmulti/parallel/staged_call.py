"""A model's call as a pass through its stages, wherever these are."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel.cutting import Cut
from tfmulti.parallel.stage_run import Plan
from tfmulti.parallel.stages import Boundary, stages_of, trace_stages
from tfmulti.step import normalization


class StagedCall:
    """Takes the place of a model's call; a subclass knows where the stages are.

    Args:
        model: A built Functional or Sequential model.
        starts: Positions in the order of the model's calls at which a stage begins, but the first.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps its inputs alone, and runs again for gradients.
    """

    def __init__(self, model, starts: list[int], num_micro_batches: int, recomputes: bool):
        self._model, self._strategy = model, model.distribute_strategy
        self._cut = Cut(model, starts)
        self._num_micro_batches, self._recomputes = num_micro_batches, recomputes
        self._call, self._plans, self._planned = model.call, {}, Plan

    def install(self) -> None:
        """Gives each weight to its stage, and takes the place of the model's call."""
        self._place()
        inputs, outputs = [id(x) for x in self._model.inputs], [id(x) for x in self._cut.outputs]
        self._stages = stages_of(self._cut, inputs, outputs)
        self._model.call = self.call
        # What `predict` was traced for has the weights where they were.
        self._model.predict_function = None

    def call(self, inputs, training=None, mask=None, **kwargs):
        """Passes a batch through the stages in a step; elsewhere it is the model's own call."""
        if not self._is_step() or keras_compat.is_symbolic(inputs):
            return self._call(inputs, training=training, mask=mask, **kwargs)
        _refuse_inputs(keras.tree.flatten(inputs))
        values = self._cut.values_of(inputs, mask)
        before, flat = Boundary.of(list(values), values, [])
        plan = self._plan(before, training)
        values, losses = plan.outputs.values(self._passed(plan, before, flat))
        for loss in losses:
            keras.layers.Layer.add_loss(self._model, tf.reduce_mean(loss))
        return self._cut.packed(values)

    def _place(self) -> None:
        """Gives each weight to its stage."""
        raise NotImplementedError

    def _is_step(self) -> bool:
        """Whether this is a step, in which rows pass through the stages."""
        raise NotImplementedError

    def _passed(self, plan: Plan, before: Boundary, flat) -> list[tf.Tensor]:
        """Returns what the last stage hands on.

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
        if key not in self._plans:
            with context():
                self._plans[key] = trace_stages(self._stages, before, training)
        whole = training and normalization.synchronized_layers(self._model)
        number = 1 if whole else self._num_micro_batches
        traces = self._plans[key]
        return self._planned(self._stages, traces, number, self._recomputes, training, context)


def differentiated_once(gradients, sources) -> list[tf.Tensor]:
    """Has a second derivative, which MPI's calls would leave out in silence, be an error.

    Args:
        gradients: Gradients that have passed through the stages.
        sources: What they depend on.
    """

    @tf.custom_gradient
    def once(*tensors):
        def gradient(*upstream):
            raise RuntimeError(
                "A pipeline has first derivatives alone. Received: a gradient of a gradient that "
                "passed through its stages, as for a penalty on gradients. Use "
                "shard='parameters' without tfmulti.pipeline."
            )

        return [tf.identity(tensor) for tensor in tensors[: len(gradients)]], gradient

    return list(once(*gradients, *sources)) if gradients else []


def spread_over(before: Boundary, of_floats, are_wanted: bool) -> list:
    """Returns a gradient, or None, for each tensor that the first stage takes.

    Args:
        before: Describes what it takes.
        of_floats: Gradients of those that are numbers.
        are_wanted: Whether they are asked for.
    """
    found = iter(of_floats)
    return [next(found) if each and are_wanted else None for each in before.is_float]


def _refuse_inputs(flat):
    for value in flat:
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            raise ValueError(
                "Workers of a pipeline send dense numbers to each other. Received: a "
                f"{getattr(value, 'dtype', '')} {type(value).__name__} as an input of the model. "
                "Turn it into a dense tensor of numbers in the dataset."
            )
