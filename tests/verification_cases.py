"""Models as users write them: what is one device's on many replicas, and what is not."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfmulti

NUM_ROWS, NUM_FEATURES = 29, 4


def rows(num_rows=NUM_ROWS):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(num_rows, NUM_FEATURES)).astype("float32")
    return x, generator.normal(size=(num_rows, 2)).astype("float32")


def labels(num_rows=NUM_ROWS):
    generator = np.random.default_rng(4)
    return rows(num_rows)[0], generator.integers(0, 2, (num_rows, 2)).astype("float32")


def squares(y, prediction):
    return tf.reduce_mean(tf.square(y - prediction), axis=-1)


def mean_of_squares(y, prediction):
    return tf.reduce_mean(tf.square(y - prediction))


def sum_of_squares(y, prediction):
    return tf.reduce_sum(tf.square(y - prediction))


def root_of_mean(y, prediction):
    return tf.sqrt(tf.reduce_mean(tf.square(y - prediction)))


def average_loss(y, prediction):
    return tf.nn.compute_average_loss(squares(y, prediction), global_batch_size=5)


def valid_only(y, prediction):
    valid = tf.cast(y > 0, tf.float32)
    return tf.reduce_sum(tf.square(y - prediction) * valid) / tf.reduce_sum(valid)


def dense(*middle):
    return keras.Sequential([layers.Dense(5, "tanh"), *middle, layers.Dense(2)])


class Scale(layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.factor


class Noise(layers.Layer):
    def call(self, x, training=False):
        return x + tf.random.normal(tf.shape(x)) if training else x


class Centre(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class CountSteps(layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
        return x


class RunningMean(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        return x


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y, prediction, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y - prediction))))

    def result(self):
        return self.value + 0.0


class MeanError(keras.metrics.Metric):
    def __init__(self, name="mean_error"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, prediction, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y - prediction)))
        self.count.assign_add(ops.cast(ops.size(y), "float32"))

    def result(self):
        return ops.divide_no_nan(self.total, self.count)


class CustomStep(keras.Model):
    """A custom `train_step`; `change` does something with its gradients."""

    def __init__(self, change=lambda gradients: gradients, loss=squares):
        super().__init__()
        self.net, self.change, self.loss_of = dense(), change, loss
        self.net.build((None, NUM_FEATURES))

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.loss_of(y, self.net(x, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = zip(self.change(gradients), self.trainable_variables)
        self.optimizer.apply_gradients(pairs)
        return {"own_loss": loss}


class CountingStep(CustomStep):
    """Divides its gradients by the number of its step, an attribute."""

    def __init__(self, loss=squares):
        super().__init__(lambda gradients: [each / self.count for each in gradients], loss)
        self.count = 0

    def train_step(self, data):
        self.count += 1
        return super().train_step(data)


class Pair(keras.Model):
    """Two nets with an optimizer each, and no `call`, as the usual GAN."""

    def __init__(self):
        super().__init__()
        self.one, self.two = dense(), dense()
        self.one.build((None, NUM_FEATURES))
        self.two.build((None, NUM_FEATURES))

    def compile(self, **kwargs):
        super().compile()
        self.first = tfmulti.DistributedOptimizer(keras.optimizers.Adam(0.01))
        self.second = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    @property
    def metrics(self):
        return [self.mean_loss]

    def train_step(self, data):
        x, y = data
        for net, optimizer in ((self.one, self.first), (self.two, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(squares(y, net(x, training=True)))
            gradients = tape.gradient(loss, net.trainable_variables)
            optimizer.apply_gradients(zip(gradients, net.trainable_variables))
        self.mean_loss.update_state(loss)
        return {"mean_loss": self.mean_loss.result()}


class WithFunction(CustomStep):
    """Its inner `tf.function` reads the number of replicas, and is traced in training too."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @tf.function
    def factor(self, x):
        number = tf.distribute.get_strategy().num_replicas_in_sync
        self.seen.append(number)
        return x * float(number) / float(number)

    def train_step(self, data):
        x, y = data
        return super().train_step((self.factor(x), y))


class WithNet(CustomStep):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.net.build((None, NUM_FEATURES))


class AddPerRow(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x), axis=-1))
        return x


class LargestSeen(layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        return x + 0.1 * self.largest


def negatives(y, prediction):
    logits = tf.matmul(prediction, y, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


def scaled(y, prediction):
    number = tf.distribute.get_strategy().num_replicas_in_sync
    return mean_of_squares(y, prediction) / number


class Adversarial(CustomStep):
    """Rows are moved along the gradient of a mean, which depends on how many rows there are."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.reduce(squares(y, self.net(x, training=True)))
        return super().train_step((x + tape.gradient(loss, x), y))

    reduce = staticmethod(tf.reduce_mean)


class AdversarialOfRows(Adversarial):
    reduce = staticmethod(tf.reduce_sum)


class Bank(CustomStep):
    def __init__(self):
        super().__init__()
        self.bank = self.add_weight(shape=(9, 2), initializer="zeros", trainable=False)

    def train_step(self, data):
        self.bank.assign(tf.concat([self.net(data[0]), self.bank], 0)[:9])
        return super().train_step(data)


class CountRows(CustomStep):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "rows": tf.cast(tf.shape(data[0])[0], tf.float32)}


class Total(CustomStep):
    def __init__(self):
        super().__init__()
        self.total = keras.metrics.Sum(name="total")

    @property
    def metrics(self):
        return [self.total]

    def train_step(self, data):
        self.total.update_state(tf.reduce_sum(data[1]))
        super().train_step(data)
        return {"total": self.total.result()}


class CentredPrediction(CustomStep):
    def predict_step(self, data):
        prediction = self(data[0] if isinstance(data, tuple) else data)
        return prediction - tf.reduce_mean(prediction, axis=0)


def found(y, prediction):
    best = tf.argmax(tf.matmul(prediction, y, transpose_b=True), 1, output_type=tf.int32)
    return tf.cast(best == tf.range(tf.shape(y)[0]), tf.float32)


def centred(x):
    return x - ops.mean(x, axis=0)


def functional():
    inputs = keras.Input((NUM_FEATURES,))
    return keras.Model(inputs, layers.Dense(2)(centred(layers.Dense(3)(inputs))), name="graph")


class TwoParts(CustomStep):
    """Averages unlabelled rows and fewer labelled ones, in one batch, as in SimCLR."""

    def __init__(self, take=lambda rows: rows, *middle):
        super().__init__()
        self.net, self.take = dense(*middle), take
        self.net.build((None, NUM_FEATURES))

    def of_both(self, data):
        unlabelled, (x, y) = data[:2]
        both = self.net(tf.concat([unlabelled, x], 0), training=True)
        predictions = tf.split(both, [tf.shape(unlabelled)[0], tf.shape(x)[0]])
        one = tf.reduce_mean(tf.square(predictions[0]))
        return one + tf.reduce_mean(self.take(squares(y, predictions[1])))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.of_both(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": self.of_both(data)}

    def predict_step(self, data):
        return self.of_both(data)


def two_parts(unlabelled, labelled, num_unlabelled=None, num_labelled=None, **arguments):
    """A dataset of batches that have different numbers of rows in their parts."""
    x, _ = rows(num_unlabelled or 2 * unlabelled)
    slices = tf.data.Dataset.from_tensor_slices
    one = slices(x).batch(unlabelled, **arguments)
    two = slices(rows(num_labelled or 2 * labelled)).batch(labelled, **arguments)
    return tf.data.Dataset.zip((one, two))


class Matches(CustomStep):
    """The rows of the whole batch are compared, and a metric counts them: exact where none is
    without rows."""

    def __init__(self):
        super().__init__()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.accuracy]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            prediction, y = tfmulti.gather_batch((self.net(x, training=True), y))
            logits = tf.matmul(prediction, y, transpose_b=True)
            found = tf.range(tf.shape(logits)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(found, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.accuracy.update_state(found, logits)
        return {"loss": loss, "accuracy": self.accuracy.result()}
