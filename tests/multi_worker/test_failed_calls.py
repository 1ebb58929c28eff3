"""A call that fails on one worker alone, in a program that catches the error."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "failed_call_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, options",
    [
        ("amid an epoch", ()),
        ("amid an epoch", ("--mpi",)),
        ("as an epoch ends", ()),
        ("interrupted", ()),
    ],
)
def test_the_other_worker_gets_an_error_and_waits_for_nobody(run_workers, how, options, request):
    if options:
        request.getfixturevalue("mpiexec")
    outputs = run_workers(2, [PROGRAM, how], check=False, options=options)
    waiting, failing = reversed(outputs) if how == "as an epoch ends" else outputs
    assert "0: ended" in waiting and "0: ended" in failing
    own = "KeyboardInterrupt" if how == "interrupted" else "ValueError: a callback"
    assert f"1: {own}" in failing
    told = "RuntimeError: All workers must run `fit` together. Received: an error on only one"
    assert f"1: {told}" in waiting and f"2: {told}" in waiting and own in waiting
    # Nor does the worker that failed wait in the next call.
    assert any(line.startswith("2: ") for line in failing.splitlines())


@pytest.mark.slow
def test_over_mpi_nobody_waits_for_a_worker_whose_program_has_ended(run_workers, mpiexec):
    """Its process waits in MPI for the others, with its connections open."""
    waiting, _ = run_workers(2, [PROGRAM, "ends"], check=False, options=("--mpi",))
    assert "0: ended" in waiting
    assert "is lost: its program has ended, and this one waits for it" in waiting
