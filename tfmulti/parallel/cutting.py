"""Cuts a Functional or Sequential model into parts that run one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math

import keras

from tfmulti import keras_compat
from tfmulti.parallel.layer_costs import numbers_of

# The costliest stage may cost so many times what it must, if less is sent then.
_NEARLY_EVEN = 1.1


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

    Attributes:
        parts: The parts, in their order.
        outputs: The model's outputs, as tensors of its graph.
    """

    def __init__(self, model: keras.Model, starts: list[int]):
        self._model = model
        self._nodes = keras_compat.nodes_of(model)
        is_chain = isinstance(model, keras.Sequential)
        self._input = model.inputs[0] if is_chain else model.input
        self._output = model.outputs[0] if is_chain else model.output
        self.outputs = model.outputs
        bounds = [0, *starts, len(self._nodes)]
        self.parts = [self._part(a, b) for a, b in zip(bounds[:-1], bounds[1:])]

    def call(self, inputs, training=None, mask=None):
        """Runs the parts one after the other; it takes the place of the model's own `call`."""
        values = self.values_of(inputs, mask)
        for part in self.parts:
            given = [values[each] for each in part.inputs]
            results = part.model(given if len(given) > 1 else given[0], training=training)
            values.update(zip(part.outputs, keras.tree.flatten(results)))
        return self.packed(values)

    def values_of(self, inputs, mask=None) -> dict:
        """Returns the values of the model's inputs, with their masks, by the tensors' identities.

        Args:
            inputs: What the model is called with.
            mask: Masks of it, or None.
        """
        masks = [None] * len(self._model.inputs) if mask is None else keras.tree.flatten(mask)
        values = {}
        for tensor, value, its_mask in zip(self._model.inputs, self._flat(inputs), masks):
            keras_compat.set_mask(value, its_mask)
            values[id(tensor)] = value
        return values

    def packed(self, values: dict):
        """Returns the model's outputs in their structure, from values by identity."""
        outputs = [values[id(tensor)] for tensor in self.outputs]
        # As Keras does, a list of one output is that output.
        return (
            outputs[0]
            if isinstance(self._output, (list, tuple)) and len(outputs) == 1
            else keras.tree.pack_sequence_as(self._output, outputs)
        )

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
        ends = list(before.values()), list(after.values())
        part = keras_compat.part_of_calls(self._model, first, last, *ends)
        # Its layers have set the masks of its outputs; Keras would warn that they are lost.
        part.supports_masking, part.compute_mask = True, lambda inputs, previous_mask: None
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
    held = list(itertools.accumulate(sum(numbers_of(x) for x in outputs) for _, outputs in nodes))
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


def even_starts(model: keras.Model, costs: list[float], num_parts: int) -> list[int]:
    """Returns where to cut a model so that its parts cost about as much as each other.

    Of all cuts whose costliest part is at most a tenth above the least possible, the one that
    hands the least on is taken.

    Args:
        model: A built Functional or Sequential model.
        costs: What each of its calls costs.
        num_parts: How many parts.

    Raises:
        ValueError: If the model has fewer calls than parts.
    """
    nodes = keras_compat.nodes_of(model)
    if len(nodes) < num_parts:
        raise ValueError(
            f"A pipeline of {num_parts} stages needs as many layers. Received: {model.name!r} "
            f"with {len(nodes)}. Use fewer stages, on fewer workers or devices."
        )
    before = [0.0, *itertools.accumulate(costs)]
    handed_on = [_handed_on(nodes, position) for position in range(len(nodes))] + [0]
    even = _best_cut(before, handed_on, num_parts, key=lambda cut: cut.most)
    limit = _NEARLY_EVEN * even.most
    return list(
        _best_cut(before, handed_on, num_parts, lambda c: (c.sent, c.most), limit).ends[:-1]
    )


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Where parts end: the cost of the costliest one, and what all of them hand on."""

    most: float = 0.0
    sent: int = 0
    ends: tuple[int, ...] = ()


def _best_cut(before, handed_on, num_parts, key, limit=math.inf) -> _Ends:
    """Returns the best cut into parts that cost no more than a limit, by dynamic programming.

    Args:
        before: The costs of all calls before each position.
        handed_on: The numbers that a cut there hands on.
        num_parts: How many parts.
        key: What is to be small.
        limit: The largest cost of a part.
    """
    last = len(before) - 1
    best = {0: _Ends()}
    for part in range(1, num_parts + 1):
        ends = [last] if part == num_parts else range(part, last - num_parts + part + 1)
        longer = {}
        for end in ends:
            cuts = [
                _Ends(max(cut.most, cost), cut.sent + handed_on[end], (*cut.ends, end))
                for start, cut in best.items()
                if start < end and (cost := before[end] - before[start]) <= limit
            ]
            if cuts:
                longer[end] = min(cuts, key=key)
        best = longer
    return best[last]


def starts_at(model: keras.Model, names: list[str]) -> list[int]:
    """Returns the positions of the calls of layers, at which parts are to begin.

    Args:
        model: A built Functional or Sequential model.
        names: Names of layers, in their order.

    Raises:
        ValueError: For another name, the first layer, or another order.
    """
    every = [layer.name for layer in _layers(model)]
    starts = [every.index(name) if name in every else 0 for name in names]
    if 0 in starts or sorted(set(starts)) != starts:
        raise ValueError(
            "`stages` must be names of layers at which stages begin, in the model's order, "
            f"without the first. Received: stages={names}. The layers are {every}."
        )
    return starts


def _layers(model):
    return keras_compat.layers_of_nodes(model)


def _handed_on(nodes, position):
    made = {id(x): x for inputs, outputs in nodes[:position] for x in (*inputs, *outputs)}
    used = {id(x) for inputs, _ in nodes[position:] for x in inputs}
    return sum(numbers_of(x) for key, x in made.items() if key in used)
