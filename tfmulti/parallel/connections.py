"""Which weights of a pipeline have a gradient: those that a loss depends on.

Stages compute zeros for the others, with which an optimizer would still apply weight decay and
constraints. One device has no gradient for them, and Keras leaves them out of the update.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti.parallel.stages import Stage, StageTrace


class Connections:
    """What the outputs of a call through the stages depend on, and which of them have a gradient.

    Args:
        stages: The stages.
        traces: What tracing each stage has shown.
    """

    def __init__(self, stages: list[Stage], traces: list[StageTrace]):
        self._stages, self._traces = stages, traces
        # The numbers of the outputs whose gradient a tape has begun to compute.
        self._upstream: set[int] = set()

    def watch(self, outputs) -> list[tf.Tensor]:
        """Returns the outputs of the last stage, and notes later which of them have a gradient.

        A function with a custom gradient does not see it: a tape passes zeros for the others.

        Args:
            outputs: The outputs.
        """
        numbers = iter(range(len(outputs)))
        is_float = self._traces[-1].after.is_float
        return [
            self._watched(each, next(numbers)) if has_gradient else each
            for each, has_gradient in zip(outputs, is_float, strict=True)
        ]

    def _watched(self, output, number):
        @tf.custom_gradient
        def hand_on(value):
            def gradient(upstream):
                self._upstream.add(number)
                return tf.convert_to_tensor(upstream)

            return tf.identity(value), gradient

        return hand_on(output)

    def reached(self) -> list[list[bool]]:
        """Returns whether the latest gradient reaches each weight of each stage.

        Call it in the gradient of the stages, which a tape computes after those of all outputs.
        """
        outputs, self._upstream = self._upstream, set()
        reached: list[list[bool]] = []
        for stage, trace in reversed(list(zip(self._stages, self._traces, strict=True))):
            sources = set().union(*(trace.sources[output] for output in outputs))
            number = len(trace.before.floats(trace.before.specs))
            reached.insert(0, [number + place in sources for place in range(len(stage.weights))])
            outputs = {source for source in sources if source < number}
        return reached
