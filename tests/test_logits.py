"""Keras computes the cross-entropy of a softmax from its logits: so it does behind tfmulti too.

Where a probability is rounded to 0, the probabilities alone give another number.
"""

import keras
import numpy as np
import pytest
from keras import layers
from replicas import create_strategy

import tfmulti

RNG = np.random.default_rng(0)
# Large inputs make large logits.
X, LABELS = 255 * RNG.random((36, 6)).astype("float32"), RNG.integers(0, 3, 36)


def entropy(y_true, y_pred):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


def binary_entropy(y_true, y_pred):
    labels = keras.ops.one_hot(y_true, 3)
    return keras.ops.mean(keras.losses.binary_crossentropy(labels, y_pred))


class Gathers(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return entropy(*tfmulti.gather_batch((y, y_pred)))


def train(strategy, activation="softmax", kind=keras.Model, change=None, eager=False):
    keras.utils.set_random_seed(7)
    loss = entropy if activation == "softmax" else binary_entropy
    with strategy.scope():
        x = keras.Input((6,))
        hidden = layers.Dense(8, "relu", name="hidden")(x)
        model = kind(x, layers.Dense(3, activation, name="last")(hidden))
        if change is not None:
            model, loss = change(model, loss)
        loss = None if kind is Gathers else loss
        model.compile(keras.optimizers.SGD(1e-4), loss, run_eagerly=eager)
    losses = model.fit(X, LABELS, batch_size=12, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [losses, *model.get_weights()]


def checkpointed(model, loss):
    tfmulti.checkpoint_activations(model, layers=["hidden", "last"])
    return model, loss


def in_stages(model, loss):
    return tfmulti.pipeline(model, devices=["CPU:0", "CPU:1"], micro_batches=2), loss


def with_whole_batches(model, loss):
    return model, tfmulti.WholeBatchLoss(loss)


def assert_equal(found, expected):
    assert expected[0][0] > 5, "no probability is rounded"
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("change", [None, with_whole_batches], ids=["one number", "explicit"])
def test_losses_of_the_whole_batch(change, activation):
    found = train(create_strategy(2), activation, change=change)
    assert_equal(found, train(create_strategy(1), activation))


@pytest.mark.slow
def test_gathered_predictions():
    found = train(create_strategy(2), kind=Gathers)
    assert_equal(found, train(create_strategy(1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("change", [checkpointed, in_stages])
def test_what_runs_within_a_gradient_of_its_own(change, eager):
    found = train(create_strategy(1), change=change, eager=eager)
    assert_equal(found, train(create_strategy(1)))
