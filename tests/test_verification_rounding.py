"""Verification tells rounding that a network enlarges from a difference."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from replicas import create_strategy

from tfmulti.verification import comparison
from tfmulti.verification.differences import same_bits
from tfmulti.verification.state import OPTIMIZER, TRAINABLE, Part

NAMES = ("scale", "adam/scale_momentum", "adam/scale_velocity")
KINDS = (TRAINABLE, OPTIMIZER, OPTIMIZER)
PARTS = [
    Part(None, name, kind, replica=0, first=place)
    for place, (name, kind) in enumerate(zip(NAMES, KINDS))
]
STATE = SimpleNamespace(
    parts=PARTS, slots_of=lambda index: [1, 2], to_compare=lambda values: [0, 1, 2]
)


def arrays(*values):
    return [np.float32(value) for value in values]


def differences(one_device, on_replicas, noise, begin=((1, 1), (0, 0), (0, 0))):
    """Returns the names of what differs after a step."""
    begin = arrays(*begin)
    nothing = comparison.Outcome({}, {})
    found = comparison.Comparison("train", STATE, begin, 2e-4).differences(
        begin, [(nothing, one_device)], [(nothing, on_replicas)], [noise]
    )
    return [difference.what.split()[-1] for difference in found]


# As MobileNetV2 has them after a step of Adam; the second number is the largest.
ONE_DEVICE = arrays((0.9990005, 1.001), (5.8e-4, 0.259), (3.3e-8, 6.7e-3))
OTHER_SIGN = arrays((1.0009997, 1.001), (-1.2e-3, 0.259), (1.5e-7, 6.7e-3))
NOISE = {1: 0.021, 2: 5e-4}


def test_a_gradient_whose_sign_is_rounding_is_no_difference():
    assert differences(ONE_DEVICE, OTHER_SIGN, NOISE) == []
    assert "scale" in differences(ONE_DEVICE, OTHER_SIGN, {})


def test_a_gradient_beyond_measured_rounding_is_a_difference():
    doubled = arrays((0.9990005, 1.001), (1.2e-3, 0.518), (1.3e-7, 2.7e-2))
    assert differences(ONE_DEVICE, doubled, NOISE)


def test_a_number_without_gradient_on_one_device_may_be_rounding_on_replicas():
    """As a bias has it before batch normalization, which takes every bias away."""
    one_device = arrays((0, 1.8e-5), (0, 6e-9), (0, 3.6e-18))
    replicas = arrays((-3e-4, 1.8e-5), (7.2e-8, 6e-9), (5.1e-16, 3.6e-18))
    noise = {0: 2.2e-5, 1: 9.5e-8, 2: 9.1e-16}
    assert differences(one_device, replicas, noise, begin=((0, 0),) * 3) == []
    assert differences(one_device, replicas, {}, begin=((0, 0),) * 3)


@pytest.mark.slow
def test_a_deep_network_with_batch_normalization_is_not_refused():
    """Small gradients of its first layers have an uncertain sign in float32."""
    keras.utils.set_random_seed(4)
    strategy = create_strategy(2, on_difference="error")
    with strategy.scope():
        inputs = hidden = keras.Input((8,))
        for _ in range(12):
            hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8)(hidden))
            hidden = keras.layers.ReLU()(hidden)
        model = keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(hidden))
        model.compile(
            "adam", lambda y, p: keras.losses.categorical_crossentropy(y, p), metrics=["accuracy"]
        )
    x = np.random.rand(32, 8).astype("float32")
    y = keras.utils.to_categorical(np.random.randint(0, 4, 32), 4)
    model.fit(x, y, batch_size=16, verbose=0)
    assert strategy.seconds_verified > 0


def test_texts_are_the_same_by_their_letters():
    texts, others = (np.array([bytes([99, 97, last])], object) for last in (116, 98))
    assert same_bits(texts, np.array([bytes([99, 97, 116])], object))
    assert not same_bits(texts, others)
