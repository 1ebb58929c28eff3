"""Steps that are one device's at first, and not later; and others that stay so."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

NUM_ROWS, NUM_CLASSES, NUM_STEPS = 48, 3, 6


def sorted_classes():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_ROWS, 4)).astype("float32")
    return x, np.arange(NUM_ROWS) * NUM_CLASSES // NUM_ROWS


def weighted():
    return *sorted_classes(), np.ones(NUM_ROWS, "float32")


def tokens(padded_from=24):
    """Sequences, of which only those from a row on end in padding."""
    sequences = np.random.default_rng(1).integers(1, 9, (NUM_ROWS, NUM_STEPS)).astype("int32")
    sequences[padded_from:, 3:] = 0
    return sequences, sequences


def dense():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(3)])


def tagger():
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    return keras.Sequential([inputs, layers.Embedding(10, 4), layers.Dense(9)])


def recurrent(**arguments):
    inputs = keras.Input((NUM_STEPS,), dtype="int32")
    embedding = layers.Embedding(10, 4, mask_zero=True)
    return keras.Sequential([inputs, embedding, layers.LSTM(4, **arguments), layers.Dense(10)])


class Step(keras.Model):
    """A `train_step` with a loss of its own and settings for callbacks to change."""

    def __init__(self, loss, net=dense):
        super().__init__()
        self.net, self.loss_of = net(), loss
        self.setting = keras.Variable(0.0, trainable=False)
        self.plain_setting = tf.Variable(0.0, trainable=False)
        self.count = tf.Variable(0, trainable=False)
        self.flag = tf.Variable(False, trainable=False)

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self.net(x, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), outputs)
            loss = self.loss_of(self, y, losses, weights, outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


def by_iterations(term):
    def loss(model, y, losses, weights, outputs):
        part = tf.minimum(1.0, tf.cast(model.optimizer.iterations, tf.float32) / 10_000.0)
        return tf.reduce_mean(losses) + part * term(outputs)

    return loss


def after_iterations(number, term):
    def loss(model, y, losses, weights, outputs):
        part = tf.cast(model.optimizer.iterations > number, tf.float32)
        return tf.reduce_mean(losses) + part * term(outputs)

    return loss


def by_setting(name, term):
    def loss(model, y, losses, weights, outputs):
        part = tf.cast(tf.convert_to_tensor(getattr(model, name)), tf.float32)
        return tf.reduce_mean(losses) + part * term(outputs)

    return loss


def deviation(outputs):
    return tf.math.reduce_std(outputs)


def mean_square(outputs):
    return tf.reduce_mean(tf.square(outputs))


def balanced(model, y, losses, weights, outputs):
    """A mean over each class's rows."""
    masks = [tf.cast(tf.equal(y, kind), tf.float32) for kind in range(NUM_CLASSES)]
    sums = [tf.math.divide_no_nan(tf.reduce_sum(losses * m), tf.reduce_sum(m)) for m in masks]
    return tf.add_n(sums)


def last_class_counts_more(model, y, losses, weights, outputs):
    return tf.reduce_mean(losses * (1.0 + 3.0 * tf.cast(tf.equal(y, 2), tf.float32)))


def mean_of_weights(model, y, losses, weights, outputs):
    return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)


def mean_of_tokens(model, y, losses, weights, outputs):
    mask = tf.cast(y != 0, tf.float32)
    return tf.reduce_sum(losses * mask) / tf.reduce_sum(mask)


def mean_of_rows_tokens(model, y, losses, weights, outputs):
    mask = tf.cast(y != 0, tf.float32)
    rows = tf.reduce_sum(losses * mask, axis=1) / tf.maximum(tf.reduce_sum(mask, axis=1), 1.0)
    return tf.reduce_mean(rows)


def skipped_where_large(model, y, losses, weights, outputs):
    """Each replica decides by the mean of its own rows."""
    loss = tf.reduce_mean(losses)
    return tf.where(loss > 50.0, 0.0, loss)


def mean_above_a_bound(model, y, losses, weights, outputs):
    return tf.nn.relu(tf.reduce_mean(losses) - 0.01)


def linear():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


def targets():
    x, y = sorted_classes()
    return x, y.astype("float32")


def mean_of_known(model, y, losses, weights, outputs):
    """Some targets may be NaN: a mean over the others."""
    known = tf.logical_not(tf.math.is_nan(y))
    errors = tf.where(known, tf.square(tf.where(known, y, 0.0) - outputs[:, 0]), 0.0)
    return tf.reduce_sum(errors) / (tf.reduce_sum(tf.cast(known, tf.float32)) + 1e-6)


def mean_of_labelled(label):
    def loss(model, y, losses, weights, outputs):
        """Some rows may have no label: a mean over the others."""
        known = tf.cast(y != label, tf.float32)
        errors = tf.square(tf.cast(tf.maximum(y, 0), tf.float32) - outputs[:, 0])
        return tf.reduce_sum(errors * known) / (tf.reduce_sum(known) + 1e-6)

    return loss


class Guarded(Step):
    """Skips an update if the loss of a replica's own rows is not finite."""

    def __init__(self):
        super().__init__(mean, linear)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        is_finite = tf.math.is_finite(loss)
        gradients = [tf.where(is_finite, each, tf.zeros_like(each)) for each in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


class AssignedByHand(Step):
    """Changes trainable weights from local rows, without a tape; its optimizer does nothing."""

    def __init__(self):
        super().__init__(mean, linear)

    def train_step(self, data):
        x, y = data
        weight = self.net.trainable_variables[0]
        weight.assign_add(0.1 * tf.matmul(x, self(x), transpose_a=True) / 8.0)
        return {"rows": tf.reduce_mean(x)}


def mean(model, y, losses, weights, outputs):
    return tf.reduce_mean(losses)


def log_of_label(model, y, losses, weights, outputs):
    """Comes to no number for a label 0."""
    return tf.reduce_mean(losses * tf.math.log(tf.cast(y, tf.float32)))


class MovingLoss(Step):
    """Keeps a moving mean of its losses in what it was given."""

    def __init__(self, variable):
        super().__init__(mean)
        self.moving = [variable]

    def train_step(self, data):
        logs = super().train_step(data)
        self.moving[0].assign(0.9 * self.moving[0] + 0.1 * logs["own_loss"])
        return logs


class Queue(layers.Layer):
    """Has a place in a short list, at which no later step can be."""

    def build(self, shape):
        self.place = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.row = self.add_weight(shape=(16,), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            row, place = tf.convert_to_tensor(self.row), tf.reshape(self.place, (1, 1))
            self.row.assign(tf.tensor_scatter_nd_update(row, place, [1.0]))
            self.place.assign((self.place + 1) % 16)
        return x


def queue():
    return keras.Sequential([keras.Input((4,)), Queue(), layers.Dense(3)])
