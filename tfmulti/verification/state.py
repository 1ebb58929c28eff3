"""Reads and restores the variables that a step reads or changes, for each replica.

It also finds those that a step changes outside the scope, only reads, or leaves unlike.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import model_contents
from tfmulti.verification.chiefs_values import some_of
from tfmulti.verification.dependencies import is_added
from tfmulti.verification.differences import are_apart, compare, largest_change, same_bits
from tfmulti.verification.python_values import walk

TRAINABLE, WEIGHT, OPTIMIZER, OWN, METRIC, OTHER = (
    "trainable weight",
    "weight",
    "optimizer's variable",
    "variable",
    "metric",
    "other",
)
"""The role of a variable in the model; METRIC and OTHER are restored, but not compared."""
COMPARED = (TRAINABLE, WEIGHT, OPTIMIZER, OWN)
# A variable of more numbers than this is no setting.
_MOST_SETTINGS = 4096
_OF_GENERATOR = "StateVar"
_RANDOM_STATES = ("seed_generator_state", _OF_GENERATOR)


@dataclasses.dataclass(frozen=True)
class Part:
    """One replica's copy of a variable.

    Attributes:
        handle: Its handle.
        name: The variable's path or name; not unique.
        kind: A constant of this module.
        replica: The local replica, from 0; None for a variable that all replicas share.
        first: The index in `State.parts` of the first copy of the same variable.
        is_owned: Whether other workers have no copy: sharded state or a sharded weight.
        is_added: Whether each replica has a part of its own, and its value is their sum.
    """

    handle: tf.Tensor
    name: str
    kind: str
    replica: int | None
    first: int
    is_owned: bool = False
    is_added: bool = False

    @property
    def is_internal(self) -> bool:
        """Whether it belongs to tfmulti itself."""
        return self.name.startswith("tfmulti_")

    @property
    def is_random_state(self) -> bool:
        """Whether it is the state of a random generator of Keras or TensorFlow."""
        return self.name.split("/")[-1].split(":")[0] in _RANDOM_STATES

    @property
    def counts_numbers(self) -> bool:
        """Whether it advances by as many numbers as TensorFlow's generator draws: for its rows."""
        return self.is_random_state and self.name.split("/")[-1].startswith(_OF_GENERATOR)


class State:
    """The variables of a model, of the objects that it holds, and of its traced steps.

    Args:
        model: The model.
        functions: Traced steps; empty if they run eagerly.
        ignored: Variables of verification itself.

    Attributes:
        parts: The copies of all variables that this worker has.
        is_sharded: Whether workers have slots or weights that others have not.
    """

    def __init__(self, model: keras.Model, functions=(), ignored=()):
        self.parts: list[Part] = []
        self.is_sharded = False
        # The variables of one replica have no copies: they are its own.
        self._shared_by = 0 if model.distribute_strategy.num_replicas_in_sync == 1 else None
        # Called in the scope, `fit` makes them variables of the strategy.
        local = model.distribute_strategy.experimental_local_results
        ignored = [each for variable in ignored for each in local(variable)]
        self._known = {keras_compat.handle_key(variable.handle) for variable in ignored}
        optimizers = model_contents.optimizers_of(model, nested=True)
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        self._add(model.trainable_variables, TRAINABLE)
        self._add(keras_compat.metric_variables(model), METRIC)
        self._add(slots, OPTIMIZER)
        self._add(model.variables, WEIGHT)
        kinds = (keras.Variable, tf.Variable)
        # By attribute path, such as `moving/0`.
        held = {path: thing for path, thing in walk(model) if isinstance(thing, kinds)}
        self._add(held.values(), OWN, list(held))
        if not functions:
            # A trace names what it draws from.
            self._add(keras_compat.global_states(model.distribute_strategy), OWN)
        for function in functions:
            names = {keras_compat.handle_key(v.handle): v.name for v in function.graph.variables}
            for handle in keras_compat.handles_of(function):
                self._add_handle(handle, names)

    def slots_of(self, index: int) -> list[int]:
        """Returns the indices of what optimizers keep for a trainable weight.

        Args:
            index: The weight's, in `parts`.
        """
        weight = self.parts[index]
        start = weight.name.replace("/", "_") + "_"
        return [
            i
            for i, part in enumerate(self.parts)
            if part.kind == OPTIMIZER
            and part.replica == weight.replica
            and part.name.split("/")[-1].startswith(start)
        ]

    def read(self) -> list[np.ndarray]:
        """Returns the values of all parts."""
        return [keras_compat.read_handle(part.handle) for part in self.parts]

    def as_on_first_replica(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns values in which every replica has those of the first local replica.

        Args:
            values: What `read` returned.
        """
        return [values[part.first] if part.replica else v for part, v in zip(self.parts, values)]

    def with_sums_of_zero(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Returns values in which sums over replicas, as in a metric, begin at zero.

        A step with all rows on one replica would go on from that replica's part of a sum.

        Args:
            values: What `read` returned.
        """
        return [np.zeros_like(v) if part.is_added else v for part, v in zip(self.parts, values)]

    def to_compare(self, values: list[np.ndarray]) -> list[int]:
        """Returns the indices of the parts that have one device's values after a step.

        Args:
            values: What `read` returned. Where replicas have values of their own, only the first
                replica's are compared.
        """
        return [
            i
            for i, part in enumerate(self.parts)
            if part.kind in COMPARED
            and part.replica is not None
            and not part.counts_numbers
            and same_bits(values[i], values[part.first])
        ]

    def write(self, values: list[np.ndarray]) -> None:
        """Writes back the values that `read` returned, bit for bit."""
        for part, value in zip(self.parts, values):
            keras_compat.write_handle(part.handle, value)

    def changed_outside(self, begin: list[np.ndarray], ends) -> list[str]:
        """Returns changed variables that exist once: every replica would change the same one.

        Args:
            begin: Their values before the steps.
            ends: Their values after the steps on one device, and after those on the replicas.
        """
        return [
            part.name
            for i, part in enumerate(self.parts)
            if part.replica is None
            and part.kind in (WEIGHT, OTHER)
            and not part.is_random_state
            and not part.is_internal
            and any(not same_bits(end[i], begin[i]) for end in ends)
        ]

    def unchanged_settings(
        self, functions: list, begin: list[np.ndarray], end: list[np.ndarray]
    ) -> list[tuple[tf.Tensor, np.ndarray]]:
        """Returns the handles and values of small variables that a step reads and leaves.

        Args:
            functions: The traced steps; empty if they run eagerly.
            begin: The values before the step.
            end: The values after it.
        """
        used = used_by(functions)
        return [
            (part.handle, begin[i])
            for i, part in enumerate(self.parts)
            if part.kind in (WEIGHT, OWN, OTHER)
            and not (part.is_internal or part.is_random_state)
            and begin[i].size <= _MOST_SETTINGS
            and same_bits(begin[i], end[i])
            and (not functions or keras_compat.handle_key(part.handle) in used)
        ]

    def find_drift(
        self, begin: list[np.ndarray], end: list[np.ndarray], ends: list, close: float
    ) -> str:
        """Returns the name of a variable that replicas hold differently after a step, or "".

        Args:
            begin: The values before the step.
            end: The values after it.
            ends: To which an `End` is added for each variable of the first replica.
            close: The relative difference that is rounding.
        """
        drifted = ""
        for part, before, value in zip(self.parts, begin, end):
            if part.kind not in (TRAINABLE, OPTIMIZER) or part.replica is None:
                continue
            first = part.first
            if not same_bits(begin[first], before):
                continue
            change = largest_change(end[first], begin[first])
            if compare(end[first], value, change, 0.0, close) is not None:
                drifted = drifted or part.name
            if part.replica == 0 and not part.is_owned:
                ends.append(End(part.name, some_of(value), change))
        return drifted

    def _add(self, variables, kind, paths=()):
        for index, variable in enumerate(variables):
            # An attribute that a variable of TensorFlow lacks is looked for in its value, which
            # is a collective where replicas' copies are added.
            of_keras = isinstance(variable, keras.Variable)
            owned = of_keras and hasattr(variable, "is_here")
            self.is_sharded |= owned
            if owned and not variable.is_here:
                # A slot, or a weight, that another worker keeps.
                continue
            with keras_compat.held_values():
                value = variable.value if of_keras else variable
            if value is None:
                continue
            name = variable.path if of_keras else variable.name
            # TensorFlow gives all unnamed variables the same name.
            name = paths[index] if paths and name.startswith("Variable") else name
            parts = getattr(value, "values", None)
            if owned:
                handle = (parts or (value,))[0].handle
                self._add_part(handle, name, kind, replica=0, is_owned=True)
            elif isinstance(value, tf.distribute.DistributedValues):
                first, added = len(self.parts), is_added(value)
                kind_here = METRIC if added and kind in (OWN, WEIGHT) else kind
                for replica, part in enumerate(parts):
                    self._add_part(part.handle, name, kind_here, replica, first, added=added)
            else:
                replica, added = self._shared_by, is_added(value)
                kind_here = METRIC if added and kind in (OWN, WEIGHT) else kind
                kind_here = OTHER if kind_here == OWN and replica is None else kind_here
                self._add_part(value.handle, name, kind_here, replica, added=added)

    def _add_handle(self, handle, names):
        container = keras_compat.container_of(handle)
        if container is not None:
            self._add([container], OWN)
        name = names.get(keras_compat.handle_key(handle), "a variable")
        self._add_part(handle, name, OTHER, None)

    def _add_part(self, handle, name, kind, replica, first=None, is_owned=False, added=False):
        key = keras_compat.handle_key(handle)
        if key not in self._known:
            self._known.add(key)
            first = len(self.parts) if first is None else first
            self.parts.append(Part(handle, name, kind, replica, first, is_owned, added))


class End(NamedTuple):
    """A variable after a step, to be compared between workers.

    Attributes:
        name: Its name.
        values: Some of its numbers.
        change: Its largest change.
    """

    name: str
    values: np.ndarray
    change: float


def used_by(functions: list) -> set[int]:
    """Returns the keys of the handles of all variables that traced steps read or change.

    Args:
        functions: The traced steps.
    """
    return {keras_compat.handle_key(h) for f in functions for h in keras_compat.handles_of(f)}


def make_alike(model, close: float = 0.0) -> str:
    """Makes trained weights and slots the same on all local replicas: those of the first one.

    Args:
        model: The model.
        close: The fraction of a variable's largest number that is rounding; 0.0 compares bits.

    Returns:
        The name of one that they held differently, or "".
    """
    state, name = State(model), ""
    kept = [part for part in state.parts if part.kind in (TRAINABLE, OPTIMIZER) and part.replica]
    for part in kept:
        handles = part.handle, state.parts[part.first].handle
        value, first = map(keras_compat.read_handle, handles)
        if not same_bits(value, first):
            name = name or (part.name if are_apart(value, first, close) else "")
            keras_compat.write_handle(part.handle, first)
    return name
