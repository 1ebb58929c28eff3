"""Small models for `python -m tfmulti.parity`, each with one fault put in on purpose."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

NUM_ROWS = 60


def rows():
    rng = np.random.RandomState(0)
    x = rng.randn(NUM_ROWS, 4).astype("float32")
    return (x, x[:, :2] - 2 * x[:, 2:]), (x[:10], x[:10, :2])


def rows_of_the_moment():
    """Other data at every call."""
    rng = np.random.default_rng()
    x = rng.normal(size=(NUM_ROWS, 4)).astype("float32")
    return (x, x[:, :2]), (x, x[:, :2])


def sequential(*inner, first=(), loss="mse", optimizer=None, **compiled):
    hidden = [*first, layers.Dense(6, "tanh"), *inner]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(2)])
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **compiled)
    return model


def clean(train):
    return sequential(optimizer=keras.optimizers.Adam(0.01, clipnorm=0.1), metrics=["mae"])


def clean_in_many_ways(train):
    """Synchronized statistics inside a layer, time steps, a sum by Keras, a mean by add_loss."""
    return sequential(
        Block(layers.BatchNormalization(synchronized=True)),
        layers.Reshape((3, 2)),
        layers.TimeDistributed(layers.Dense(3)),
        layers.GRU(5),
        layers.Dropout(0.0),
        MeanPenalty(),
        loss=keras.losses.MeanSquaredError(reduction="sum"),
        optimizer=keras.optimizers.SGD(0.001),
    )


def clean_step(train):
    return compiled(CustomStep())


def many_faults(train):
    return sequential(
        Block(layers.BatchNormalization()),
        layers.Dropout(0.5),
        Penalty(),
        layers.GaussianNoise(0.1),
    )


def dropout(train):
    return sequential(layers.Dropout(0.5, name="drop_half"))


def unseeded_noise(train):
    return sequential(Noise(name="unseeded_noise"))


def noise_in_the_step(train):
    return compiled(NoisyStep())


def compiled(model, rate=0.1):
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def local_normalization(train):
    return sequential(layers.BatchNormalization(name="normalize_locally"))


def hidden_normalization(train):
    return sequential(Block(layers.BatchNormalization(name="hidden")))


def own_normalization(train):
    return sequential(layers.LayerNormalization(), Centered(name="centered"))


def functional_normalization(train):
    inputs = keras.Input((4,))
    hidden = layers.Dense(3)(inputs)
    outputs = layers.Dense(2)(hidden - ops.mean(hidden, axis=0, keepdims=True))
    return compiled(keras.Model(inputs, outputs, name="functional"))


def sum_loss(train):
    def squares_added(y_true, y_pred):
        return tf.reduce_sum(tf.square(y_true - y_pred)) / 100

    return sequential(loss=squares_added)


def contrastive(y_true, y_pred):
    likeness = ops.matmul(ops.normalize(y_pred), ops.transpose(ops.normalize(y_pred)))
    return ops.logsumexp(likeness, axis=1) - ops.diagonal(likeness)


def contrastive_loss(train):
    """Exact in `compile`: tfmulti sees that it combines rows, and gathers them."""
    return sequential(loss=contrastive)


def own_contrastive_loss(train):
    class Contrasting(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
            return ops.mean(contrastive(y, y_pred))

    return compiled(Contrasting([keras.Input((4,)), layers.Dense(2)]))


def sum_add_loss(train):
    return sequential(Penalty(name="penalty"))


def batch_add_loss(train):
    return sequential(Spread(name="spread"))


def contrastive_step(train):
    return compiled(Contrastive())


def scaled_step(train):
    return compiled(Scaled())


def sum_step(train):
    return compiled(Summing(), rate=0.01)


def hidden_optimizer(train):
    return compiled(HiddenOptimizer())


def bfloat16(train):
    model = sequential(layers.Dense(16, "relu", dtype="mixed_bfloat16"))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def own_state(train):
    return sequential(Largest(name="largest"))


def weights_of_the_moment(train):
    model = sequential()
    model.layers[-1].bias.assign(np.random.default_rng().normal(size=2))
    return model


def amplified_rounding(train):
    """A bias before batch normalization has no gradient but rounding."""
    return sequential(
        layers.Dense(64),
        layers.BatchNormalization(synchronized=True),
        optimizer=keras.optimizers.Adam(0.01),
    )


def ends_at_once(train):
    os._exit(3)


def never_ends(train):
    while True:
        pass


def worker_one_fails(train):
    if '"index": 1' in os.environ.get("TF_CONFIG", ""):
        raise ValueError("`worker` must not be 1. Received: 1. Do without.")
    return sequential()


def worker_one_dies(train):
    """In its first step, in which the other waits for its gradients."""
    return sequential(first=[Fatal()])


class Fatal(layers.Layer):
    def call(self, x):
        def end(x):
            if '"index": 1' in os.environ.get("TF_CONFIG", ""):
                os._exit(3)
            return x

        return tf.ensure_shape(tf.numpy_function(end, [x], x.dtype), x.shape)


class Block(layers.Layer):
    """A layer with another one inside."""

    def __init__(self, inner, **kwargs):
        super().__init__(**kwargs)
        self.inner = inner

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=False):
        return ops.tanh(self.inner(x, training=training))


class Noise(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Centered(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class MeanPenalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


class Spread(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.std(x, axis=0)))
        return x


class Largest(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        return x


class CustomStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def loss_of(self, y, outputs):
        return ops.mean(ops.square(y - outputs))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        variables = self.trainable_variables
        self.update(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def update(self, gradients, variables):
        self.optimizer.apply(gradients, variables)


class Scaled(CustomStep):
    def loss_of(self, y, outputs):
        num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
        return super().loss_of(y, outputs) / num_replicas


class Summing(CustomStep):
    def loss_of(self, y, outputs):
        return ops.sum(ops.square(y - outputs))


class Contrastive(CustomStep):
    def loss_of(self, y, outputs):
        return ops.mean(ops.logsumexp(ops.matmul(outputs, ops.transpose(outputs)), axis=1))


class NoisyStep(CustomStep):
    def loss_of(self, y, outputs):
        return super().loss_of(y, outputs + tf.random.normal(tf.shape(outputs)))


class HiddenOptimizer(CustomStep):
    def __init__(self):
        super().__init__()
        self.hidden = [keras.optimizers.SGD(0.1, clipnorm=0.1)]

    def update(self, gradients, variables):
        self.hidden[0].apply(gradients, variables)
