"""The weights of the next layer are gathered while this one computes, and no earlier.

Workers gather in the order of the program, in which sums of gradients have their places too. In
the forward pass a call gathers as soon as the call before it begins. In the backward pass a call
has the one that comes next gather before it runs itself: after it, the next would wait for the sum
of this one's gradients. So two layers' weights are in memory, of models of any shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfmulti.step.rows import current_replica_batch


class StepGathers:
    """When the calls of a step gather their weights.

    A call has `num_gathered`, the number of sharded parameters; `tensors`, which its first run was
    given; and `receive(tensors, after)`, which gathers for a run.
    """

    def __init__(self):
        # What the latest two calls to begin were preceded by: the inputs of the first, and outputs.
        self._done: list[list[tf.Tensor]] = []
        self._calls: list = []
        self._ahead: tuple | None = None

    def begin(self, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors after which a call with these inputs gathers in the forward pass."""
        self._done = self._done[-2:] or [inputs]
        return self._done[0] if _are_here(self._done[0]) else inputs

    def end(self, outputs: list[tf.Tensor]) -> None:
        """Notes that a call which gathers has these outputs."""
        self._done.append(outputs)

    def expect_gradient(self, call) -> None:
        """Notes that a gradient of a call will be asked for; the latest call's comes first."""
        self._calls.append(call)

    @contextlib.contextmanager
    def within(self, is_second: bool) -> Iterator[None]:
        """Within it a call runs, whose own calls begin anew in its second run.

        Gradients are those of the second run.
        """
        done, number = self._done, len(self._calls)
        self._done = [] if is_second else done
        yield
        self._done = done if is_second else self._done
        del self._calls[number:]

    def take(self, call, tensors: list[tf.Tensor], after: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the weights of a call's second run, and has the call before it gather.

        Args:
            call: The call.
            tensors: What the second run is given.
            after: Those of them after which that may be.
        """
        expected, whole = self._ahead or (None, [])
        if expected is call:
            self._ahead = None
        else:
            whole = call.receive(tensors, after)
        if call in self._calls:
            del self._calls[self._calls.index(call) :]
            # A call that gathers nothing itself has calls within that do.
            if call.num_gathered and self._calls and self._ahead is None:
                self.gather_ahead(self._calls[-1], after)
        return whole

    def gather_ahead(self, call, after: list[tf.Tensor]) -> None:
        """Has the call whose gradient comes next gather, if it does and may do so here."""
        if call.num_gathered and _are_here(call.tensors):
            self._ahead = call, call.receive(call.tensors, after)


def of_step() -> StepGathers:
    """Returns the gathers of the step that is traced; new ones where each gathers as it begins."""
    replica_batch = current_replica_batch()
    if replica_batch is None or tf.executing_eagerly() or not are_ahead():
        return StepGathers()
    if replica_batch.gathers is None:
        replica_batch.gathers = StepGathers()
    return replica_batch.gathers


def are_ahead() -> bool:
    """Whether layers gather ahead, which all workers have agreed on when they started."""
    return getattr(tf.distribute.get_strategy().extended, "gathers_ahead", False)


def _are_here(tensors) -> bool:
    """Whether tensors belong to the graph that is made, and not to one around a branch or loop."""
    if tf.executing_eagerly():
        return True
    return all(tensor.graph is tf.compat.v1.get_default_graph() for tensor in tensors)
