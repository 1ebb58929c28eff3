"""Asynchronous steps do not wait for a slow worker; the table and the picture are made."""

import numpy as np
import pytest

from experiments import common
from experiments.parameter_server import experiment


def made_run(seconds):
    losses = np.linspace(1.0, 0.1, 60).tolist()
    times = np.linspace(0, seconds, 60).tolist()
    found = {"seconds": times, "losses": losses, "staleness": [1.5], "staleness_p95": [2.0]}
    return {**found, "workers": {"0": 50, "1": 10}}


def test_the_mean_of_a_window_begins_with_what_there_is():
    losses = np.arange(100.0)
    found = experiment.smooth(losses)
    assert found[0] == 0 and found[1] == 0.5
    assert found[-1] == losses[-25:].mean()


def test_the_table_and_the_picture(tmp_path):
    runs = {"asynchronous": made_run(5), "synchronous": made_run(20)}
    experiment.draw(runs, 64, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert "| asynchronous | 5.0 | " in experiment.report(runs)
    assert "50, 10" in experiment.report(runs)


def test_examples_are_words_of_the_table():
    words, numbers = experiment.make_examples(experiment.Settings(examples=100, rows=50))
    assert words.shape == (100, 8) and numbers.shape == (100, 1)
    assert 0 <= words.min() and words.max() < 50


@pytest.mark.slow
def test_a_slow_worker_delays_synchronous_steps_more(tmp_path):
    settings = experiment.Settings(examples=2560, workdir=str(tmp_path))
    metrics, _ = experiment.train(settings)
    assert metrics["seconds, asynchronous"] < metrics["seconds, synchronous"]
    assert "synchronous" in (tmp_path / common.TABLE).read_text()
