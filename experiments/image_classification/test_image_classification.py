"""The small ResNet ends alike on one device and on two; resnet50 and half precision run."""

import keras
import pytest

from experiments.image_classification import experiment


@pytest.mark.slow
def test_without_augmentation_two_replicas_end_where_one_device_ends(ends_alike):
    tiny = {
        "augment": False,
        "epochs": 1,
        "image_size": 8,
        "filters": "8",
        "global_batch_size": 256,
    }
    metrics = ends_alike(
        experiment.train, experiment.Settings, dtype_policy="float64", warmup_epochs=0.5, **tiny
    )
    assert 0 < metrics["loss"] < 10


@pytest.mark.slow
def test_augmentation_and_mixed_precision_learn():
    settings = experiment.Settings(
        strategy="mirrored", logical_cpus=2, epochs=6, dtype_policy="mixed_bfloat16"
    )
    metrics, _ = experiment.train(settings)
    assert metrics["val_accuracy"] > 0.6


@pytest.mark.slow
def test_resnet50_is_synchronized_throughout():
    model = experiment.resnet50((32, 32, 3), 10)
    normalizations = [x for x in model.layers if isinstance(x, keras.layers.BatchNormalization)]
    assert len(normalizations) == 53
    assert all(layer.synchronized for layer in normalizations)
