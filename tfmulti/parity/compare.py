"""The record of a run, and the comparison of two records."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np


@dataclasses.dataclass
class Summary:
    """The summary of a run.

    Attributes:
        data: Digests of the data in two passes over them.
        paths: Path of each of the model's variables.
        trainable: Whether each is trainable.
        steps: Numbers of the steps whose weights were kept; 0 is before the first.
        losses: The loss in the logs after each step, a running mean over the epoch.
        epochs: The logs of each epoch.
        unlike: For each step, the variables that differ between this process's replicas.
        rounding: Relative rounding of one operation of the model.
    """

    data: list[str]
    paths: list[str] = dataclasses.field(default_factory=list)
    trainable: list[bool] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    epochs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    unlike: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    rounding: float = 2**-23


class Record:
    """A run's folder: `summary.json`, and one file of weights for each step.

    One file a step, so that two runs are compared with two steps in memory.

    Args:
        folder: The folder; it is made when something is written.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def write_weights(self, step: int, weights: list[np.ndarray]) -> None:
        """Writes the weights after a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        np.savez(self._file(step), *map(_as_numpy_reads, weights))

    def read_weights(self, step: int) -> list[np.ndarray]:
        """Returns the weights after a step, in the model's order."""
        with np.load(self._file(step)) as file:
            return [file[f"arr_{number}"] for number in range(len(file.files))]

    def write_summary(self, summary: Summary) -> None:
        """Writes the summary after a successful run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(summary))
        (self.folder / "summary.json").write_text(text)

    def read_summary(self) -> Summary:
        """Returns the summary."""
        values = json.loads((self.folder / "summary.json").read_text())
        for name in ("losses", "unlike"):
            values[name] = {int(step): value for step, value in values[name].items()}
        return Summary(**values)

    def _file(self, step) -> Path:
        return self.folder / f"step_{step:06d}.npz"


def _as_numpy_reads(array) -> np.ndarray:
    """Returns float32 for bfloat16 and float8, exactly: NumPy's files have no dtype for them."""
    return array.astype(np.float32) if array.dtype.kind == "V" else array


WEIGHTS, LOSS, METRICS = "weights", "loss", "metrics"
KINDS = (WEIGHTS, LOSS, METRICS)
# Another order of rows changes the last places by rounding; a larger difference counts.
_ROUNDING_STEPS = 100


@dataclasses.dataclass
class Comparison:
    """The differences of one configuration from one device.

    Each is the largest |a - b| / max(1, |b|), b being one device's; NaN differs from all but
    NaN by infinity.

    Attributes:
        largest: For weights, loss and metrics: the largest difference of the whole run.
        by_variable: The largest difference of each variable.
        first: Name and step of the first difference that passes the tolerance, or None.
        differing: The variables that differ in that step.
        first_loss: The difference of the first step's loss; None where there is none.
        same_data: Whether both trained on the same data, in both passes over them.
        same_start: Whether both began with the same weights.
    """

    largest: dict[str, float]
    by_variable: dict[str, float]
    first: tuple[str, int] | None = None
    differing: list[str] = dataclasses.field(default_factory=list)
    first_loss: float | None = None
    same_data: bool = True
    same_start: bool = True


def difference(value, reference) -> float:
    """Returns the largest |value - reference| / max(1, |reference|) of two arrays.

    >>> difference([1.0, 20.0], [1.5, 10.0])
    1.0
    >>> difference([float("nan")], [1.0])
    inf
    """
    a, b = np.asarray(value), np.asarray(reference)
    if a.shape != b.shape:
        return math.inf
    if not a.size or np.array_equal(a, b):
        return 0.0
    if a.dtype.kind not in "fiub":
        return math.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(a - b) / np.maximum(1.0, np.abs(b))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    apart = np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))
    return float(apart.max())


def compare(record: Record, reference: Record, tolerance: float) -> Comparison:
    """Compares a run with that of one device.

    Args:
        record: The run.
        reference: One device's.
        tolerance: The largest difference that counts as equal.

    Raises:
        ValueError: If their variables or their numbers of steps differ.
    """
    summary, expected = record.read_summary(), reference.read_summary()
    _check_same_form(summary, expected)
    paths = expected.paths
    found = Comparison(dict.fromkeys(KINDS, 0.0), dict.fromkeys(paths, 0.0))
    found.same_data = summary.data == expected.data and len(set(expected.data)) == 1
    for step in expected.steps:
        pairs = zip(record.read_weights(step), reference.read_weights(step))
        apart = {path: difference(a, b) for path, (a, b) in zip(paths, pairs)}
        for path, value in apart.items():
            found.by_variable[path] = max(found.by_variable[path], value)
        if step == 0:
            found.same_start = max(apart.values(), default=0.0) <= tolerance
        loss = 0.0
        if step in expected.losses:
            loss = difference(summary.losses.get(step, math.nan), expected.losses[step])
            found.largest[LOSS] = max(found.largest[LOSS], loss)
            if found.first_loss is None:
                found.first_loss = loss
        if found.first is None:
            found.differing = [path for path, value in apart.items() if value > tolerance]
            names = found.differing or ([LOSS] if loss > tolerance else [])
            found.first = (names[0], step) if names else None
    found.largest[WEIGHTS] = max(found.by_variable.values(), default=0.0)
    _compare_epochs(found, summary, expected, tolerance)
    return found


def first_differing_replicas(record: Record) -> tuple[str, int] | None:
    """Returns the variable and the step at which one process's replicas first differ, or None."""
    unlike = record.read_summary().unlike
    return (unlike[min(unlike)][0], min(unlike)) if unlike else None


def first_differing_workers(records: list[Record]) -> tuple[str, int] | None:
    """Returns the variable and the step at which workers first differ, bit for bit, or None."""
    summary = records[0].read_summary()
    for step in summary.steps:
        first, *others = [record.read_weights(step) for record in records]
        for other in others:
            for path, a, b in zip(summary.paths, first, other):
                if a.tobytes() != b.tobytes():
                    return path, step
    return None


def noise_of(comparison: Comparison, rounding: float) -> tuple[dict[str, float] | None, str]:
    """Returns the noise due to another order of the rows, or None and the reason.

    With the same weights, the first loss differs by rounding only. It differs by more where
    random numbers, or other rows, go to a row by its place in the batch.

    Args:
        comparison: One device against itself with the rows of each batch in another order.
        rounding: Relative rounding of one operation of the model.
    """
    if not comparison.same_data:
        return None, "the data differ from call to call"
    if not comparison.same_start:
        return None, "the initial weights differ from call to call"
    if (comparison.first_loss or 0.0) > _ROUNDING_STEPS * rounding:
        return (
            None,
            "random numbers, or other rows, are assigned to a row by its place in the batch",
        )
    if not all(map(math.isfinite, comparison.largest.values())):
        return None, "a number is NaN or infinite with the rows in one order only"
    return dict(comparison.largest), ""


def _compare_epochs(found, summary, expected, tolerance):
    per_epoch = max(expected.steps[-1] // max(len(expected.epochs), 1), 1)
    for number, (logs, wanted) in enumerate(zip(summary.epochs, expected.epochs), start=1):
        for name, value in wanted.items():
            apart = difference(logs.get(name, math.nan), value)
            kind = LOSS if name == "loss" or name.endswith("_loss") else METRICS
            found.largest[kind] = max(found.largest[kind], apart)
            step = number * per_epoch
            if apart > tolerance and (found.first is None or step < found.first[1]):
                found.first, found.differing = (name, step), []


def _check_same_form(summary, expected):
    for name, what in (("trainable", "trainable variables"), ("steps", "steps")):
        one, other = getattr(summary, name), getattr(expected, name)
        if one != other:
            raise ValueError(
                "Every configuration must train the same variables for the same number of steps as "
                f"one device. Received: {len(one)} {what} here, but {len(other)} on one device. "
                "The model function must create the same layers regardless of the number of "
                "devices."
            )
