"""Pipeline stages on the devices of one process.

The weights of a stage, their slots and the state of its layers are on the device of that stage.
TensorFlow copies tensors from one stage to the next, and runs each operation as soon as its inputs
are ready. All micro-batches are in one graph, so one stage can compute a micro-batch while the
stage before it computes the next.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel.kept_tensors import refuse_other_gradients
from tfmulti.parallel.staged_call import (
    Plan,
    StagedCall,
    StageRun,
    add_gradients,
    concat_rows,
    link,
    only_reached,
    refuse_second_derivative,
    spread_over,
)
from tfmulti.step import parameters


class DeviceStages(StagedCall):
    """Replaces a model's call by a pass through stages, each on a device of its own.

    Args:
        model: A built Functional or Sequential model of a strategy with one device.
        starts: Positions, in the order of the model's layer calls, at which the second and later
            stages begin.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps only its inputs, and runs again for gradients.
        devices: The device of each stage, such as `"GPU:0"`.
    """

    def __init__(self, model, starts, num_micro_batches, recomputes, devices: list[str]):
        super().__init__(model, starts, num_micro_batches, recomputes)
        self._devices = devices

    def _place_weights(self):
        for part, device in zip(self._cut.parts, self._devices):
            for variable in part.model.variables:
                # A variable that stages, or models, share stays on the device of the first.
                if not marks.IN_STAGE.get(variable):
                    keras_compat.put_on(variable, device)
                    marks.IN_STAGE.set(variable, True)
        # XLA compiles for one device.
        self._model.supports_jit = False
        marks.MICRO_BATCHES_ON_DEVICES.set(self._model, self._num_micro_batches)

    def _is_step(self):
        # Verification compares the stages with the model's own call.
        return parameters.in_replica() and not self._strategy.counts_one_replica

    def _run_stages(self, plan, before, flat):
        wants_inputs = keras_compat.is_recorded(before.floats(flat))
        weights, links = [], []
        for stage, device in zip(plan.stages, self._devices):
            with tf.device(device):
                values = keras_compat.values_of(stage.weights)
                links += [link(value) for value in values]
                weights.append(refuse_other_gradients(values, self._model))
        one = None

        # The weights are not arguments: a graph would copy arguments to the device of the step.
        @tf.custom_gradient
        def compute(*tensors):
            nonlocal one
            one = _DevicePass(plan, self._devices)
            given = refuse_other_gradients(tensors[: len(flat)], self._model)
            results = one.forward(given, weights)

            def gradient(*upstream):
                upstream = [tf.convert_to_tensor(each) for each in plan.outputs.floats(upstream)]
                of_all = [*map(link, before.floats(flat)), *links]
                of_inputs, of_weights = one.backward(upstream)
                of_weights = list(map(only_reached, of_weights, plan.connections.reached()))
                of_inputs = refuse_second_derivative(of_inputs, of_all)
                gradients = spread_over(before, of_inputs, wants_inputs)
                for device, own in zip(self._devices, of_weights):
                    with tf.device(device):
                        gradients += refuse_second_derivative(own, of_all)
                return gradients

            return results, gradient

        results = compute(*flat, *links)
        one.update()
        return results


class _DevicePass:
    """One pass of a batch through the stages, forward and backward."""

    def __init__(self, plan: Plan, devices: list[str]):
        self._plan, self._devices = plan, devices
        self._runs: list[StageRun] = []

    def forward(self, flat, weights) -> list[tf.Tensor]:
        """Returns the outputs of all rows.

        Args:
            flat: The inputs of all rows, with their masks.
            weights: The values of each stage's weights.
        """
        total, finished = tf.shape(flat[0])[0], []
        for number, device in enumerate(self._devices):
            with tf.device(device):
                self._runs.append(StageRun(self._plan, number, total))
        for index in range(self._plan.num_micro_batches):
            outputs = self._runs[0].micro_batch(flat, index)
            for run, device, own in zip(self._runs, self._devices, weights):
                with tf.device(device):
                    outputs = run.forward(index, outputs, own)
            finished.append(outputs)
        return concat_rows(finished)

    def backward(self, upstream) -> tuple[list, list]:
        """Returns the gradients of the inputs, and those of the weights of each stage.

        Args:
            upstream: Gradients of the floating-point tensors that `forward` returned.
        """
        inputs, weights = [], [None] * len(self._runs)
        for run in self._runs:
            run.previous = []
        for index in reversed(range(self._plan.num_micro_batches)):
            begin, end = self._runs[0].bounds(index)
            gradients = [grad[begin:end] for grad in upstream]
            for number in reversed(range(len(self._runs))):
                with tf.device(self._devices[number]):
                    gradients, own = self._runs[number].backward(index, gradients)
                    before = weights[number]
                    weights[number] = own if before is None else add_gradients(before, own)
            inputs.insert(0, [grad[: end - begin] for grad in gradients])
        return concat_rows(inputs), weights

    def update(self) -> None:
        """Assigns the variables that the stages have updated."""
        for run, trace in zip(self._runs, self._plan.traces, strict=True):
            for variable, value in zip(trace.updated, run.updates, strict=True):
                variable.assign(value)
