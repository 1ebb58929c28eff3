"""Custom steps, around a network."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras import ops


class Around(keras.Model):
    """A custom model around a network."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.build((None, *net.input_shape[1:]))

    def call(self, x, training=False):
        return self.net(x, training=training)


class WithLoss(Around):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * ops.mean(ops.square(y_pred))


class CustomStep(Around):
    """A custom step; others change what it does to the loss and the gradients."""

    def train_step(self, data):
        return self.own_step(data)

    def own_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            output = self(x, training=True)
            loss = self.loss_of(x, y, output, weights)
            scaled = self.scaled(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.update(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, output)
        return {**self.get_metrics_result(), "own": loss}

    def loss_of(self, x, y, output, weights):
        return self.compute_loss(x, y, output, weights)

    def scaled(self, loss):
        return loss

    def update(self, gradients, variables):
        self.optimizer.apply_gradients(zip(gradients, variables))


class ByTheBook(CustomStep):
    def scaled(self, loss):
        return self.optimizer.scale_loss(loss)


class Compiled(CustomStep):
    @tf.function
    def train_step(self, data):
        return self.own_step(data)


class Partial(CustomStep):
    def __init__(self, net):
        super().__init__(net)
        self.train_step = functools.partial(type(self).own_step, self)


class TwoOptimizers(CustomStep):
    def keep(self, first, second):
        self.first, self.second = first, second

    def both(self):
        return self.first, self.second

    def update(self, gradients, variables):
        half = len(variables) // 2
        first, second = self.both()
        first.apply_gradients(zip(gradients[:half], variables[:half]))
        second.apply_gradients(zip(gradients[half:], variables[half:]))


class TwoInDict(TwoOptimizers):
    def keep(self, first, second):
        self.held = {"body": first, "head": second}

    def both(self):
        return self.held["body"], self.held["head"]


class Clipped(CustomStep):
    def update(self, gradients, variables):
        gradients, _ = tf.clip_by_global_norm(gradients, 0.2)
        super().update(gradients, variables)


class Summed(CustomStep):
    def loss_of(self, x, y, output, weights):
        return 0.01 * tf.reduce_sum(tf.square(output - tf.cast(tf.reshape(y, (-1, 1)), "float32")))


STEPS = {
    "stock": None,
    "own": CustomStep,
    "own, by the book": ByTheBook,
    "own, under tf.function": Compiled,
    "own, a partial": Partial,
    "own, two optimizers": TwoOptimizers,
    "own, two optimizers in a dict": TwoInDict,
    "own, clipped by hand": Clipped,
    "own, sum by hand": Summed,
    "compute_loss": WithLoss,
}
