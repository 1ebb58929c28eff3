"""Python lists that a step fills are noticed, and as they were after a step was verified."""

import keras
import numpy as np
import pytest
from replicas import create_strategy

from tfmulti.verification.python_values import Containers, restored


class Labels(keras.metrics.Metric):
    """Keeps the labels in a list, as a metric of scikit-learn needs them."""

    def __init__(self):
        super().__init__(name="labels")
        self.kept = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.kept += list(np.array(y_true))

    def result(self):
        return np.float32(len(self.kept))

    def reset_state(self):
        self.kept = []


def compiled(strategy, metric):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=[metric], run_eagerly=True)
    return model


def test_a_list_that_was_assigned_anew_is_as_it_was():
    metric = Labels()
    model = compiled(create_strategy(1), metric)
    metric.kept += [1, 2]
    with restored(Containers(model)) as containers:
        metric.update_state([3], None)
        metric.update_state([4], None)
        assert containers.changed() == ["_compile_metrics/_user_metrics/0/kept"]
    assert list(metric.kept) == [1, 2]
    with restored(Containers(model)):
        metric.reset_state()
    assert list(metric.kept) == [1, 2]


def test_a_metric_that_keeps_a_list_is_told():
    metric = Labels()
    model = compiled(create_strategy(2), metric)
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    with pytest.raises(ValueError, match="a metric that keeps a Python list, in Labels") as told:
        model.fit(x, y, batch_size=4, verbose=0)
    assert "self.add_variable(...)" in str(told.value)
    assert not metric.kept


def test_on_one_replica_it_is_as_ever():
    model = compiled(create_strategy(1), Labels())
    x, y = np.ones((8, 3), "float32"), np.arange(8) % 2
    history = model.fit(x, y, batch_size=4, verbose=0, epochs=2)
    assert history.history["labels"] == [8.0, 8.0]


class Tracker:
    def __init__(self):
        self.seen = [1]


def test_keras_own_lists_of_variables_are_left_alone():
    model = compiled(create_strategy(1), Labels())
    model.own = Tracker()
    with restored(Containers(model)) as containers:
        model.own.seen.append(2)
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
        model.more = layer
        assert containers.changed() == ["own/seen"]
    assert model.own.seen == [1]
    assert layer.kernel is layer.trainable_variables[0]
    assert model.more is layer
