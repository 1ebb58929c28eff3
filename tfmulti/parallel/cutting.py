"""Cuts a Functional or Sequential model into parts that run one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math

import keras

from tfmulti import keras_compat


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        model: The part as a model; its layers are those of the whole.
        inputs: Identities of the whole model's tensors that it takes, in the order of its inputs.
        outputs: Those of the tensors that it returns.
    """

    model: keras.Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Cut:
    """A model in parts.

    Args:
        model: A built Functional or Sequential model.
        starts: Positions in the order of the model's calls at which a part begins, but the first.
    """

    def __init__(self, model: keras.Model, starts: list[int]):
        self._model = model
        self._nodes = keras_compat.nodes_of(model)
        is_chain = isinstance(model, keras.Sequential)
        self._input = model.inputs[0] if is_chain else model.input
        self._output = model.outputs[0] if is_chain else model.output
        bounds = [0, *starts, len(self._nodes)]
        self.parts = [self._part(a, b) for a, b in zip(bounds[:-1], bounds[1:])]

    def call(self, inputs, training=None, mask=None):
        """Runs the parts one after the other; it takes the place of the model's own `call`."""
        masks = [None] * len(self._model.inputs) if mask is None else keras.tree.flatten(mask)
        values = {}
        for tensor, value, its_mask in zip(self._model.inputs, self._flat(inputs), masks):
            keras_compat.set_mask(value, its_mask)
            values[id(tensor)] = value
        for part in self.parts:
            given = [values[each] for each in part.inputs]
            results = part.model(given if len(given) > 1 else given[0], training=training)
            values.update(zip(part.outputs, keras.tree.flatten(results)))
        outputs = [values[id(tensor)] for tensor in self._model.outputs]
        return keras.tree.pack_sequence_as(self._output, outputs)

    def _flat(self, inputs):
        if isinstance(inputs, dict) and isinstance(self._input, dict):
            inputs = {name: inputs[name] for name in self._input}
        return keras.tree.flatten(inputs)

    def _part(self, first, last):
        nodes = self._nodes[first:last]
        made = {id(x) for _, outputs in nodes for x in outputs}
        before = {id(x): x for inputs, _ in nodes for x in inputs if id(x) not in made}
        later = {id(x) for inputs, _ in self._nodes[last:] for x in inputs}
        later |= {id(x) for x in self._model.outputs}
        after = {id(x): x for _, outputs in nodes for x in outputs if id(x) in later}
        part = keras.Model(list(before.values()), list(after.values()))
        return Part(part, tuple(before), tuple(after))


def balanced_starts(model: keras.Model, num_parts: int | None = None) -> list[int]:
    """Returns where to cut a model so that its parts hold about as much in their activations.

    A cut goes where the least has to be handed on, as after a block with a skip connection.

    Args:
        model: A built Functional or Sequential model.
        num_parts: How many parts; None for the square root of the calls, which needs the least
            memory in a chain of equal layers (Chen et al., 2016).
    """
    nodes = keras_compat.nodes_of(model)
    num_parts = num_parts or max(2, round(math.sqrt(len(nodes))))
    # What the calls before each position hold, as a fraction of all.
    held = list(itertools.accumulate(sum(_size(x) for x in outputs) for _, outputs in nodes))
    held = [0.0, *(size / held[-1] for size in held)]
    starts = set()
    for part in range(1, num_parts):
        near = [
            position
            for position in range(1, len(nodes))
            if abs(held[position] - part / num_parts) <= 0.5 / num_parts
        ]
        # Neighbouring parts may choose the same place; there is one cut then.
        starts |= {min(near, key=lambda position: _handed_on(nodes, position))} if near else set()
    return sorted(starts)


def _handed_on(nodes, position):
    made = {id(x): x for inputs, outputs in nodes[:position] for x in (*inputs, *outputs)}
    used = {id(x) for inputs, _ in nodes[position:] for x in inputs}
    return sum(_size(x) for key, x in made.items() if key in used)


def _size(tensor):
    """Numbers of one row of a tensor; what is not known counts as one."""
    return math.prod(size or 1 for size in tensor.shape[1:])
