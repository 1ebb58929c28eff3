"""Batches that are all full: their number of rows is known when a step is traced."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from replicas import create_strategy


def contrastive(y_true, y_pred):
    """A number for each row, from the pairs that it makes with all others."""
    y_pred = ops.normalize(y_pred, axis=-1)
    logits = ops.matmul(y_pred, ops.transpose(y_pred)) / 0.1
    others = 1.0 - ops.eye(ops.shape(y_pred)[0])
    same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), "float32") * others
    log_sums = ops.log(ops.sum(ops.exp(logits) * others, axis=1, keepdims=True))
    return -ops.sum(same * (logits - log_sums), axis=1) / (ops.sum(same, axis=1) + 1e-9)


class LossOfEachFeature(keras.Model):
    """The vector that its tape differentiates is as long as a multiple of a replica's rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, x):
        return self.dense(x)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(self(x) - x), axis=0)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(losses, variables), variables)
        return {"loss": tf.reduce_mean(losses)}


class RepeatedPositions(layers.Layer):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(8, 1)

    def call(self, x):
        return x + self.table(ops.broadcast_to(ops.arange(8), ops.shape(x)))[..., 0]


class InGroups(layers.Layer):
    """Takes a known number of rows only, and does the same with each of them."""

    def call(self, x):
        return tf.reshape(tf.reshape(x, [x.shape[0], 2, 4]), [x.shape[0], 8])


def create_model(layer=None, last=3):
    return keras.Sequential([*([layer] if layer else []), layers.Dense(last)])


def with_two_outputs():
    inputs = keras.Input((8,))
    outputs = {name: layers.Dense(3, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    loss = {"a": "mse", "b": contrastive}
    model.compile(keras.optimizers.SGD(0.1), loss, metrics={"a": ["mae"], "b": [contrastive]})
    return model


def with_contrastive_loss():
    model = create_model()
    model.compile(keras.optimizers.SGD(0.1), contrastive, metrics=[contrastive])
    return model


def with_a_loss_of_each_feature():
    model = LossOfEachFeature()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def with_repeated_positions():
    model = create_model(RepeatedPositions())
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.05), "mse")
    return model


def with_known_rows_alone():
    model = create_model(InGroups())
    model.compile(keras.optimizers.SGD(0.1), contrastive)
    return model


def train(create, num_replicas):
    keras.utils.set_random_seed(1)
    random = np.random.RandomState(0)
    x, labels = random.randn(32, 8).astype("float32"), random.randint(0, 3, (32, 1))
    y = {"a": x[:, :3], "b": labels} if create is with_two_outputs else labels
    y = x[:, :3] if create is with_repeated_positions else y
    y = None if create is with_a_loss_of_each_feature else y
    with create_strategy(num_replicas).scope():
        model = create()
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    if y is not None:
        scores = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
        history |= {f"evaluate {name}": [value] for name, value in scores.items()}
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), history


@pytest.mark.parametrize(
    "create",
    [
        pytest.param(with_contrastive_loss, marks=pytest.mark.slow),
        with_a_loss_of_each_feature,
        pytest.param(with_repeated_positions, marks=pytest.mark.slow),
        pytest.param(with_two_outputs, marks=pytest.mark.slow),
        pytest.param(with_known_rows_alone, marks=pytest.mark.slow),
    ],
)
def test_full_batches_train_as_on_one_device(create):
    one, two = train(create, 1), train(create, 2)
    np.testing.assert_allclose(two[0], one[0], rtol=0, atol=1e-6)
    assert two[1].keys() == one[1].keys()
    for name, values in one[1].items():
        np.testing.assert_allclose(two[1][name], values, rtol=2e-6, err_msg=name)
