"""Cuts a Functional or Sequential model into parts that run one after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math

import keras

from tfmulti import keras_compat
from tfmulti.parallel.layer_costs import values_per_row

# The costliest stage may cost this many times the least possible, if stages then send less.
_NEARLY_EVEN = 1.1


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a model.

    Attributes:
        model: The part as a model, with layers of the whole model.
        inputs: Ids of the whole model's symbolic tensors that it takes, in the order of its inputs.
        outputs: Ids of those that it returns.
    """

    model: keras.Model
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Cut:
    """A model that is cut into parts.

    Args:
        model: A built Functional or Sequential model.
        starts: Positions, in the order of the model's layer calls, at which the second and later
            parts begin.

    Attributes:
        parts: The parts, in order.
        inputs: The model's symbolic inputs.
        outputs: The model's symbolic outputs.
    """

    def __init__(self, model: keras.Model, starts: list[int]):
        self._model = model
        self._nodes = keras_compat.nodes_of(model)
        is_sequential = isinstance(model, keras.Sequential)
        self._input = model.inputs[0] if is_sequential else model.input
        self._output = model.outputs[0] if is_sequential else model.output
        self.inputs, self.outputs = model.inputs, model.outputs
        self._layers = keras_compat.layers_of_nodes(model)
        bounds = [0, *starts, len(self._nodes)]
        self.parts = [self._part(a, b) for a, b in zip(bounds[:-1], bounds[1:])]

    def call(self, inputs, training=None, mask=None):
        """Runs the parts one after the other; it replaces the model's own `call`."""
        self.refuse_changed()
        values = self.values_of(inputs, mask)
        for part in self.parts:
            given = [values[each] for each in part.inputs]
            results = part.model(given if len(given) > 1 else given[0], training=training)
            values.update(zip(part.outputs, keras.tree.flatten(results)))
        return self.pack_outputs(values)

    def refuse_changed(self) -> None:
        """Raises ValueError if the model has other layers than when it was cut."""
        layers = keras_compat.layers_of_nodes(self._model)
        if layers != self._layers:
            before, now = ([layer.name for layer in each] for each in (self._layers, layers))
            raise ValueError(
                "A model that `checkpoint_activations` or `pipeline` has cut must keep its layers. "
                f"Received: {self._model.name!r}, which had the layers {before} and has {now}. "
                "Make a new model, and call the function after the last `add` or `pop`."
            )

    def values_of(self, inputs, mask=None) -> dict:
        """Returns the values of the model's inputs, with their masks, by the ids of the inputs.

        Args:
            inputs: The arguments of the model's call.
            mask: Their masks, or None.
        """
        tensors = keras_compat.standardized_inputs(self._model, self.taken(inputs))
        masks = [None] * len(self.inputs) if mask is None else keras.tree.flatten(self.taken(mask))
        values = {}
        for tensor, value, its_mask in zip(self.inputs, tensors, masks):
            keras_compat.set_mask(value, its_mask)
            values[id(tensor)] = value
        return values

    def taken(self, inputs):
        """Returns the arguments of the model's call without those that no input takes."""
        names = self._input if isinstance(self._input, dict) else [x.name for x in self.inputs]
        if isinstance(inputs, dict) and inputs.keys() >= set(names):
            return {name: inputs[name] for name in names}
        return inputs

    def pack_outputs(self, values: dict):
        """Returns the model's outputs in their structure, from values by id."""
        outputs = [values[id(tensor)] for tensor in self.outputs]
        if isinstance(self._output, (list, tuple)) and len(outputs) == 1:
            # Keras returns the only output of a list by itself.
            return outputs[0]
        return keras.tree.pack_sequence_as(self._output, outputs)

    def _part(self, first, last):
        nodes = self._nodes[first:last]
        made = {id(x) for _, outputs in nodes for x in outputs}
        taken = {id(x): x for inputs, _ in nodes for x in inputs if id(x) not in made}
        later = {id(x) for inputs, _ in self._nodes[last:] for x in inputs}
        later |= {id(x) for x in self.outputs}
        returned = {id(x): x for _, outputs in nodes for x in outputs if id(x) in later}
        part = keras_compat.part_of_calls(
            self._model, first, last, list(taken.values()), list(returned.values())
        )
        # Its layers have set the masks of its outputs; Keras would warn that they are lost.
        part.supports_masking, part.compute_mask = True, lambda inputs, previous_mask: None
        return Part(part, tuple(taken), tuple(returned))


def refuse_own_call(model: keras.Model, name: str, advice: str) -> None:
    """Raises ValueError if a model's `call` is not Keras's: a cut would run the graph without it.

    Args:
        model: A Functional or Sequential model.
        name: The function that would cut it.
        advice: What to do instead.
    """
    if not keras_compat.is_stock(model.call):
        own = getattr(model.call, "__qualname__", repr(model.call))
        raise ValueError(
            f"`{name}` cuts the graph of a model whose `call` is Keras's own. Received: "
            f"{model.name!r}, with the call {own}, which would be left out. {advice}"
        )


def starts_by_activations(model: keras.Model, num_parts: int | None = None) -> list[int]:
    """Returns where to cut a model so that all parts have about as many activations.

    It cuts where the fewest numbers pass from one part to the next, as after a block with a skip
    connection.

    Args:
        model: A built Functional or Sequential model.
        num_parts: How many parts; None for the square root of the number of layer calls, which
            needs the least memory in a chain of equal layers (Chen et al., 2016).
    """
    nodes = keras_compat.nodes_of(model)
    num_parts = num_parts or max(2, round(math.sqrt(len(nodes))))
    sizes = list(
        itertools.accumulate(sum(values_per_row(x) for x in outputs) for _, outputs in nodes)
    )
    # The fraction of all activations that the calls before each position have.
    before = [0.0, *(size / sizes[-1] for size in sizes)]
    starts = set()
    for part in range(1, num_parts):
        near = [
            position
            for position in range(1, len(nodes))
            if abs(before[position] - part / num_parts) <= 0.5 / num_parts
        ]
        if near:
            # Neighbouring parts may choose the same position, and then become one.
            starts.add(min(near, key=lambda position: _numbers_passed(nodes, position)))
    return sorted(starts)


def starts_by_cost(model: keras.Model, costs: list[float], num_parts: int) -> list[int]:
    """Returns where to cut a model so that all parts cost about the same.

    Among the cuts whose costliest part is at most a tenth above the least possible, it takes the
    one that passes the fewest numbers from part to part.

    Args:
        model: A built Functional or Sequential model.
        costs: The cost of each layer call, in any unit.
        num_parts: How many parts.

    Raises:
        ValueError: If the model has fewer layer calls than parts.
    """
    nodes = keras_compat.nodes_of(model)
    if len(nodes) < num_parts:
        raise ValueError(
            f"A pipeline of {num_parts} stages needs at least that many layers. Received: "
            f"{model.name!r} with {len(nodes)}. Use fewer stages, on fewer workers or devices."
        )
    before = [0.0, *itertools.accumulate(costs)]
    passed = [_numbers_passed(nodes, position) for position in range(len(nodes))] + [0]
    even = _best_cut(before, passed, num_parts, key=lambda cut: cut.largest_cost)
    best = _best_cut(
        before,
        passed,
        num_parts,
        key=lambda cut: (cut.passed, cut.largest_cost),
        limit=_NEARLY_EVEN * even.largest_cost,
    )
    return list(best.ends[:-1])


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Where parts end, the cost of the costliest part, and how many numbers pass between parts."""

    largest_cost: float = 0.0
    passed: int = 0
    ends: tuple[int, ...] = ()


def _best_cut(before, passed, num_parts, key, limit=math.inf) -> _Ends:
    """Returns the best cut into parts that cost no more than a limit, by dynamic programming.

    Args:
        before: The cost of all calls before each position.
        passed: How many numbers a cut at each position passes on.
        num_parts: How many parts.
        key: Function of an `_Ends` that returns what to minimize.
        limit: The largest cost of a part.
    """
    last = len(before) - 1
    best = {0: _Ends()}
    for part in range(1, num_parts + 1):
        ends = [last] if part == num_parts else range(part, last - num_parts + part + 1)
        longer = {}
        for end in ends:
            cuts = [
                _Ends(max(cut.largest_cost, cost), cut.passed + passed[end], (*cut.ends, end))
                for start, cut in best.items()
                if start < end and (cost := before[end] - before[start]) <= limit
            ]
            if cuts:
                longer[end] = min(cuts, key=key)
        best = longer
    return best[last]


def starts_at(model: keras.Model, names: list[str]) -> list[int]:
    """Returns the positions of the layer calls at which the second and later parts begin.

    Args:
        model: A built Functional or Sequential model.
        names: Names of the layers, in the model's order.

    Raises:
        ValueError: For an unknown name, the first layer, or another order.
    """
    every = [layer.name for layer in keras_compat.layers_of_nodes(model)]
    starts = [every.index(name) if name in every else 0 for name in names]
    if 0 in starts or sorted(set(starts)) != starts:
        raise ValueError(
            "`stages` must be names of layers at which stages begin, in the model's order, "
            f"without the first. Received: stages={names}. The layers are {every}."
        )
    return starts


def _numbers_passed(nodes, position) -> int:
    """Returns how many numbers a row has that calls before a position make and later ones use."""
    made = {id(x): x for inputs, outputs in nodes[:position] for x in (*inputs, *outputs)}
    used = {id(x) for inputs, _ in nodes[position:] for x in inputs}
    return sum(values_per_row(x) for key, x in made.items() if key in used)
