"""Updates that a worker makes alone: of one variable, from what belongs to that variable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import slots


@contextlib.contextmanager
def refusing_shared_state(optimizer: keras.optimizers.Optimizer, variable) -> Iterator[None]:
    """Refuses an update of one variable that uses another, or changes what is not its slot.

    Each worker makes its own updates alone: what they change together would differ between
    workers, and other variables may not have been updated yet.

    Args:
        optimizer: The optimizer, with sharded state.
        variable: The variable that is updated.

    Raises:
        RuntimeError: For such a variable, with its name.
    """
    others = [v for v in keras_compat.updated_variables(optimizer) if v is not variable]
    since = 0 if tf.executing_eagerly() else keras_compat.next_op()
    shared = [v for v in optimizer.variables if not isinstance(v, slots.SlotVariable)]
    with keras_compat.noting_assigned(shared) as changed:
        yield
    read = keras_compat.variables_read(since, others)
    if read:
        raise RuntimeError(
            "With shard='state' an update of a variable may read that variable alone. "
            f"Received: {type(optimizer).__name__}.update_step of {variable.path}, which "
            f"reads {read[0].path}. Compute what needs all variables before the updates, in "
            "the step, or leave shard out for this optimizer."
        )
    if changed:
        raise RuntimeError(
            "With shard='state' an update of a variable may change its own slots alone. "
            f"Received: {type(optimizer).__name__}.update_step, which changes "
            f"{changed[0].path}. Create each slot in `build` with add_variable_from_reference, "
            "count updates by `iterations`, or leave shard out for this optimizer."
        )
