"""With the gather two replicas end where one device ends, without it they do not; the plot."""

import numpy as np
import pytest

from experiments import common
from experiments.contrastive import experiment

# The last batch has 1437 - 7 * 205 = 2 rows.
TINY = {"epochs": 1, "width": 8, "global_batch_size": 205}


@pytest.mark.slow
def test_two_replicas_end_where_one_device_ends(ends_alike):
    metrics = ends_alike(experiment.train, experiment.Settings, **TINY)
    assert set(metrics) == {"loss", "recall"}


@pytest.mark.slow
def test_the_plot_and_the_table_show_what_goes_wrong_without_it(tmp_path):
    settings = experiment.Settings(replicas="1,2", workdir=str(tmp_path), **TINY)
    metrics, weights = experiment.train(settings)
    losses = {name: value for name, value in metrics.items() if name.startswith("loss")}
    np.testing.assert_allclose(losses["loss: 2, batch"], losses["loss: 1, batch"], rtol=1e-6)
    # Half as many to be told from: log(2) less where nothing is learned yet.
    assert losses["loss: 1, batch"] - losses["loss: 2, replica"] > 0.5
    assert len(weights) == 9
    assert (tmp_path / "contrastive.png").stat().st_size > 10_000
    lines = (tmp_path / common.TABLE).read_text().splitlines()
    assert lines[0] == "| replicas | loss | loss without | recall | recall without |"
    assert len(lines) == 4
