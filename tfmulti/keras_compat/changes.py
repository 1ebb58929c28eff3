"""What a part of a step changes beside its own variables, and what it draws at random."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfmulti.keras_compat import calls, held, randomness, replaced_ops, tracing
from tfmulti.keras_compat.accessors import path_of


@contextlib.contextmanager
def noting_changes(own, known) -> Iterator[list[str]]:
    """Yields a list to which it adds what the context assigns, and the random state that it uses.

    It finds operations as they are created in a graph, in branches too, or as they run.

    Args:
        own: Variables that the context may assign; Keras's or TensorFlow's.
        known: Other variables, and generators of seeds, which are named if they are assigned.
    """
    found: list[str] = []
    may = {id(part.handle) for variable in own for part in _parts_of(variable)}
    others = [getattr(each, "state", each) for each in known]
    paths = {id(part.handle): path_of(each) for each in others for part in _parts_of(each)}

    def observe(op_type, inputs, name):
        if calls.COMMUNICATION in (name or ""):
            return
        if calls.assigns(op_type) or calls.advances(op_type):
            handle = id(calls.given_from_outside(inputs[0]))
            if handle not in may:
                found.append(paths.get(handle, f"a variable of its own ({op_type})"))
        elif randomness.is_random(op_type) and calls.is_unrepeatable(op_type):
            found.append(f"TensorFlow's random state ({op_type})")

    with replaced_ops.observed_ops(observe):
        yield found


def _parts_of(variable) -> list:
    value = held.own_variable(variable)
    return list(getattr(value, "values", (value,)))


class EagerRun:
    """What a call did that must do the same again; see `noting_eager_run`.

    Attributes:
        unrepeatable: The types of its ops that `is_unrepeatable` names.
        older: Tensors that it read, and that have a gradient outside of it.
    """

    def __init__(self, given):
        self.unrepeatable: list[str] = []
        self.older: list[tf.Tensor] = []
        self._given = {id(tensor) for tensor in given}
        # TensorFlow numbers eager tensors in the order of their creation.
        self._first = tf.constant(0)._id

    def observe(self, op_type, inputs, name):
        """Notes an op that runs, or that is created in a function that the call traces."""
        # An op that runs has no name.
        if calls.COMMUNICATION in (name or tf.get_current_name_scope()):
            return
        flat = tf.nest.flatten(list(inputs))
        tensors = [x for x in flat if isinstance(x, tf.__internal__.EagerTensor)]
        older = [x for x in tensors if x._id < self._first and id(x) not in self._given]
        # A variable that the call creates has a first value.
        creates = op_type == "AssignVariableOp" and tensors and tensors[0]._id >= self._first
        if calls.is_unrepeatable(op_type) and not creates:
            self.unrepeatable.append(op_type)
        self.older += [x for x in older if x.dtype.is_floating and tracing.is_recorded([x])]


@contextlib.contextmanager
def noting_eager_run(given: list[tf.Tensor]) -> Iterator[EagerRun]:
    """Yields what is found while the context runs; a graph is searched once it is there.

    Args:
        given: Tensors that the context may read.
    """
    found = EagerRun(given)
    with replaced_ops.observed_ops(found.observe):
        yield found
