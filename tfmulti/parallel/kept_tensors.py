"""Tensors that pass in or out of a layer beside the arguments and outputs of its call.

A layer that runs again for gradients has those of its arguments and outputs. Tensors that its call
leaves in attributes, as those of a loss, are treated as outputs; all others are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfmulti import keras_compat

_NOTHING = object()


class KeptTensors:
    """Tensors in attributes of a layer, and of the layers within it, that one call finds or leaves.

    Args:
        layer: The layer, before the call; None for a function.

    Attributes:
        found: Those that the call finds, and that have a gradient: more inputs.
    """

    def __init__(self, layer: keras.layers.Layer | None):
        layers = [] if layer is None else [layer, *keras_compat.all_layers(layer)]
        self._before = [(each, dict(vars(each))) for each in layers]
        self._finds = [
            (layer, name)
            for layer, values in self._before
            for name, value in values.items()
            if _has_gradient(value) and keras_compat.is_recorded([value])
        ]
        self.found = [vars(layer)[name] for layer, name in self._finds]
        self._given: list[tf.Tensor] = []
        # Each layer, the name of an attribute that the call sets, and its value before.
        self._sets: list[tuple] = []

    @property
    def number(self) -> int:
        """How many tensors the call leaves."""
        return len(self._sets)

    def give(self, tensors: list[tf.Tensor]) -> None:
        """Lets a run of the call find others in place of `found`."""
        self._given = tensors
        for (layer, name), tensor in zip(self._finds, tensors, strict=True):
            _set(layer, name, tensor)

    def left(self) -> list[tf.Tensor]:
        """Returns the tensors that the first run has left."""
        self._take_back()
        self._sets = [
            (layer, name, before.get(name, _NOTHING))
            for layer, before in self._before
            for name, value in vars(layer).items()
            if value is not before.get(name) and _has_gradient(value)
        ]
        self._before = []
        return self._tensors()

    def replace(self, tensors: list[tf.Tensor]) -> None:
        """Puts others in the places of those that the first run has left."""
        for (layer, name, _), tensor in zip(self._sets, tensors, strict=True):
            _set(layer, name, tensor)

    @contextlib.contextmanager
    def again(self) -> Iterator[list[tf.Tensor]]:
        """Surrounds a second run, which finds the attributes as the first one did.

        Yields:
            A list. Once the context ends it has the tensors that the run has left, and the
            attributes are as before it.
        """
        now, left = self._tensors(), []
        for layer, name, before in self._sets:
            _set(layer, name, before)
        yield left
        self._take_back()
        left += self._tensors()
        self.replace(now)

    def _take_back(self):
        for (layer, name), given, found in zip(self._finds, self._given, self.found):
            if vars(layer).get(name) is given:
                _set(layer, name, found)

    def _tensors(self):
        return [vars(layer).get(name, _NOTHING) for layer, name, _ in self._sets]


class Reads:
    """Finds tensors that would have no gradient, in the graph of a layer that runs again for it.

    Args:
        name: The layer's name for messages.
        layer: The layer; None for a function.
    """

    def __init__(self, name: str, layer: keras.layers.Layer | None):
        self._name, self._layer = name, layer
        self._ops: list[tf.Operation] = []
        self._end, self._known = 0, set()

    def refuse_older(self, tensors: list[tf.Tensor]) -> None:
        """Raises RuntimeError if there are tensors that the first run reads and was not given."""
        for tensor in tensors:
            raise RuntimeError(
                "A layer that runs again for gradients must get its tensors as arguments: others "
                f"have no gradient. Received: {self._name}, which reads {self._name_of(tensor)}. "
                "Pass it to the layer's call as an argument, or leave the layer out of `layers`."
            )

    def note(self, ops: list[tf.Operation], end: int, known: list[tf.Tensor]) -> None:
        """Notes the first run.

        Args:
            ops: Its operations.
            end: The number of the first operation after it.
            known: Its tensors that may be read later.
        """
        self._ops, self._end, self._known = ops, end, set(map(id, known))

    def refuse_later(self) -> None:
        """Raises RuntimeError if code outside reads a tensor that the first run has not returned.

        It is called when gradients are taken.
        """
        if not self._ops or self._ops[0].graph is not tf.compat.v1.get_default_graph():
            return
        for tensor in keras_compat.tensors_read_after(self._ops, self._end):
            if id(tensor) not in self._known:
                raise RuntimeError(
                    "A layer that runs again for gradients must return its tensors: others have no "
                    f"gradient. Received: {self._name}, whose {self._name_of(tensor)} is read "
                    "outside of it. Return it, use `add_loss`, keep it in an attribute of its own "
                    "(`self.scores = scores`), or use tf.stop_gradient on it in the call."
                )

    def _name_of(self, tensor):
        """Returns the attribute that holds a tensor in the layer or within it, or its own name."""
        layers = [] if self._layer is None else [self._layer, *keras_compat.all_layers(self._layer)]
        names = [f"{x.name}.{name}" for x in layers for name in vars(x) if vars(x)[name] is tensor]
        # A tensor that has a value has no name.
        return [*names, getattr(tensor, "name", f"a tensor of shape {tensor.shape}")][0]


def refuse_other_gradients(tensors, model: keras.Model) -> list[tf.Tensor]:
    """Returns the same tensors for stages, and makes differentiating what they compute an error.

    The gradient of a stage is that of its outputs. Any other tensor, such as one that a layer keeps
    in an attribute, would have none: a tape does not look into the stages. On workers such a tensor
    is an error without it, because only the worker of the stage has the tensor.

    Args:
        tensors: Inputs or weights of stages.
        model: The model in stages.
    """

    @tf.custom_gradient
    def hand_on(tensor):
        def gradient(_):
            names = [
                f"{layer.name}.{name}"
                for layer in keras_compat.all_layers(model)
                for name, value in vars(layer).items()
                if _has_gradient(value)
            ]
            raise RuntimeError(
                "A layer in a pipeline must return its tensors or `add_loss` them: others have no "
                f"gradient. Received: {', '.join(names) or 'a tensor of a layer'}, of which code "
                "outside of the stage takes a gradient. Use `add_loss` in the layer's call, make "
                "it an output of the model, or use tf.stop_gradient on it in the call."
            )

        return tf.identity(tensor), gradient

    return [
        hand_on(tensor) if tensor.dtype.is_floating or tensor.dtype.is_complex else tensor
        for tensor in tensors
    ]


def _has_gradient(value):
    """Whether a value is a dense tensor of the graph that is built, of floating point."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return False
    # A constant that is made once, and kept for all graphs, stays as it is.
    return tf.executing_eagerly() or (
        tf.is_symbolic_tensor(value) and value.graph is tf.compat.v1.get_default_graph()
    )


def _set(layer, name, value):
    # `Layer.__setattr__` would look for weights in it.
    if value is _NOTHING:
        vars(layer).pop(name, None)
    else:
        vars(layer)[name] = value
