"""The transformer ends alike on one device and on two, with sequences of unequal length."""

import keras
import numpy as np
import pytest

from experiments.text_transformer import experiment

TINY = {"num_examples": 90, "length": 8, "epochs": 1, "width": 16, "depth": 1}


@pytest.mark.slow
def test_two_replicas_end_where_one_device_ends(ends_alike):
    metrics = ends_alike(
        experiment.train, experiment.Settings, global_batch_size=32, dtype_policy="float64", **TINY
    )
    assert 0 < metrics["val_accuracy"] <= 1


def test_padding_changes_nothing():
    """Other kinds at the places of padding have the same loss."""
    settings = experiment.Settings(**TINY)
    x, y = (rows[:20] for rows in experiment.load(settings)[0])
    model = experiment.create_model(settings)
    assert model(x).shape == (20, 8, 1 + experiment.KINDS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = loss(y, model(x))
    wrong = np.where(x == 0, experiment.KINDS, y)
    assert (wrong != y).any()
    np.testing.assert_array_equal(loss(wrong, model(x)), found)


@pytest.mark.slow
def test_it_learns_the_language():
    metrics, _ = experiment.train(experiment.Settings(strategy="one_device"))
    assert metrics["val_accuracy"] > 0.9
