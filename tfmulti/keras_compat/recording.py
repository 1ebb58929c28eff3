"""Calls that run again for gradients: what they assign and read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

from tfmulti.keras_compat import replacement

# Keras's name for the scope in which variables are cast to the dtype of a layer.
_AUTOCAST = "autocast_scope"


# Not a RuntimeError: AutoGraph raises an error again as it is only if it has Exception's __init__.
class AssignsInInnerGraph(Exception):
    """A call assigns a variable in a graph within its own, from which no value gets out."""


class RecordingScope(keras.StatelessScope):
    """A stateless scope that records which variables were updated in it.

    Attributes:
        updated: The variables by id, in the order of their first updates.
    """

    def __init__(self, state_mapping):
        # Keras converts each value to the dtype that its variable has now. In the call of a layer
        # of half precision that is float16, also for the weights of float32 layers within.
        autocast = global_state.get_global_attribute(_AUTOCAST)
        global_state.set_global_attribute(_AUTOCAST, None)
        try:
            super().__init__(state_mapping, collect_losses=True)
        finally:
            global_state.set_global_attribute(_AUTOCAST, autocast)
        self.updated = {}
        self._graph, self._reads_refused_in = _current_graph(), None

    def get_current_value(self, variable):
        """Returns a variable's value; raises RuntimeError in a function with its own gradient."""
        value = super().get_current_value(variable)
        if self._reads_refused_in and value is not None and variable.trainable:
            raise RuntimeError(
                "A function with a gradient of its own (`tf.custom_gradient`, `tf.recompute_grad`) "
                "cannot read a weight in a layer that runs again for gradients, or in a pipeline: "
                f"the weight would lose its gradient. Received: {self._reads_refused_in}, which "
                f"reads {variable.path}. Read it before the function and pass it as an argument, "
                "use `keras.remat`, or leave the layer out."
            )
        return value

    @contextlib.contextmanager
    def refusing_reads(self, name: str) -> Iterator[None]:
        """Refuses weights within the context, the function of that name."""
        before, self._reads_refused_in = self._reads_refused_in, name
        try:
            yield
        finally:
            self._reads_refused_in = before

    def add_update(self, update):
        """Records the new value of a variable, without assigning it.

        What reads it later has the gradient that belongs to the variable, as after an assignment,
        and no gradient with respect to what the new value was made from.
        """
        variable, value = update
        if _current_graph() is not self._graph:
            raise AssignsInInnerGraph(
                "A layer that runs again for gradients, or in a pipeline, cannot assign a variable "
                "in a branch, a loop or a function within its call. Received: "
                f"{variable.path}. Assign it outside of these."
            )
        self.updated.setdefault(id(variable), variable)
        before = self.get_current_value(variable)
        if before is None or not before.dtype.is_floating:
            value = tf.stop_gradient(value)
        else:
            # On devices of one process a stage is given variables.
            value = _assigned(tf.convert_to_tensor(before), value)
        super().add_update((variable, value))


@tf.custom_gradient
def _assigned(before, value):
    return tf.identity(value), lambda upstream: (upstream, None)


def is_recording() -> bool:
    """Whether this thread is in a `RecordingScope`."""
    return in_stateless_scope() and isinstance(get_stateless_scope(), RecordingScope)


def while_recording(*_, **__) -> bool:
    """In a call that runs again for gradients, or in a stage of a pipeline."""
    return is_recording()


def while_a_strategy_exists_or_recording(*_, **__) -> bool:
    """While one of our strategies exists, and in a call that runs again for gradients."""
    return replacement.while_a_strategy_exists() or is_recording()


def is_updated(variable: keras.Variable) -> bool:
    """Whether a variable was given a new value in the `RecordingScope` of this thread, if any."""
    return is_recording() and id(variable) in get_stateless_scope().updated


def around_custom_gradient(original: Callable) -> Callable:
    """Makes a function with its own gradient refuse weights that `RecordingScope` has as tensors.

    Args:
        original: TensorFlow's function that runs a function and notes its gradient.
    """

    @functools.wraps(original)
    def decorate(f, args, kwargs):
        @functools.wraps(f)
        def run(*args, **kwargs):
            with get_stateless_scope().refusing_reads(getattr(f, "__qualname__", repr(f))):
                return f(*args, **kwargs)

        return original(run, args, kwargs)

    return decorate


def _current_graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def around_remat(original: Callable, recompute: Callable) -> Callable:
    """Makes `keras.remat` and `RematScope` repeat a call from the state before its first run.

    Otherwise dropout draws other numbers in the second run, and statistics are updated twice.

    Args:
        original: Keras's function of a call, which returns a call that runs again for gradients.
        recompute: The function that replaces it, of a layer (or None) and its call.
    """

    @functools.wraps(original)
    def remat(f):
        if getattr(f, "is_recomputed", False):
            return f
        # Keras passes a layer's bound method, or its activation.
        layer = f if isinstance(f, keras.layers.Layer) else getattr(f, "__self__", None)
        ours = recompute(layer if isinstance(layer, keras.layers.Layer) else None, f)
        stock = original(f)

        # Chosen at the call: a layer may wrap its method before the scope is entered.
        def run(*args, **kwargs):
            return (ours if replacement.in_scope() or is_recording() else stock)(*args, **kwargs)

        return run

    return remat
