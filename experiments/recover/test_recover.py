"""A killed run goes on and ends as one that was not; the story is told."""

import pytest

from experiments import common
from experiments.recover import experiment
from tfmulti import checkpoint

OUTPUT = """\
[worker 0] Epoch 5/8
[worker 0] error: worker 1 at 127.0.0.1:1 is lost: its connection has closed.
worker 1 was ended by SIGKILL after 45.5 s (log: /a/b/worker_1.log)
Restart 1 (of 1) of all workers in 1 s
[worker 0] resumed at step 95, epoch 4, from /a/b/checkpoints
"""


def made_run(digest):
    result = {"restarts": 1, "steps": 9, "metrics": {"loss": 0.5}, "weights_sha256": digest}
    return experiment.Run(result, OUTPUT, [(1.0, 1), (2.0, 2)], 1.5, 95)


def test_the_report_tells_whether_the_weights_are_equal(tmp_path):
    whole, killed = made_run("a" * 64), made_run("b" * 64)
    assert "equal, bit for bit" in experiment.report(whole, whole)
    assert "DIFFER" in experiment.report(whole, killed)
    told = experiment.story(killed).splitlines()
    assert told[1:] == [
        "worker 1 was ended by SIGKILL after 45.5 s",
        "Restart 1 (of 1) of all workers in 1 s",
        "[worker 0] resumed at step 95, epoch 4",
    ]
    experiment.draw(whole, killed, tmp_path / "recover.png")
    assert (tmp_path / "recover.png").stat().st_size > 5000


@pytest.mark.parametrize(("steps", "found"), [((23, 46), None), ((5, 25), None), ((46, 50), 50)])
def test_a_step_within_an_epoch_of_the_second_half(tmp_path, steps, found):
    for step in steps:
        (tmp_path / "run" / checkpoint.FOLDER / checkpoint.name_of(step)).mkdir(parents=True)
    assert experiment.step_within_epoch(tmp_path, steps_per_epoch=23, epochs=4) == found


def test_no_worker_trains_into_a_folder_that_nobody_named(tmp_path):
    assert experiment.find_worker(tmp_path, 0) is None


@pytest.mark.slow
def test_a_killed_run_ends_as_one_in_peace(tmp_path):
    settings = experiment.Settings(epochs=4, model="mlp", workdir=str(tmp_path))
    metrics, _ = experiment.train(settings)
    assert metrics["same_weights"] and metrics["restarts"] == 1
    assert "SIGKILL" in (tmp_path / common.TABLE).read_text()
