"""A model that fits no single worker trains on two, as a pipeline."""

import pytest

WORKERS = ["--num_workers=2", "--mpi", "--all_output"]


@pytest.mark.slow
def test_it_fails_alone_and_trains_on_two(run_within_memory):
    limit = "--memory_mb=660"
    alone, _ = run_within_memory("pipeline", "--strategy=one_device", limit)
    assert alone.returncode == 1
    assert "Received: a worker that needs more than --memory_mb=660" in alone.stderr
    flags = ["--strategy=multi_worker", limit]
    two, told = run_within_memory("pipeline", *flags, workers=WORKERS)
    assert two.returncode == 0, two.stdout + two.stderr
    assert len(told) == 2
    assert all(0 < each["taken_mb"] < 660 for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["--checkpoint_activations", "--nocheckpoint_activations"])
def test_a_small_one_has_the_loss_of_one_device(checkpoints, run_within_memory):
    tiny = ["--layers=3", "--width=256", checkpoints]
    one, [alone] = run_within_memory("pipeline", "--strategy=one_device", *tiny)
    flags = ["--strategy=multi_worker", *tiny]
    two, told = run_within_memory("pipeline", *flags, workers=WORKERS)
    assert (one.returncode, two.returncode) == (0, 0), two.stdout + two.stderr
    for each in told:
        assert each["loss"] == pytest.approx(alone["loss"], rel=1e-3)
