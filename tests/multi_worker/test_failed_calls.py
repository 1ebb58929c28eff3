"""A call of `fit` that fails on one worker alone, in a program that catches the error."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "failed_call_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--mpi",)], ids=["ring", "mpi"])
def test_the_other_worker_gets_an_error_and_waits_for_nobody(run_workers, options, request):
    if options:
        request.getfixturevalue("mpiexec")
    waiting, failing = run_workers(2, [PROGRAM], check=False, options=options)
    assert "0: ended" in waiting and "0: ended" in failing
    assert "1: ValueError: a callback of worker 1" in failing
    told = "RuntimeError: All workers must run `fit` together. Received: an error on only one"
    assert f"1: {told}" in waiting and f"2: {told}" in waiting
    # Nor does the worker that failed wait in the next call.
    assert any(line.startswith("2: ") for line in failing.splitlines())
