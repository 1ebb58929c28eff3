"""What stands for the configuration of a model, by which workers compare theirs."""

import keras
import pytest

from tfmulti.strategies import alike


def create(units=3, activation="relu", seed=None, loss="mse", rate=0.1, penalty=None):
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, activation, kernel_regularizer=penalty),
        keras.layers.Dropout(0.2, seed=seed),
        keras.layers.Lambda(lambda x: 2 * x),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["mae"])
    return model


def test_names_and_seeds_are_left_out():
    assert alike._descriptions(create()) == alike._descriptions(create(seed=3))


@pytest.mark.parametrize(
    "change, part",
    [
        ({"units": 4}, "layer 2 (Dense)"),
        ({"activation": "tanh"}, "layer 2 (Dense)"),
        ({"penalty": keras.regularizers.L2(0.3)}, "layer 2 (Dense)"),
        ({"loss": "mae"}, "loss"),
        ({"rate": 0.2}, "optimizer"),
    ],
)
def test_each_part_has_a_number_of_its_own(change, part):
    one, other = alike._descriptions(create()), alike._descriptions(create(**change))
    assert [name for name in one if one[name] != other[name]] == [part]


def test_parts_without_a_configuration_are_left_out():
    class Own(keras.layers.Layer):
        def __init__(self, thing):
            super().__init__()

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((4,)), Own(object()), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert "layer 3 (Dense)" in alike._descriptions(model)
    assert "layer 2 (Own)" not in alike._descriptions(model)
