"""Custom metrics, and what custom steps log."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from conformance import feeds, training
from conformance.guarantees import common
from conformance.guarantees.common import guarantee


class CustomMetric(keras.metrics.Metric):
    """A metric of one number."""

    def __init__(self, name):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def result(self):
        return self.value + 0.0


class Largest(CustomMetric):
    """The largest error of an epoch."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(ops.abs(y_true - y_pred))))


class Batches(CustomMetric):
    """The number of batches."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.value + 1.0)


class Moving(CustomMetric):
    """A moving average of the batches' errors."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.mean(ops.abs(y_true - y_pred))
        self.value.assign(0.9 * self.value + 0.1 * error)


class TotalOfMeans(CustomMetric):
    """The sum of the batches' mean errors, as for a cost."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(ops.mean(ops.abs(y_true - y_pred)))


class Variable(CustomMetric):
    """Keras's own docstring: the result is the variable."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(ops.sum(ops.abs(y_true - y_pred)))

    def result(self):
        return self.value


class Perplexity(keras.metrics.Metric):
    """A `Loss` object within a metric, as keras-hub has it."""

    def __init__(self, name="perplexity"):
        super().__init__(name=name)
        self.entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(self.entropy(y_true, y_pred))
        self.count.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self):
        return ops.exp(self.total / self.count)


def measured(kind):
    def create(wrap):
        return common.regressor(metrics=[kind("own")])(wrap)

    return create


def perplexity(wrap):
    return common.classifier(metrics=[Perplexity()])(wrap)


class Logging(keras.Model):
    """A step whose logs are the user's."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(2)])
        self.sum = keras.metrics.Sum(name="sum")
        self.build((None, 5))

    def call(self, x, training=False):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.square(self(x, training=True) - y)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(loss, losses)


class SumOfLosses(Logging):
    def logs(self, loss, losses):
        self.sum.update_state(loss)
        return {"sum": self.sum.result()}


class LossAlone(Logging):
    """Logs the step's loss under the name of Keras's tracker, which is left alone."""

    def logs(self, loss, losses):
        return {"loss": loss}


class VectorLog(Logging):
    """Logs a number for each output."""

    def logs(self, loss, losses):
        return {"each": tf.reduce_mean(losses, axis=0)}


def logging(kind):
    def create(wrap):
        model = kind()
        model.compile(wrap(common.sgd()), "mse")
        return model

    return create


class Kept(keras.callbacks.Callback):
    """Keeps each batch's logs."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(float(logs["loss"]))


def by_batch(guarantee, place):
    """Trains, and returns the logs of each batch too."""
    model = training.create(guarantee, place)
    kept = Kept()
    history = training.fit(model, guarantee, place, callbacks=[kept])
    return training.results(model, place, {**history, "batches": kept.batches})


def predicted(guarantee, place):
    """Predicts batches of an odd size, one by one."""
    model = training.create(guarantee, place)
    batches = [x for x, _ in feeds.batches(guarantee, place)]
    return {"predict": np.concatenate([model.predict_on_batch(x) for x in batches])}


GUARANTEES = [
    guarantee("metric: a maximum", measured(Largest)),
    guarantee("metric: number of batches", measured(Batches)),
    guarantee("metric: moving average", measured(Moving)),
    guarantee("metric: total of means", measured(TotalOfMeans)),
    guarantee("metric: the result is its variable", measured(Variable), validate=True),
    guarantee("metric with a Loss within", perplexity, common.plain),
    guarantee("a Sum of the step's losses", logging(SumOfLosses)),
    guarantee("a step that logs loss itself", logging(LossAlone), run=by_batch),
    guarantee("a step that logs a vector", logging(VectorLog)),
    guarantee(
        "predict_on_batch of 13 rows", logging(LossAlone), num_rows=13, run=predicted, ordered=True
    ),
]
