"""What a custom step may take for the loss: sums, divisions, vectors, other rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from conformance.guarantee import TOLD
from conformance.guarantees import common
from conformance.guarantees.custom_steps import CustomStep, compiled, guarantee

BATCH_SIZE = 16


class Summed(CustomStep):
    """Sums over the rows of a replica, which are no rows of the batch."""

    def loss_of(self, y, output):
        return 0.01 * tf.reduce_sum(tf.square(output - y))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": loss}


class Divided(Summed):
    """Divides by the size of the global batch, as a Python number."""

    def loss_of(self, y, output):
        return tf.reduce_sum(tf.square(output - y)) / BATCH_SIZE


class Averaged(Summed):
    """TensorFlow's idiom for strategies."""

    def loss_of(self, y, output):
        losses = tf.reduce_mean(tf.square(output - y), axis=-1)
        return tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)


class AveragedOverAll(Summed):
    def loss_of(self, y, output):
        return tf.nn.compute_average_loss(tf.reduce_mean(tf.square(output - y), axis=-1))


class Regularized(Summed):
    """The rest of that idiom: penalties are scaled."""

    def loss_of(self, y, output):
        losses = tf.reduce_mean(tf.square(output - y), axis=-1)
        penalty = tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        return tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE) + penalty


class Vector(Summed):
    """A number for each row, which the tape adds up."""

    def loss_of(self, y, output):
        return 0.05 * tf.reduce_mean(tf.square(output - y), axis=-1)

    def train_step(self, data):
        return {"own": tf.reduce_mean(super().train_step(data)["own"])}


class ComputesLoss(CustomStep):
    """Keras's masked language model: a loss of its own in `compute_loss`."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.01 * tf.reduce_sum(tf.square(y - y_pred))


class Phased(Summed):
    """Cannot be split from the second epoch on."""

    phase = 1

    def loss_of(self, y, output):
        loss = tf.reduce_mean(tf.square(output - y))
        return loss + tf.math.reduce_std(output) if self.phase == 2 else loss


class SecondPhase(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.phase = 2
            self.model.make_train_function(force=True)


class WithoutMissing(Summed):
    """A mean over the targets that are known."""

    def loss_of(self, y, output):
        known = tf.cast(y != -999.0, y.dtype)
        return tf.reduce_sum(tf.square(output - y) * known) / tf.reduce_sum(known)


def missing_later(num_rows):
    x, y = common.numbers(num_rows)
    y[20::3] = -999.0
    return x, y


class Contrastive(CustomStep):
    """Two views of each row; the other rows of the batch are the negatives: SimCLR."""

    def __init__(self):
        super().__init__(width=4)

    def loss_of(self, first, second):
        first, second = tf.math.l2_normalize(first, -1), tf.math.l2_normalize(second, -1)
        similar = tf.matmul(first, second, transpose_b=True) / 0.5
        labels = tf.range(tf.shape(first)[0])
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=similar)
        )

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self(x, training=True), self(0.9 * x + 0.1, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": loss}


class BarlowTwins(Contrastive):
    """The correlation of outputs over the batch."""

    def loss_of(self, first, second):
        def scaled(x):
            return (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 0.1)

        rows = tf.cast(tf.shape(first)[0], tf.float32)
        matrix = tf.matmul(scaled(first), scaled(second), transpose_a=True) / rows
        return 0.1 * tf.reduce_sum(tf.square(matrix - tf.eye(4)))


GUARANTEES = [
    guarantee("own step, reduce_sum", compiled(Summed), must=TOLD),
    guarantee("own step, divides by the batch size", compiled(Divided), must=TOLD),
    guarantee("own step, compute_average_loss", compiled(Averaged)),
    guarantee("own step, compute_average_loss of all", compiled(AveragedOverAll)),
    guarantee("own step, scale_regularization_loss", compiled(Regularized)),
    guarantee("own step, a number for each row", compiled(Vector)),
    guarantee(
        "own step, another phase from a callback",
        compiled(Phased),
        on_difference="replicate",
        fit={"callbacks": [SecondPhase()]},
    ),
    guarantee(
        "own step, leaves out targets of -999",
        compiled(WithoutMissing),
        must=TOLD,
        data=missing_later,
    ),
    guarantee("own compute_loss, a sum", compiled(ComputesLoss), must=TOLD),
    guarantee("own step, contrastive", compiled(Contrastive), must=TOLD),
    guarantee("own step, correlation over the batch", compiled(BarlowTwins), must=TOLD),
]
