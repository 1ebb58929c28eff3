"""The transformer ends alike on one device and on two, with sequences of unequal length."""

import numpy as np
import pytest

from experiments.text_transformer import experiment

TINY = {"num_examples": 90, "length": 8, "epochs": 1, "width": 16, "depth": 1}


def test_two_replicas_end_where_one_device_ends(ends_alike):
    metrics = ends_alike(
        experiment.train, experiment.Settings, global_batch_size=32, clipnorm=0.1, **TINY
    )
    assert 0 < metrics["val_accuracy"] <= 1


def test_padding_changes_nothing():
    """The same sequences with more padding have the same loss."""
    settings = experiment.Settings(strategy="one_device", **TINY)
    x, y = experiment.load(settings)[0]
    model = experiment.create_model(settings)
    model.compile(loss="mse")
    logits = model.predict(x, verbose=0)
    other = x.copy()
    other[y == 0] = np.where(x[y == 0] == 0, 0, experiment.WORD)
    np.testing.assert_array_equal(x == 0, other == 0)
    mask = model(x)._keras_mask
    np.testing.assert_array_equal(mask, x != 0)
    assert logits.shape == (90, 8, 1 + experiment.KINDS)


@pytest.mark.slow
def test_it_learns_the_language():
    metrics, _ = experiment.train(experiment.Settings(strategy="one_device"))
    assert metrics["val_accuracy"] > 0.9
