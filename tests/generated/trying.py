"""Tries a program: on one device as plain Keras, and under a strategy."""

from __future__ import annotations

import dataclasses

from conformance import compare, training
from conformance.guarantee import TOLERANCE, Origin

from generated import models

# More noise than this and the program says nothing: it magnifies rounding.
MOST_NOISE = 1e-5


def judge(program, runs: list) -> compare.Cell:
    """Judges what came of a program on several replicas.

    Args:
        program: The program.
        runs: For each worker its arrays, or the text of its error.
    """
    guarantee = models.guarantee(program)
    if any(isinstance(run, str) for run in runs):
        return compare.judge(guarantee, runs, {}, 0.0, several=True)
    reference = training.train(guarantee, Origin())
    cell = compare.judge(guarantee, runs, reference, 0.0, several=True)
    if cell.ok or cell.difference is None:
        return cell
    noise = measure_noise(guarantee, reference)
    return compare.judge(guarantee, runs, reference, noise, several=True)


def measure_noise(guarantee, reference) -> float:
    """Returns how far one device is from itself with the rows of each batch in other orders.

    Raises:
        AssertionError: Where the program magnifies rounding, so that nothing could be seen.
    """
    others = [training.train(guarantee, Origin(order=order)) for order in (1, 2)]
    noise = max(compare.difference(other, reference)[0] for other in others)
    assert noise <= MOST_NOISE, f"ill-conditioned: noise {noise:.1e} for {TOLERANCE:g}"
    return noise


def on_replicas(program, strategy) -> compare.Cell:
    """Trains a program under a strategy of this process and judges it."""
    guarantee = dataclasses.replace(models.guarantee(program), on_difference=strategy.on_difference)
    return judge(program, [training.attempt(guarantee, Origin(strategy))])
