"""How far a run is from one device's, and whether that is near enough."""

from __future__ import annotations

import dataclasses

import numpy as np

from conformance.guarantee import NOISE_FACTOR, TOLD

WAITS = "waits for a worker that failed"
# Stands before an error that came when something was changed already; see `training.told_in_time`.
LATE = "after the first update, "
TELLING = ("ValueError: ", "RuntimeError: ")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What was seen of a guarantee at a place.

    Attributes:
        text: For the table.
        ok: Whether the guarantee is kept.
        difference: The largest relative difference, or None where there is none.
        where: The name of the array that has it, or the first line of the error.
    """

    text: str
    ok: bool
    difference: float | None = None
    where: str = ""


def difference(arrays: dict, reference: dict) -> tuple[float, str]:
    """Returns max |a - b| / max(1, |b|) over all arrays, and the name of the worst one.

    Raises:
        AssertionError: Where the names are not the same.
    """
    assert set(arrays) == set(reference), f"other names: {sorted(set(arrays) ^ set(reference))}"
    worst = (0.0, "")
    for name, expected in reference.items():
        actual, expected = np.float64(arrays[name]), np.float64(expected)
        # The first axis of variables is the replicas.
        first = int(name.startswith(("weight/", "optimizer/")))
        shapes = actual.shape[first:], expected.shape[first:]
        assert shapes[0] == shapes[1], f"{name}: shape {shapes[0]} for {shapes[1]}"
        with np.errstate(invalid="ignore"):
            part = np.abs(actual - expected) / np.maximum(1, np.abs(expected))
        part = np.where(np.isfinite(part), part, np.inf)
        if part.size and part.max() > worst[0]:
            worst = (float(part.max()), name)
    return worst


def judge(guarantee, runs: list, reference, noise: float, several: bool) -> Cell:
    """Judges one place's runs of a guarantee.

    Args:
        guarantee: The guarantee.
        runs: For each worker its arrays, or the text of its error.
        reference: Arrays of plain Keras on one device, or the text of an error.
        noise: How much one device differs from itself.
        several: Whether the place has several replicas.
    """
    errors = sorted((run for run in runs if isinstance(run, str)), key=lambda run: run == WAITS)
    if errors:
        return _judge_errors(guarantee, runs, errors, several)
    if guarantee.refused and several:
        return Cell("not refused", False)
    try:
        if guarantee.judge is not None:
            return Cell(guarantee.judge(runs), True)
        if isinstance(reference, str):
            return Cell("no reference", False, None, first_line(reference))
        value, where = max(difference(run, reference) for run in runs)
    except AssertionError as error:
        return Cell(short(str(error)), False, None, str(error))
    ok = value <= max(guarantee.tolerance, NOISE_FACTOR * noise)
    return Cell(f"{value:.1e}" if np.isfinite(value) else "not finite", ok, value, where)


def _judge_errors(guarantee, runs, errors, several) -> Cell:
    if guarantee.must == TOLD and several and all(is_told(run) for run in runs):
        return Cell("told", True, None, first_line(errors[0]))
    kept = bool(guarantee.refused) and guarantee.refused in errors[0]
    return Cell("refused" if kept else short(errors[0]), kept, None, first_line(errors[0]))


def is_told(run) -> bool:
    """Whether a worker's run ended with a word to the user, before anything was changed.

    A word is a ValueError or a RuntimeError that says what was received.
    """
    return isinstance(run, str) and run.startswith(TELLING) and "Received:" in run


def first_line(text: str) -> str:
    """Returns an error without the places in files that follow it."""
    return text.strip().splitlines()[0]


def short(text: str, length: int = 34) -> str:
    """Returns the first words of an error."""
    text = " ".join(first_line(text).split())
    return text if len(text) <= length else text[: length - 1].rsplit(" ", 1)[0] + " …"
