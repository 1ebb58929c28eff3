"""The GAN ends alike on one device and on two, and its pictures are drawn."""

import pytest

from experiments.gan import experiment

TINY = {"epochs": 1, "width": 8, "global_batch_size": 300}


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["ring", pytest.param("digits", marks=pytest.mark.slow)])
def test_two_replicas_end_where_one_device_ends(ends_alike, dataset, tmp_path):
    picture = str(tmp_path / "gan.png")
    metrics = ends_alike(
        experiment.train, experiment.Settings, dataset=dataset, picture=picture, **TINY
    )
    assert set(metrics) == {"d_loss", "g_loss"}
    assert (tmp_path / "gan.png").stat().st_size > 5000


@pytest.mark.slow
def test_noise_of_a_stream():
    settings = experiment.Settings(strategy="mirrored", logical_cpus=2, noise="stream", **TINY)
    metrics, _ = experiment.train(settings)
    assert 0 < metrics["d_loss"] < 5
