"""Prefetches the sharded weights of the next layer while the current one computes, no earlier.

All workers gather, and add gradients, in the order of the program. In the forward pass the weights
of a call are gathered as soon as the call before it begins. In the backward pass each call first
gathers the weights of the call that comes next: afterwards, the gather would wait until this call's
gradients are added. So the weights of two layers are in memory, for models of any shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step.rows import current_replica_batch


class GatherSchedule:
    """Decides when the layer calls of a step gather their weights.

    A call has `num_gathered`, the number of its sharded parameters; `tensors`, which its first run
    was given; `whole`, the weights of that run; and `receive(tensors, after)`, which gathers for a
    run.
    """

    def __init__(self):
        # The tensors before the latest calls: first the inputs of the first call, then outputs.
        self._done: list[list[tf.Tensor]] = []
        # The calls whose gradients are still to be computed, in the order of the forward pass.
        self._calls: list = []
        # The call whose weights have been gathered ahead, and these weights.
        self._ahead: tuple | None = None

    def begin(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors after which a call with these inputs gathers in the forward pass."""
        self._done = self._done[-2:] or [inputs]
        return self._done[0] if _in_current_graph(self._done[0]) else inputs

    def end(self, outputs: list[tf.Tensor]) -> None:
        """Notes the outputs of a call that gathers."""
        self._done.append(outputs)

    def expect_gradient(self, call) -> None:
        """Notes a call whose gradient will be computed; the latest call's comes first."""
        self._calls.append(call)

    @contextlib.contextmanager
    def within(self, is_second: bool) -> Iterator[None]:
        """Surrounds one run of a call that may contain other calls; a second run starts afresh.

        Only calls within the second run compute gradients, so those of the first are forgotten.
        """
        done, number = self._done, len(self._calls)
        self._done = [] if is_second else done
        try:
            yield
        finally:
            self._done = done if is_second else self._done
            del self._calls[number:]

    def take(self, call, tensors: list[tf.Tensor], after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the weights for a call's second run, and gathers those of the call before it.

        Args:
            call: The call.
            tensors: The tensors of the second run.
            after: Those of them after which to gather.
        """
        if call.whole and keras_compat.in_vectorized_loop():
            # Of `tape.jacobian`: each worker would gather once for each of its rows.
            return call.whole
        expected, whole = self._ahead or (None, [])
        if expected is call:
            self._ahead = None
        else:
            whole = call.receive(tensors, after)
        if call in self._calls:
            del self._calls[self._calls.index(call) :]
            # A call that gathers nothing itself contains calls that do.
            if call.num_gathered and self._calls and self._ahead is None:
                following = self._calls[-1]
                if following.num_gathered and _in_current_graph(following.tensors):
                    self._ahead = following, following.receive(following.tensors, after)
        return whole


def of_step() -> GatherSchedule:
    """Returns the gathers of the step that is traced; a new object if calls do not gather ahead."""
    replica_batch = current_replica_batch()
    if replica_batch is None or tf.executing_eagerly() or not is_enabled():
        return GatherSchedule()
    if replica_batch.gathers is None:
        replica_batch.gathers = GatherSchedule()
    return replica_batch.gathers


def is_enabled() -> bool:
    """Whether layers gather ahead; all workers agree on it when they start."""
    return getattr(tf.distribute.get_strategy().extended, "gathers_ahead", False)


def _in_current_graph(tensors) -> bool:
    """Whether tensors belong to the graph being built, and not to one around a branch or loop."""
    if tf.executing_eagerly():
        return True
    return all(tensor.graph is tf.compat.v1.get_default_graph() for tensor in tensors)
