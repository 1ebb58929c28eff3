"""Stages on the devices of one process.

Weights, their slots and the state of layers are on the device of their stage. What a stage hands
on is copied by TensorFlow, which runs operations as their inputs are there: all micro-batches are
in one graph, so that a stage computes one while the stage before computes the next.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import keras_compat, marks
from tfmulti.parallel.stage_run import Plan, StageRun, added, joined
from tfmulti.parallel.staged_call import StagedCall, differentiated_once, spread_over
from tfmulti.parallel.stages import Boundary, stages_of, trace_stages
from tfmulti.step import parameters


class DeviceStages(StagedCall):
    """A model's call as a pass through stages, each on a device of its own.

    Args:
        model: A built Functional or Sequential model of a strategy with one device.
        starts: Positions in the order of the model's calls at which a stage begins, but the first.
        num_micro_batches: The number of micro-batches.
        recomputes: Whether a stage keeps its inputs alone, and runs again for gradients.
        devices: The device of each stage, such as `"GPU:0"`.
    """

    def __init__(self, model, starts, num_micro_batches, recomputes, devices: list[str]):
        super().__init__(model, starts, num_micro_batches, recomputes)
        self._devices = devices

    def install(self) -> None:
        """Puts each weight on the device of its stage, and takes the place of the call."""
        if self._may_share_state():
            ids = tuple(id(x) for x in self._model.inputs)
            specs = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in self._model.inputs]
            stages = stages_of(self._cut, list(ids), [id(x) for x in self._cut.outputs])
            none = (None,) * len(ids)
            before = Boundary(ids, (False,) * len(ids), none, tuple(specs))
            _refuse_shared_state(trace_stages(stages, before, True))
        super().install()

    def _may_share_state(self) -> bool:
        """Whether two stages have the same variable that is no weight; most do not change it."""
        models = [part.model for part in self._cut.parts]
        own = [{id(v) for v in each.non_trainable_variables} for each in models]
        return len(set().union(*own)) < sum(map(len, own))

    def _place(self):
        for part, device in zip(self._cut.parts, self._devices):
            for variable in part.model.variables:
                # What stages share is on the device of the first, of whatever model it is.
                if not marks.IN_STAGE.get(variable):
                    keras_compat.put_on(variable, device)
                    marks.IN_STAGE.set(variable, True)
        # XLA compiles for one device.
        self._model.supports_jit = False
        marks.MICRO_BATCHES.set(self._model, self._num_micro_batches)

    def _is_step(self):
        # Verification compares with what the model's own call computes.
        return parameters.in_replica() and not self._strategy.counts_one_replica

    def _passed(self, plan, before, flat):
        _refuse_shared_state(plan.traces)
        wants_inputs = keras_compat.is_recorded(before.floats(flat))
        weights, links = [], []
        for stage, device in zip(plan.stages, self._devices):
            with tf.device(device):
                values = keras_compat.values_of(stage.weights)
                links += [_link(each) for each in values]
                weights.append([tf.stop_gradient(each) for each in values])
        one = None

        # The weights are no arguments: in a graph these are copied to the device of the step.
        @tf.custom_gradient
        def compute(*tensors):
            nonlocal one
            one = _Pass(plan, self._devices)
            results = one.forward(
                [tf.stop_gradient(each) for each in tensors[: len(flat)]], weights
            )

            def gradient(*upstream):
                upstream = [tf.convert_to_tensor(each) for each in plan.outputs.floats(upstream)]
                of_inputs, of_weights = one.backward(upstream)
                of_inputs = differentiated_once(of_inputs, [*flat, *links])
                return [*spread_over(before, of_inputs, wants_inputs), *of_weights]

            return results, gradient

        results = compute(*flat, *links)
        one.update()
        return results


class _Pass:
    """A pass of a batch through the stages, forwards and back."""

    def __init__(self, plan: Plan, devices: list[str]):
        self._plan, self._devices = plan, devices
        self._runs: list[StageRun] = []

    def forward(self, flat, weights) -> list[tf.Tensor]:
        """Returns the outputs of all rows.

        Args:
            flat: The inputs of all rows, with their masks.
            weights: For each stage the values of its weights.
        """
        total, done = tf.shape(flat[0])[0], []
        for number, device in enumerate(self._devices):
            with tf.device(device):
                self._runs.append(StageRun(self._plan, number, total))
        for index in range(self._plan.num_micro_batches):
            handed_on = self._runs[0].micro_batch(flat, index)
            for run, device, own in zip(self._runs, self._devices, weights):
                with tf.device(device):
                    handed_on = run.forward(index, handed_on, own)
            done.append(handed_on)
        return joined(done)

    def backward(self, upstream) -> tuple[list, list]:
        """Returns the gradients of the inputs, and of the weights of one stage after the other.

        Args:
            upstream: Gradients of what `forward` has returned, of those that are numbers.
        """
        inputs, weights = [], [None] * len(self._runs)
        for run in self._runs:
            run.previous = []
        for index in reversed(range(self._plan.num_micro_batches)):
            begin, end = self._runs[0].bounds(index)
            gradients = [each[begin:end] for each in upstream]
            for number in reversed(range(len(self._runs))):
                with tf.device(self._devices[number]):
                    gradients, own = self._runs[number].backward(index, gradients)
                    have = weights[number]
                    weights[number] = own if have is None else added(have, own)
            inputs.insert(0, [each[: end - begin] for each in gradients])
        return joined(inputs), [each for own in weights for each in own]

    def update(self) -> None:
        """Writes what the stages have updated."""
        for run, trace in zip(self._runs, self._plan.traces):
            for variable, value in zip(trace.updated, run.updates):
                variable.assign(value)


@tf.custom_gradient
def _link(value):
    """Returns a tensor without elements, whose gradient a weight gets as it is.

    So the weight itself is not handed to `compute`, and its gradient stays on its device.
    """
    return tf.zeros([0], value.dtype), lambda upstream: upstream


def _refuse_shared_state(traces):
    shared = [variable.path for trace in traces for variable in trace.shared]
    if shared:
        raise ValueError(
            "Two stages on devices cannot change the same state, as that of batch normalization "
            f"or of a generator of random numbers. Received: {', '.join(shared)}. Choose `stages` "
            "so that one stage has all calls of that layer, or give each layer a seed of its own."
        )
