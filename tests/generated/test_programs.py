"""Whole programs that a seed draws: what a user might write is one device's, or told."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from conformance import training
from conformance.compare import is_told
from replicas import create_strategy

from generated import models, programs, steps, trying

FIRST = [13, 21, 4, 18]
MANY = range(100, 200)
ON_WORKERS = [*FIRST, 0]
# How many programs to draw, with nothing verified, until one differs.
SEARCHED = 40


def check(cell, program):
    assert cell.ok, f"{cell.text} {cell.where}\n{program}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [*FIRST, *MANY])
def test_a_program_is_exact_or_told(seed):
    program = programs.draw(seed)
    cell = trying.on_replicas(program, create_strategy(program.replicas))
    check(cell, program)
    if "one device's result" in cell.where:
        # What differs in parts is exact where every replica computes the whole batch.
        strategy = create_strategy(program.replicas, on_difference="replicate")
        with pytest.warns(UserWarning, match="Every replica computes"):
            cell = trying.on_replicas(program, strategy)
        check(cell, program)
        assert cell.text != "told", f"{cell.where}\n{program}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", ON_WORKERS)
def test_two_workers_are_exact_or_told(seed, run_workers, tmp_path):
    program = programs.draw(seed)
    script = Path(__file__).with_name("worker.py")
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    run_workers(2, [script, seed, tmp_path], env={"PYTHONPATH": paths})
    check(trying.judge(program, [read(tmp_path / str(index)) for index in range(2)]), program)


def read(path):
    """Returns what a worker left: its arrays, or the text of its error."""
    if path.with_suffix(".txt").exists():
        return path.with_suffix(".txt").read_text()
    with np.load(path.with_suffix(".npz")) as file:
        return dict(file)


@pytest.mark.slow
def test_without_verification_programs_differ():
    # What never finds a difference would be no check.
    found = next(filter(differs_unverified, range(SEARCHED)), None)
    assert found is not None, f"none of {SEARCHED} programs differs"


def differs_unverified(seed):
    program = programs.draw(seed)
    strategy = create_strategy(program.replicas, verify="never")
    cell = trying.on_replicas(program, strategy)
    return not cell.ok and cell.difference is not None


def test_a_seed_draws_one_program():
    assert programs.draw(5) == programs.draw(5)
    drawn = [dataclasses.replace(programs.draw(seed), seed=0) for seed in MANY]
    assert len(set(drawn)) > 0.95 * len(drawn)


def test_every_part_is_drawn():
    drawn = [programs.draw(seed) for seed in MANY]
    for names, made in (
        ({p.step for p in drawn}, steps.STEPS),
        ({p.loss for p in drawn}, models.LOSSES),
        ({p.optimizer for p in drawn}, models.OPTIMIZERS),
        ({name for p in drawn for name in p.body}, models.LAYERS),
        ({name for p in drawn for name in p.metrics}, models.METRICS),
        ({p.feed for p in drawn}, programs.FEEDS),
        ({p.weights for p in drawn}, {"", "sample", "class"}),
    ):
        assert names == set(made)


@pytest.mark.slow
def test_plain_keras_runs_what_is_told():
    # What fails on one device is no program.
    for seed in FIRST:
        guarantee = models.guarantee(programs.draw(seed))
        found = training.attempt(guarantee, trying.Origin())
        assert not isinstance(found, str) and not is_told(found)
        assert all(np.isfinite(values).all() for values in found.values())
