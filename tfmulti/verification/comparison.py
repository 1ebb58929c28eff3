"""Compares steps on one device and on the replicas: their outputs, and the state after each.

`Comparison` compares them, `Rounding` tells their differences from rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfmulti.verification.differences import (
    EPSILONS,
    Difference,
    compare,
    distance,
    eps_of,
    largest_change,
    move_last_place,
    share_of_rounding,
    without_gradient,
)
from tfmulti.verification.state import COMPARED, OPTIMIZER, TRAINABLE, State

# Reported numbers are sums over few rows, and more accurate than gradients.
_OUTPUT = 0.1
# The fraction of a change that counts as rounding where some rows are enlarged.
_OF_ENLARGED = 2e-2
# More than any difference of what is nothing but rounding; finite, since infinite noise is none.
_ANY = 1e30
# Measures of rounding: runs, by how many units in the last place these move weights, and the share
# of the distance that counts. Where a difference remains, larger moves show jumps that rounding
# seldom makes: of a ReLU at 0, or of the share of rows whose largest output is the right one.
_NOISY_RUNS = ((range(2), 1, 1.0), (range(2, 10), 10, 0.2))
# Starts from which a difference must show as well, and by how many units these are moved.
_AGAIN, _UNITS = range(20, 22), 10


class NotVerified(Exception):
    """The comparison proves nothing; the text gives the reason."""


class NothingChanges(NotVerified):
    """Both ways agree, but no weight changed; a later state may show a difference."""


class FailsHere(ValueError):
    """The step on the replicas fails on this worker while others wait in it for this one."""


@dataclasses.dataclass
class Outcome:
    """The results of one step.

    Attributes:
        outputs: Logs or predictions by name.
        metrics: The metrics' results after the step, by name.
    """

    outputs: dict
    metrics: dict


class Comparison:
    """Compares the results of steps.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        state: The state that the steps change.
        begin: Its values before all steps.
        close: The fraction of the largest change of a variable that counts as rounding.

    Attributes:
        is_synthetic: Whether the rows have synthetic values, which can be large.
        enlarged: By which factor some rows are enlarged. Their terms cancel, and a logarithm or an
            exponential loses as many digits again; what such rows are to show is no small part.
    """

    def __init__(self, kind: str, state: State, begin: list[np.ndarray], close: float):
        self._kind, self._state, self._close = kind, state, close
        self._compared = state.to_compare(begin)
        self.is_synthetic, self.enlarged = False, 1.0

    def differences(self, begin, expected, found, noise) -> list[Difference]:
        """Returns the differences of some steps, the first one first.

        Args:
            begin: The values of the state before the first step.
            expected: For each step, its `Outcome` on one device and the values of the state then.
            found: The same on the replicas.
            noise: For each step, how far rounding moves values; None for what is far beyond it.
        """
        before, differences = begin, []
        moved, loose = [0.0] * len(begin), {}
        for step, ((one, values), (many, others)) in enumerate(zip(expected, found)):
            noise_here = None if noise is None else noise[step]
            differences += self._compare_outputs(one.outputs, many.outputs, "", step, noise_here)
            differences += self._compare_states(
                values, others, before, moved, loose, step, noise_here
            )
            differences += self._compare_outputs(
                one.metrics, many.metrics, "metric ", step, noise_here
            )
            before = values
        return differences

    def _compare_states(self, values, others, before, moved, loose, step, noise):
        parts = self._state.parts
        found, rounding = [], 0.0 if noise is None else self._rounding(values, before)
        largest = {} if noise is None else self._largest_of_slots(values)
        for i in self._compared:
            part = parts[i]
            allowed = 0.0 if noise is None else noise.get(i, 0.0)
            # Rounding errors of one step persist, even if the next step changes little.
            change = largest_change(values[i], before[i]) if part.first == i else 0.0
            moved[i] = max(moved[i], moved[part.first], change)
            if noise is not None and part.kind == TRAINABLE:
                slots = [j for j in self._state.slots_of(i) if values[j].shape == values[i].shape]
                moments = {parts[j].name: values[j] for j in slots}
                loose[i] = loose.get(i, np.False_) | without_gradient(moments, self._close)
                loose.update({j: loose[i] for j in slots})
                pairs = [(parts[j].name, values[j], others[j]) for j in slots]
                largest_of = [self.enlarged * largest[_slot(parts[j])] for j in slots]
                measured = [noise.get(j, 0.0) for j in slots]
                share = share_of_rounding(pairs, largest_of, measured)
                # Rounding can be nothing on one device.
                most = max(moved[i], largest_change(others[i], before[i]))
                allowed = allowed + rounding + share * most
                allowed = np.where(loose[i], np.maximum(moved[i], allowed), allowed)
            elif noise is not None and part.kind == OPTIMIZER:
                # A gradient that is 0 but for rounding shows in the slots first.
                scale = largest[_slot(part)] * EPSILONS * self.enlarged * eps_of(values[i])
                allowed = np.where(loose.get(i, False), _ANY, allowed + scale)
            pair = compare(others[i], values[i], moved[i], allowed, self._allowed_part)
            if pair is not None:
                what = f"{part.kind} {part.name}"
                found.append((part, Difference(what, *pair, replica=part.replica, step=step + 1)))
        found.sort(key=lambda each: COMPARED.index(each[0].kind))
        return [difference for _, difference in found]

    @property
    def _allowed_part(self) -> float:
        """The fraction of the largest change that counts as rounding."""
        return self._close if self.enlarged == 1 else max(self._close, _OF_ENLARGED)

    def _largest_of_slots(self, values) -> dict[str, float]:
        """Returns the largest number of all slots of a name."""
        largest: dict[str, float] = {}
        for part, value in zip(self._state.parts, values):
            if part.kind == OPTIMIZER:
                name = _slot(part)
                largest[name] = max(largest.get(name, 0.0), largest_change(value))
        return largest

    def _rounding(self, values, before) -> float:
        """Returns how far rounding moves a weight of which terms as large as outliers cancel."""
        weights = [i for i, part in enumerate(self._state.parts) if part.kind == TRAINABLE]
        if not self.is_synthetic or not weights:
            return 0.0
        changes = [largest_change(values[i], before[i]) for i in weights]
        return max(changes) * eps_of(values[weights[0]])

    def _compare_outputs(self, expected, found, kind, step, noise):
        differences = []
        for name, wanted in expected.items():
            what = f"{kind}{name}" if name else f"what `{self._kind}_step` returns"
            have = found.get(name)
            if have is None:
                differences.append(Difference(what, wanted, "nothing", np.inf, step=step + 1))
                continue
            allowed = 0.0 if noise is None else noise.get(kind + name, 0.0)
            pair = compare(have, wanted, noise=allowed, close=self._allowed_part * _OUTPUT)
            if pair is not None:
                differences.append(Difference(what, *pair, step=step + 1))
        return differences


def _slot(part) -> str:
    return part.name.rsplit("_", 1)[-1]


def with_moved_weights(
    parts, values: list[np.ndarray], run: int, dtype: str, units: int
) -> list[np.ndarray]:
    """Returns the values of a state with its trained weights changed in their last place.

    Args:
        parts: Those of the `State`.
        values: Its values.
        run: A number on which the directions depend.
        dtype: The dtype in which the model computes.
        units: By how many units they change.
    """
    return [
        move_last_place(value, f"{run} {part.name}", dtype, units)
        if part.kind == TRAINABLE
        else value
        for part, value in zip(parts, values)
    ]


class Rounding:
    """Measures how far rounding moves what a step computes, and compares beyond that.

    The noise is measured with weights that are changed in their last place. Permuting the rows
    instead would fail if the result depends on their order, for example through pairs of rows or
    random numbers.

    Args:
        moved: Function that returns the state with moved weights, of `run` and `units`.
        on_one_device: Function of an initial state; returns the result of one device.
        on_replicas: The same of the replicas.
        compare: Function of an initial state, both results and the noise, or None; returns the
            differences.
        is_on_any: Function that returns whether something was found, on any worker.
    """

    def __init__(
        self,
        moved: Callable,
        on_one_device: Callable,
        on_replicas: Callable,
        compare: Callable,
        is_on_any: Callable,
    ):
        self._moved, self._one, self._many = moved, on_one_device, on_replicas
        self._compare, self._is_on_any = compare, is_on_any

    def differences(self, begin, expected, found) -> list[Difference]:
        """Returns the differences beyond the noise.

        It is measured only where results differ, since most steps show no difference at all.

        Args:
            begin: The initial state.
            expected: The results of one device.
            found: Those of the replicas.
        """
        noise: list[dict] = [{} for _ in expected]
        for runs, units, share in _NOISY_RUNS:
            for run in runs:
                _add_noise(noise, expected, self._one(self._moved(run=run, units=units)), share)
            differences = self._compare(begin, expected, found, noise)
            if not self._is_on_any(differences):
                break
        return differences

    def differences_that_last(self, begin, expected, found) -> list[Difference]:
        """Returns the differences, or none if they are gone with weights of another last place.

        Amid a training some value is often at a jump, as of a ReLU at 0, that rounding can take.

        Args:
            begin: The initial state.
            expected: The results of one device.
            found: Those of the replicas.
        """
        differences = self.differences(begin, expected, found)
        for run in _AGAIN:
            if not self._is_on_any(differences):
                break
            start = self._moved(run=run, units=_UNITS)
            again = self.differences(start, self._one(start), self._many(start))
            differences = differences if self._is_on_any(again) else []
        return differences


def _add_noise(noise, expected, found, share):
    """Adds to what is known of rounding how far two results on one device are apart."""
    for at_step, (one, values), (other, moved) in zip(noise, expected, found):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(values, moved))]
        for kind, many, few in (
            ("", one.outputs, other.outputs),
            ("metric ", one.metrics, other.metrics),
        ):
            pairs += [(kind + name, many[name], few[name]) for name in many]
        for name, a, b in pairs:
            apart = share * distance(a, b)
            at_step[name] = max(at_step.get(name, 0.0), apart if np.isfinite(apart) else 0.0)


def by_name(structure) -> dict:
    """Returns the leaves of logs or predictions as arrays by name."""
    if isinstance(structure, dict):
        items = [
            (f"{name}/{n}" if n else str(name), v)
            for name, part in structure.items()
            for n, v in by_name(part).items()
        ]
        return dict(items)
    if isinstance(structure, (list, tuple)):
        return {
            f"{i}/{n}" if n else str(i): v
            for i, part in enumerate(structure)
            for n, v in by_name(part).items()
        }
    return {} if structure is None else {"": _as_array(structure)}


def _as_array(value):
    if isinstance(value, tf.RaggedTensor):
        return value.to_tensor().numpy()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy()
    return keras.ops.convert_to_numpy(value)


def finite_values(step: tuple[Outcome, list[np.ndarray]]) -> set:
    """Returns the names of the values after a step that are entirely finite.

    Args:
        step: The results of the step, and the values of the state after it.
    """
    outcome, values = step
    pairs = [*enumerate(values), *outcome.outputs.items()]
    pairs += [(("metric", name), value) for name, value in outcome.metrics.items()]
    return {name for name, value in pairs if not _is_float(value) or np.isfinite(value).all()}


def _is_float(value) -> bool:
    return np.asarray(value).dtype.kind == "f"
