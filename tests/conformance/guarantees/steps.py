"""How a step runs, and custom steps."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from conformance.guarantee import Guarantee
from conformance.guarantees import common


def guarantee(name, create, data=common.plain, **settings):
    return Guarantee(name, create, data=data, **settings)


class CustomStep(keras.Model):
    """Takes the gradient by itself, and logs what is no metric."""

    def __init__(self, loss_of):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(1)])
        self.loss_of = loss_of

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self.net(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"my_loss": loss, "size": ops.mean(ops.abs(self.net(x)))}


def own_step(loss_of):
    def create(wrap):
        model = CustomStep(loss_of)
        model.compile(wrap(common.sgd()), "mse")
        return model

    return create


def by_hand(y, prediction):
    return tf.reduce_mean(tf.square(y - prediction))


class CustomStepByTheBook(keras.Model):
    """Keras's guide to a `train_step` of one's own: compute_loss, scale_loss, metrics."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(1)])

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=prediction)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def by_the_book(wrap):
    model = CustomStepByTheBook()
    model.compile(wrap(common.sgd()), "mse", metrics=["mae"])
    return model


class Adversaries(keras.Model):
    """Two networks, each with its own optimizer, that pull against one another: a GAN."""

    def __init__(self):
        super().__init__()
        self.left = keras.Sequential([keras.Input((5,)), layers.Dense(3, name="left")])
        self.right = keras.Sequential([keras.Input((3,)), layers.Dense(1, name="right")])

    def compile(self, left_optimizer, right_optimizer):
        super().compile()
        self.left_optimizer, self.right_optimizer = left_optimizer, right_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        x, y = data
        count = ops.shape(x)[0]
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))], axis=0)
        with tf.GradientTape() as tape:
            both = ops.concatenate([self.left(x), ops.repeat(y, 3, axis=1)], axis=0)
            right_loss = self.loss_fn(labels, self.right(both))
        gradients = tape.gradient(right_loss, self.right.trainable_weights)
        self.right_optimizer.apply_gradients(zip(gradients, self.right.trainable_weights))
        with tf.GradientTape() as tape:
            left_loss = self.loss_fn(ops.zeros((count, 1)), self.right(self.left(x)))
        gradients = tape.gradient(left_loss, self.left.trainable_weights)
        self.left_optimizer.apply_gradients(zip(gradients, self.left.trainable_weights))
        return {"left_loss": left_loss, "right_loss": right_loss}


def adversaries(wrap):
    model = Adversaries()
    left = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(wrap(left), wrap(keras.optimizers.SGD(0.2, global_clipnorm=0.5)))
    return model


GUARANTEES = [
    guarantee("eager steps", common.classifier(run_eagerly=True)),
    guarantee("two steps an execution", common.classifier(steps_per_execution=2), rows="B5"),
    guarantee(
        "two steps an execution, evaluated",
        common.classifier(steps_per_execution=2),
        num_rows=32,
        validate=True,
        rows="B5",
    ),
    guarantee(
        "jit_compile=True",
        common.classifier(jit_compile=True),
        num_rows=32,
        refused="jit_compile",
        rows="B6",
    ),
    guarantee("own train_step, own mean", own_step(by_hand), common.numbers, rows="A10"),
    guarantee(
        "own train_step, a loss of Keras",
        own_step(keras.losses.MeanSquaredError()),
        common.numbers,
        rows="A10",
    ),
    guarantee("own train_step by the book", by_the_book, common.numbers, rows="A1"),
    guarantee("GAN with two optimizers", adversaries, common.numbers, rows="B7"),
]
