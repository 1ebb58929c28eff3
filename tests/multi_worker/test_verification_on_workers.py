"""Workers verify a step together: all go on, or all are told."""

import json
from pathlib import Path

import pytest

PROGRAM = "verification_worker"
SCRIPT = Path(__file__).parent / f"{PROGRAM}.py"
FAILING = SCRIPT.with_name("failing_step_worker.py")
TOLD = {
    "wrong state": "RunningMean",
    "wrong counted steps": "own_loss",
    "unlike parts": "unequal shares",
    "unlike parts from Python": "unequal shares",
}


def test_two_workers_go_on_or_both_are_told(over_the_ring):
    _, workers = over_the_ring(PROGRAM)
    for said in workers:
        assert_told(said)


@pytest.mark.slow
@pytest.mark.parametrize("logical_cpus", [1, 2], ids=["2x1", "2x2"])
def test_all_workers_go_on_or_all_are_told(run_workers, logical_cpus):
    for worker in run_workers(2, [SCRIPT, logical_cpus, "ring"]):
        said = json.loads(worker.splitlines()[-1])
        assert_told(said)
        assert len(said) >= 9


def assert_told(said):
    assert {name for name, text in said.items() if text == "trained"} == set(said) - set(TOLD), said
    assert "wrong state" in said
    for name, where in TOLD.items():
        assert name not in said or where in said[name] or "another worker" in said[name]


@pytest.mark.slow
def test_workers_of_mpi_are_told_alike(mpiexec):
    said = mpiexec(SCRIPT, 1, "mpi")
    for name, where in TOLD.items():
        assert said.count(f'"{name}": "`train_step` must give') == 2
        assert where in said
    assert said.count('"right": "trained"') == 2


def own_lines(worker):
    """What the program printed: notices of the verification and of TensorFlow may be amid it."""
    notices = "tfmulti: verifying", "WARNING:tensorflow:not packing values"
    return [line for line in worker.splitlines() if not line.startswith(notices)]


@pytest.mark.slow
def test_workers_go_on_together_after_one_of_them_could_not_trace_the_step(run_workers):
    # Traces of verification: of the step on replicas, and of the step as on one device.
    workers = run_workers(2, [FAILING, "fails_in_trace=2", "fails_in_trace=3"])
    lines = [own_lines(worker) for worker in workers]
    for number, line in zip((2, 3), lines[1]):
        assert line.startswith(f"fails_in_trace={number} 1")
    assert [line[:18] for line in lines[0]] == [line[:18] for line in lines[1]]


@pytest.mark.slow
def test_all_are_told_of_a_step_that_one_worker_can_never_trace(run_workers):
    # A program that catches the error goes on: no worker waits for the one that could not.
    workers = run_workers(2, [FAILING, "fails_from=1", "fails_from=2", "fails_from=0"])
    lines = [own_lines(worker) for worker in workers]
    # The first trace builds the model.
    for number in (0, 1):
        assert "must run on all workers or on none" in lines[0][number]
        assert "an error on another worker alone" in lines[0][number]
        assert "not traced here" in lines[1][number]
    assert "must run on all workers or on none" in lines[1][1]
    assert [own[2] for own in lines] == ["fails_from=0 1"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--mpi"]], ids=["ring", "mpi"])
def test_a_step_that_one_worker_cannot_run_ends_the_job_by_name(run_workers, options):
    # Of five rows the second worker has two.
    workers = run_workers(2, [FAILING, "number_of_rows=2"], check=False, options=options)
    assert "`train_step` must run on all workers or on none" in workers[1]
    assert "not run here" in workers[1]
    assert not any(line.startswith("number_of_rows=2 1") for line in workers[0].splitlines())
