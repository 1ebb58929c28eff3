"""Training that does not fit into one worker's memory does on two."""

import pytest

NAME = "larger_than_one"
TINY = ["--layers=3", "--width=256"]


@pytest.mark.slow
def test_it_fails_alone_and_trains_on_two(run_within_memory):
    limit = "--memory_mb=620"
    alone, _ = run_within_memory(NAME, "--strategy=one_device", limit)
    assert alone.returncode == 1
    assert "Received: a worker that needs more than --memory_mb=620" in alone.stderr
    workers = ["--num_workers=2", "--mpi"]
    two, [told] = run_within_memory(NAME, "--strategy=multi_worker", limit, workers=workers)
    assert two.returncode == 0, two.stdout + two.stderr
    assert 0 < told["taken_mb"] < 620


@pytest.mark.slow
def test_a_small_one_has_the_loss_of_one_device(run_within_memory):
    one, [alone] = run_within_memory(NAME, "--strategy=one_device", *TINY)
    assert one.returncode == 0, one.stdout + one.stderr
    for shard in ("none", "state", "parameters"):
        flags = ["--strategy=multi_worker", f"--shard={shard}", *TINY]
        two, [told] = run_within_memory(NAME, *flags, workers=["--num_workers=2"])
        assert two.returncode == 0, two.stdout + two.stderr
        assert told["loss"] == pytest.approx(alone["loss"], rel=1e-3), shard
