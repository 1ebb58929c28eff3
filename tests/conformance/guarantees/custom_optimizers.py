"""Optimizers wherever a model holds them, around others, and custom ones."""

from __future__ import annotations

import tempfile

import keras
import tensorflow as tf
from keras import layers, ops

from conformance import training
from conformance.guarantees import common
from conformance.guarantees.common import guarantee

SGD = keras.optimizers.SGD


def two(wrap):
    """The two optimizers of the models below."""
    return wrap(common.sgd()), wrap(SGD(0.2, global_clipnorm=0.1))


class TwoParts(keras.Model):
    """Two networks in a row, each with an optimizer; where those are is the subclass's."""

    def __init__(self):
        super().__init__()
        self.left = keras.Sequential([keras.Input((5,)), common.hidden()])
        self.right = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.build((None, 5))

    def call(self, x, training=False):
        return self.right(self.left(x))

    def compile(self, left, right):
        super().compile()
        self.keep(left, right)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        parts = [self.left.trainable_variables, self.right.trainable_variables]
        for optimizer, some, part in zip(self.kept(), tape.gradient(loss, parts), parts):
            optimizer.apply_gradients(zip(some, part))
        return {"own": loss}


class InDict(TwoParts):
    def keep(self, left, right):
        self.own = {"left": left, "right": right}

    def kept(self):
        return self.own["left"], self.own["right"]


class InList(TwoParts):
    def keep(self, left, right):
        self.own = [left, right]

    def kept(self):
        return self.own


class Holder:
    """A user's object: no layer, no model."""

    holds_optimizers = True

    def __init__(self, left, right):
        self.left, self.right = left, right


class InObject(TwoParts):
    def keep(self, left, right):
        self.own = Holder(left, right)

    def kept(self):
        return self.own.left, self.own.right


class AsAttributes(TwoParts):
    def keep(self, left, right):
        self.left_optimizer, self.right_optimizer = left, right

    def kept(self):
        return self.left_optimizer, self.right_optimizer


def held(kind, make=two):
    def create(wrap):
        model = kind()
        model.compile(*make(wrap))
        return model

    return create


def scaled_outside(wrap):
    """Loss scales around what is distributed already."""
    return [keras.optimizers.LossScaleOptimizer(each) for each in two(wrap)]


def one_bare(wrap):
    """The user has thought of one of them only."""
    left, right = two(lambda optimizer: optimizer)
    return wrap(left), right


class Student(keras.Model):
    """A submodel that is compiled and trains by a step of its own."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(1)])
        self.build((None, 5))

    def call(self, x, training=False):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


class School(keras.Model):
    """Leaves its step to the submodel."""

    def __init__(self, student):
        super().__init__()
        self.student = student
        self.build((None, 5))

    def call(self, x, training=False):
        return self.student(x, training=training)

    def train_step(self, data):
        return self.student.train_step(data)


def school(wrap):
    student = Student()
    student.compile(wrap(SGD(0.1, momentum=0.9, clipnorm=0.1)), "mse")
    model = School(student)
    model.compile()
    return model


def resumed(guarantee, place):
    """Trains an epoch, keeps a checkpoint, and trains the second in a new model."""
    if place.strategy is None or place.stock:
        model = training.create(guarantee, place)
        training.fit(model, guarantee, place)
        return training.results(model, place, {})
    import tfmulti

    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 2):
            model = training.create(guarantee, place)
            kept = tfmulti.callbacks.Checkpoint(folder)
            training.fit(model, guarantee, place, epochs=epochs, callbacks=[kept])
    return training.results(model, place, {})


class CustomApply(keras.optimizers.SGD):
    """Clips in an `apply_gradients` of its own."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(ops.clip(grad, -0.02, 0.02), each) for grad, each in grads_and_vars]
        return super().apply_gradients(pairs)


class Around(keras.optimizers.Optimizer):
    """An optimizer that hands its steps to another: the pattern of wrappers."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.1)
        self.inner = inner

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.inner.build(variables)
            self.slow = [
                self.add_variable_from_reference(each, "slow", initializer=each.value)
                for each in variables
            ]

    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError


class Lookahead(Around):
    """Zhang et al.: slow weights that follow the fast ones every second step."""

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.inner.apply(grads, trainable_variables)
        self.iterations.assign_add(1)
        now = ops.cast(ops.equal(self.iterations % 2, 0), "float32")
        for slow, fast in zip(self.slow, trainable_variables):
            near = slow + 0.5 * (fast - slow)
            slow.assign(now * near + (1 - now) * slow)
            fast.assign(now * near + (1 - now) * fast)


class OfTwo(keras.optimizers.Optimizer):
    """One optimizer for the first variables and another for the rest."""

    def __init__(self, first, second):
        super().__init__(learning_rate=0.1)
        self.first, self.second = first, second

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.first.build(variables[:2])
            self.second.build(variables[2:])

    def apply(self, grads, trainable_variables=None):
        self.build(trainable_variables)
        self.first.apply(grads[:2], trainable_variables[:2])
        self.second.apply(grads[2:], trainable_variables[2:])
        self.iterations.assign_add(1)

    def update_step(self, gradient, variable, learning_rate):
        raise NotImplementedError


def around(wrap):
    return common.regressor(lambda: Lookahead(SGD(0.1, momentum=0.9, clipnorm=0.1)))(wrap)


def of_two(wrap):
    return common.regressor(lambda: OfTwo(*two(lambda optimizer: optimizer)))(wrap)


class Relative(layers.Layer):
    """Adds to tokens a row of a table for each pair of positions, as T5 and Swin do."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def build(self, shape):
        self.table = self.add_weight(shape=(11, 4), name="table")

    def call(self, x):
        places = tf.range(6)[:, None] - tf.range(6)[None, :] + 5
        return x + tf.reduce_mean(self.take(self.table, places), axis=1)


class RelativeEmbedding(layers.Layer):
    """The same by a layer of Keras."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(11, 4)

    def call(self, x):
        places = tf.range(6)[:, None] - tf.range(6)[None, :] + 5
        return x + tf.reduce_mean(self.table(places), axis=1)


class OneTable(layers.Layer):
    """One table for tokens and for positions."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4)

    def call(self, x):
        return self.table(x) + self.table(tf.range(6))


def sparse(*body):
    def embed():
        return layers.Embedding(9, 4)

    first = () if body == (OneTable,) else (embed,)
    middle = (lambda: layers.Dense(4, "tanh"), layers.Flatten)
    return common.classifier(lambda: SGD(0.5, clipnorm=0.05), (*first, *body, *middle), (6,))


def by_gather():
    return Relative(tf.gather)


def by_take():
    return Relative(lambda table, places: ops.take(table, places, axis=0))


GUARANTEES = [
    guarantee("optimizers in a dict", held(InDict)),
    guarantee("optimizers in a list", held(InList)),
    guarantee("optimizers in an object", held(InObject)),
    guarantee("a submodel with a step of its own", school),
    guarantee("loss scale outside, as attributes", held(AsAttributes, scaled_outside)),
    guarantee("one of two optimizers bare", held(AsAttributes, one_bare)),
    guarantee("optimizers in a list, resumed", held(InList), run=resumed, feed="arrays"),
    guarantee("own apply_gradients", common.regressor(lambda: CustomApply(0.1))),
    guarantee("an optimizer around an optimizer", around),
    guarantee("an optimizer of two", of_two),
    guarantee("positions by tf.gather, clipped", sparse(by_gather), common.tokens),
    guarantee("positions by ops.take, clipped", sparse(by_take), common.tokens),
    guarantee("positions by Embedding, clipped", sparse(RelativeEmbedding), common.tokens),
    guarantee("tokens and positions of one table", sparse(OneTable), common.tokens),
]
