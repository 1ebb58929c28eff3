"""What a layer may do that runs again for gradients: both runs must do the same."""

from __future__ import annotations

import contextlib
import warnings

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import assignments


class Known:
    """What the calls of a layer have found.

    Attributes:
        is_checked: Whether an eager call was found to do the same in both runs.
        runs_once: Whether its calls run once, and keep their activations.
    """

    def __init__(self):
        self.is_checked = self.runs_once = False

    def note_kept(self, layer) -> None:
        """Lets calls run once from now on, and warns of it.

        Args:
            layer: The layer, or a function, that assigns a variable in a graph within its own.
        """
        self.runs_once = True
        warnings.warn(
            "A layer that assigns a variable in a branch, a loop or a function within its call, as "
            "a dropout in the cell of an `RNN` does, cannot run again for gradients. Received: "
            f"{name_of(layer)}, whose activations are kept. Assign the variable outside of these, "
            "or leave the layer out, to do without this warning.",
            stacklevel=4,
        )


def name_of(layer) -> str:
    """Returns a layer's or a function's name for messages."""
    return getattr(layer, "name", getattr(layer, "__qualname__", "a function"))


def first_run(run, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Runs a call for the first time; raises RuntimeError if a second run would differ.

    Args:
        run: The call, a `_RepeatedCall`.
        tensors: What it is given.
    """
    if not tf.executing_eagerly():
        return _first_run_in_graph(run, tensors)
    # To observe every call would take long.
    if run.known.is_checked or not run.runs_again:
        return run.first_run(tensors)
    with keras_compat.noting_eager_run(tensors) as found:
        with _refusing(run.name, lambda: found.unrepeatable):
            outputs = run.first_run(tensors)
    run.reads.refuse_older(found.older)
    run.known.is_checked = True
    return outputs


def _first_run_in_graph(run, tensors):
    since = keras_compat.next_op()

    def unrepeatable():
        return keras_compat.unrepeatable_ops(keras_compat.own_ops(since))

    with _refusing(run.name, unrepeatable):
        outputs = run.first_run(tensors)
    end, ops = keras_compat.next_op(), keras_compat.own_ops(since)
    run.reads.refuse_older(keras_compat.tensors_read_from_before(ops, since))
    run.reads.note(ops, end, [*outputs, *run.others()])
    return outputs


@contextlib.contextmanager
def _refusing(name, unrepeatable):
    """Raises RuntimeError if the context has done what another run would do differently."""
    try:
        yield
    except keras_compat.AssignsInInnerGraph:
        # What it has done so far is done, and will be done again.
        _refuse(name, unrepeatable())
        raise
    _refuse(name, unrepeatable())


def _refuse(name, unrepeatable):
    if unrepeatable:
        raise RuntimeError(
            "A layer runs twice if its activations are checkpointed or its weights are sharded, "
            f"and must do the same both times. Received: {name}, which uses "
            f"{', '.join(sorted(set(unrepeatable)))}. Draw with `keras.random` and a "
            "`keras.random.SeedGenerator`, keep state in `self.add_weight`, or leave the layer out "
            "of `layers`; with sharded weights, use shard='state'."
        )


def refuse_assigned(sharded) -> None:
    """Refuses weights that an enclosing call has assigned: owners would send what they were."""
    assigned = next(filter(keras_compat.is_updated, sharded), None)
    if assigned is not None:
        raise RuntimeError(
            "A call that runs again for gradients cannot assign a sharded weight that a layer "
            f"within it gathers afterwards. Received: {assigned.path}. Leave the layer that "
            "assigns it out of `tfmulti.checkpoint_activations`, or use shard='state'."
        )


def explaining_values(name: str) -> contextlib.AbstractContextManager[None]:
    """Explains where the call of a layer of that name takes a weight's `value` for a variable."""
    return assignments.explaining_values(
        name,
        "In a layer that runs again for gradients, as its activations are checkpointed or its "
        "weights are sharded,",
    )
