"""Updates of optimizers with sharded state that workers cannot make one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import slots


@contextlib.contextmanager
def refusing_shared_state(optimizer: keras.optimizers.Optimizer, variable) -> Iterator[None]:
    """Refuses an update of one variable that reads another, or changes more than its own slots.

    Each worker makes only its own updates: shared state would differ between workers, and other
    variables may not have been updated yet.

    Args:
        optimizer: The optimizer, with sharded state.
        variable: The variable that is updated; Keras's or TensorFlow's.

    Raises:
        RuntimeError: For such a variable, with its name.
    """
    others = keras_compat.updated_variables(optimizer)
    own = others.pop(keras_compat.variable_index(optimizer, variable))
    path = keras_compat.path_of(own)
    with keras_compat.noting_read(others) as read, _noting_changes(optimizer, own) as changed:
        yield
    if read:
        raise RuntimeError(
            "With sharded state an update of a variable may read only that variable. "
            f"Received: {type(optimizer).__name__}.update_step of {path}, which "
            f"reads {keras_compat.path_of(read[0])}. Compute what needs all variables before the "
            "updates, in the step, or leave shard out for this optimizer."
        )
    if changed:
        raise RuntimeError(
            "With sharded state an update of a variable may change only its own slots, and no "
            f"random state. Received: {type(optimizer).__name__}.update_step, which changes "
            f"{changed[0]}. Create each slot in `build` with add_variable_from_reference, count "
            "updates by `iterations`, draw with tf.random.stateless_normal(shape, "
            "seed=[7, self.iterations]), or leave shard out for this optimizer."
        )


def _noting_changes(optimizer, weight) -> contextlib.AbstractContextManager[list[str]]:
    """Yields a list of what an update changes beside a weight and slots that are here."""
    if keras_compat.is_stock(type(optimizer)) and not keras_compat.own_methods(optimizer):
        return contextlib.nullcontext([])
    own = [v for v in optimizer.variables if isinstance(v, slots.SlotVariable) and v.is_here]
    kinds = keras.Variable, tf.Variable, keras.random.SeedGenerator
    known = [each for each in vars(optimizer).values() if isinstance(each, kinds)]
    known += [v for v in optimizer.variables if not isinstance(v, slots.SlotVariable)]
    return keras_compat.noting_changes([weight, *own], known)
