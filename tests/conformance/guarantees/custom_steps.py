"""Custom steps, by whatever name, and what they do to gradients."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf
from keras import layers

from conformance.guarantees import common
from conformance.guarantees.common import guarantee


def head(width=1):
    """A layer with a penalty, which counts once whatever the number of replicas."""
    return layers.Dense(width, kernel_regularizer=keras.regularizers.L2(0.01))


def network(*body, width=1):
    return keras.Sequential([keras.Input((5,)), *(body or [common.hidden()]), head(width)])


class CustomStep(keras.Model):
    """A model around a network; each step below is another user's."""

    def __init__(self, *body, width=1):
        super().__init__()
        self.net = network(*body, width=width)
        self.prepare()
        self.build((None, 5))

    def prepare(self):
        """Makes what else the model has."""

    def call(self, x, training=False):
        return self.net(x, training=training)

    def gradients(self, data):
        """The gradients of the loss that `compile` was given, and the loss."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, self.trainable_variables), loss

    def update(self, data):
        gradients, loss = self.gradients(data)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


def compiled(kind, *body, loss="mse", optimizer=common.sgd):
    """Returns a function of `wrap` that makes and compiles a model of the kind."""

    def create(wrap):
        model = kind(*(make() for make in body))
        model.compile(wrap(optimizer()), loss)
        return model

    return create


class Compiled(CustomStep):
    @tf.function
    def train_step(self, data):
        return self.update(data)


def noted(step):
    """A decorator as for timing or logging."""

    @functools.wraps(step)
    def wrapper(self, data):
        return step(self, data)

    return wrapper


class Decorated(CustomStep):
    @noted
    def train_step(self, data):
        return self.update(data)


def one_step(model, data):
    return model.update(data)


class Assigned(CustomStep):
    train_step = one_step


class Partial(CustomStep):
    def __init__(self):
        super().__init__()
        self.train_step = functools.partial(one_step, self)


class Lambda(CustomStep):
    def __init__(self):
        super().__init__()
        self.train_step = lambda data: self.update(data)


class TwoUpdates(CustomStep):
    """One loss that is scaled once, and an update for each half of the variables."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, variables)
        self.optimizer.build(variables)
        self.optimizer.apply(gradients[:2], variables[:2])
        self.optimizer.apply(gradients[2:], variables[2:])
        return {"own": loss}


class TwoLosses(CustomStep):
    """Two losses; both scaled or only the second, each with an update of its own."""

    scales_first = True

    def train_step(self, data):
        x, y = data
        scale = self.optimizer.scale_loss
        with tf.GradientTape(persistent=True) as tape:
            output = self(x, training=True)
            first = tf.reduce_mean(tf.square(output - y))
            second = tf.reduce_mean(tf.abs(tf.tanh(output) - y))
            losses = [scale(first) if self.scales_first else first, scale(second)]
        variables = self.trainable_variables
        both = [tape.gradient(loss, variables) for loss in losses]
        for gradients in both:
            self.optimizer.apply(gradients, variables)
        return {"first": first, "second": second}


class OneOfTwoScaled(TwoLosses):
    scales_first = False


class TwoOptimizers(CustomStep):
    """One loss, scaled by the first optimizer and applied by both."""

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            scaled = self.first.scale_loss(loss)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled, variables)
        self.first.apply(gradients[:2], variables[:2])
        self.second.apply(gradients[2:], variables[2:])
        return {"own": loss}


def two_optimizers(wrap):
    model = TwoOptimizers()
    model.compile(wrap(common.sgd()), wrap(keras.optimizers.Adam(0.01)))
    return model


class Unscaled(CustomStep):
    def train_step(self, data):
        return self.update(data)


class ClippedByNorm(CustomStep):
    def train_step(self, data):
        gradients, loss = self.gradients(data)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": loss, "norm": norm}


class ClippedByValue(CustomStep):
    def train_step(self, data):
        gradients, loss = self.gradients(data)
        gradients = [tf.clip_by_value(gradient, -0.02, 0.02) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": loss}


class SharpnessAware(CustomStep):
    """Foret et al.: the gradient at the worst point near by."""

    def train_step(self, data):
        gradients, loss = self.gradients(data)
        norm = tf.linalg.global_norm(gradients) + 1e-12
        steps = [0.05 * gradient / norm for gradient in gradients]
        for variable, step in zip(self.trainable_variables, steps):
            variable.assign_add(step)
        gradients, _ = self.gradients(data)
        for variable, step in zip(self.trainable_variables, steps):
            variable.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": loss}


class Accumulating(CustomStep):
    """Adds the gradients of two steps, and clips their sum, without a condition."""

    def prepare(self):
        self.sums = [
            self.add_weight(shape=each.shape, trainable=False, initializer="zeros")
            for each in self.net.trainable_variables
        ]
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def train_step(self, data):
        gradients, loss = self.gradients(data)
        self.count.assign_add(1.0)
        ready = tf.cast(tf.equal(self.count % 2.0, 0.0), tf.float32)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient)
        clipped, _ = tf.clip_by_global_norm([total + 0.0 for total in self.sums], 0.2)
        variables = self.net.trainable_variables
        self.optimizer.apply([ready * each for each in clipped], variables)
        for total in self.sums:
            total.assign(total * (1.0 - ready))
        return {"own": loss}


def synchronized():
    return layers.BatchNormalization(synchronized=True)


def no_bias():
    return layers.Dense(6, use_bias=False)


normalized = compiled(Unscaled, no_bias, synchronized)

GUARANTEES = [
    guarantee("train_step under tf.function", compiled(Compiled)),
    guarantee("train_step under a decorator", compiled(Decorated)),
    guarantee("train_step is another function", compiled(Assigned)),
    guarantee("train_step is a partial", compiled(Partial)),
    guarantee("train_step is a lambda", compiled(Lambda)),
    guarantee("a loss scaled once, two updates", compiled(TwoUpdates)),
    guarantee("two losses scaled, two updates", compiled(TwoLosses)),
    guarantee("one of two losses scaled", compiled(OneOfTwoScaled)),
    guarantee("scaled by one optimizer, applied by two", two_optimizers),
    guarantee("own step, synchronized, not scaled", normalized),
    guarantee("own step, synchronized, empty replica batches", normalized, num_rows=33),
    guarantee("own step, clip_by_global_norm", compiled(ClippedByNorm)),
    guarantee("own step, clip_by_value", compiled(ClippedByValue)),
    guarantee("own step, sharpness-aware", compiled(SharpnessAware)),
    guarantee("own step, accumulates", compiled(Accumulating)),
]
