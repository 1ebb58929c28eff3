"""What workers answer to the steps of parameter servers, and what a batch's parts add up to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Answer:
    """A worker's answer to a training step, as NumPy arrays.

    Attributes:
        updates: The number of updates that had been made when the worker read the weights.
        worker: The worker's number.
        process: The id of its process, which changes with a restart.
        rows: The number of rows of its batch.
        gradients: For each variable an array, a pair (values, row numbers) for some rows of a
            table, or None.
        changes: By how much each state that the step assigns has changed.
        metrics: The metrics' states over these rows only.
        logs: What `train_step` returns besides results of metrics, by name.
    """

    updates: int
    worker: int
    process: int
    rows: int
    gradients: list
    changes: list[np.ndarray]
    metrics: list[np.ndarray]
    logs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def add_gradients(answers: Sequence[Answer]) -> tuple[list, list[np.ndarray]]:
    """Combines the gradients and changes of a batch's parts into those of the batch.

    Those of each part are means over its rows, and are weighted as in `tfmulti.step.weighting`.
    """
    total = sum(answer.rows for answer in answers)
    weights = [np.float64(answer.rows / total) for answer in answers]
    gradients = [
        _add_gradient(parts, weights) for parts in zip(*(answer.gradients for answer in answers))
    ]
    changes = [
        _weighted_sum(parts, weights) for parts in zip(*(answer.changes for answer in answers))
    ]
    return gradients, changes


def mean_logs(answers: Sequence[Answer]) -> dict[str, float]:
    """Returns the logs of a step that are not metrics: means over its parts, weighted by rows."""
    total = sum(answer.rows for answer in answers)
    return {
        name: plain(sum(np.asarray(a.logs[name]) * (a.rows / total) for a in answers))
        for name in answers[0].logs
    }


def _add_gradient(parts, weights):
    if parts[0] is None:
        return None
    if isinstance(parts[0], tuple):
        values = [part[0] * part[0].dtype.type(w) for part, w in zip(parts, weights)]
        return np.concatenate(values), np.concatenate([part[1] for part in parts])
    return _weighted_sum(parts, weights)


def _weighted_sum(parts, weights):
    if parts[0].dtype.kind not in "fcV":
        # Counters and flags: the same in each part.
        return parts[0]
    return sum(part * part.dtype.type(w) for part, w in zip(parts, weights))


def plain(value) -> float | np.ndarray:
    """Returns a number as Python has it; arrays stay what they are."""
    value = np.asarray(value)
    return float(value) if value.ndim == 0 else value
