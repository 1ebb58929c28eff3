"""Looks for the cause of a difference by experiments on one device."""

from __future__ import annotations

import contextlib
import dataclasses

import tensorflow as tf

from tfmulti.parity.config import ParityConfig
from tfmulti.parity.probes import (
    probe_calls,
    probe_rounding,
    probe_state,
    probe_steps,
)
from tfmulti.parity.steps import Bench
from tfmulti.parity.training import load_case
from tfmulti.verification import causes


def diagnose(config: ParityConfig, num_shares: int, differing: list[str]) -> list[dict]:
    """Returns the likely causes, the first one first.

    Args:
        config: The comparison.
        num_shares: Replicas of the configuration that differs.
        differing: The variables that differ first.

    Returns:
        The fields of a `causes.Finding` each; none where nothing was found.
    """
    with _eagerly():
        case = load_case(config)
        bench = Bench(case, num_shares)
        found = probe_calls(bench)
        if causes.RANDOMNESS not in {finding.cause for finding in found}:
            found += probe_steps(bench, lambda: Bench(case, num_shares, pretend=num_shares))
        # State differs where anything does: it is a cause only where nothing else is.
        if not found and differing:
            found = probe_state(bench, differing)
        if not found:
            found = probe_rounding(bench)
    return [dataclasses.asdict(finding) for finding in causes.in_order(found)]


@contextlib.contextmanager
def _eagerly():
    """Lets every function run line by line, so that what passes through it can be seen."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)
