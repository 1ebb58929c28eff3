"""What a part of a step changes beside its own variables, and what it draws at random."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from tfmulti.keras_compat import calls, held, randomness, replaced_ops
from tfmulti.keras_compat.accessors import path_of

# `tf.random.Generator` moves its state by these.
_ADVANCES = re.compile(r"Rng(ReadAnd)?Skip")


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
        kind = op_type.decode() if isinstance(op_type, bytes) else op_type
        if calls.COMMUNICATION in (name or ""):
            return
        if calls.assigns(kind) or _ADVANCES.match(kind):
            handle = id(calls.given_from_outside(inputs[0]))
            if handle not in may:
                found.append(paths.get(handle, f"a variable of its own ({kind})"))
        elif randomness.is_random(kind) and calls.is_unrepeatable(kind):
            found.append(f"TensorFlow's random state ({kind})")

    with replaced_ops.observed_ops(observe):
        yield found


def _parts_of(variable) -> list:
    value = held.own_variable(variable)
    return list(getattr(value, "values", (value,)))
