"""Losses with every denominator, several outputs, and metrics over whole epochs."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from conformance.guarantee import Guarantee
from conformance.guarantees import common


def guarantee(name, create, data=common.plain, **settings):
    return Guarantee(name, create, data=data, **settings)


def one_number(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


def reduced(reduction):
    return common.classifier(loss=lambda: common.entropy(reduction=reduction))


def light(num_rows):
    """A sum over rows needs small weights to stay in bounds."""
    x, y, weights = common.weighted(num_rows)
    return x, y, 0.05 * weights


class MeanPenalty(layers.Layer):
    """Adds the mean over its rows to the loss."""

    def call(self, x):
        self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
        return x


def activity():
    return layers.Dense(6, "tanh", activity_regularizer=keras.regularizers.L2(0.1))


def kernel():
    l1_l2 = keras.regularizers.L1L2(0.001, 0.1)
    return layers.Dense(6, "tanh", kernel_regularizer=l1_l2, bias_regularizer="l2")


def tagger(reduction):
    def create(wrap):
        embed = layers.Embedding(9, 5, mask_zero=True)
        body = [keras.Input((6,)), embed, layers.LSTM(4, return_sequences=True)]
        model = keras.Sequential([*body, layers.Dense(common.NUM_CLASSES)])
        loss = common.entropy(reduction=reduction)
        model.compile(wrap(common.sgd()), loss, weighted_metrics=["accuracy"])
        return model

    return create


def lightly_tagged(num_rows):
    x, y = common.tagged(num_rows)
    return x, y, np.full(y.shape, 0.05, "float32")


def two_outputs(losses):
    def create(wrap):
        inputs = keras.Input((5,))
        x = common.hidden()(inputs)
        outputs = {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(1, name="b")(x)}
        model = keras.Model(inputs, outputs)
        metrics = {"a": ["mae"], "b": ["mse"]}
        settings = {"loss": losses(), "loss_weights": {"a": 0.7, "b": 0.2}, "metrics": metrics}
        model.compile(wrap(common.sgd()), **settings)
        return model

    return create


def two_targets(num_rows):
    x, y = common.numbers(num_rows)
    return x, {"a": y, "b": 0.3 - y}


def weights_for_each(num_rows):
    x, y = two_targets(num_rows)
    weights = common.weights(num_rows)
    return x, y, {"a": weights, "b": weights[::-1].copy()}


def binary(wrap):
    model = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(1, "sigmoid")])
    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
        keras.metrics.BinaryIoU(name="iou"),
    ]
    model.compile(wrap(common.sgd()), "binary_crossentropy", metrics=metrics)
    return model


def yes_or_no(num_rows):
    x = common.features(num_rows)
    return x, (x.sum(axis=1, keepdims=True) > 0).astype("float32")


def mean_iou(wrap):
    metrics = [
        keras.metrics.MeanIoU(common.NUM_CLASSES, sparse_y_pred=False, name="iou"),
        keras.metrics.SparseTopKCategoricalAccuracy(2, name="top"),
    ]
    return common.classifier(metrics=metrics)(wrap)


def regression(wrap):
    metrics = [keras.metrics.RootMeanSquaredError(name="rmse"), keras.metrics.R2Score(name="r2")]
    return common.regressor(metrics=metrics)(wrap)


def resting(wrap):
    # The weights stay, so that nothing but the logs can differ.
    return common.classifier(lambda: keras.optimizers.SGD(0.0), metrics=["accuracy"])(wrap)


def two_means():
    return {"a": "mse", "b": "mse"}


def mean_and_sum():
    return {"a": "mse", "b": keras.losses.Huber(reduction="sum")}


weighted_mean = "mean_with_sample_weight"

GUARANTEES = [
    guarantee(
        "loss that gives one number", common.regressor(loss=one_number), common.numbers, rows="A7"
    ),
    guarantee(
        "loss that gives one number, even",
        common.regressor(loss=one_number),
        common.numbers,
        num_rows=32,
        rows="A7",
    ),
    guarantee(
        "add_loss of a mean", common.classifier(body=(common.hidden, MeanPenalty)), rows="A8"
    ),
    guarantee("activity regularizer", common.classifier(body=(activity,)), **common.OF_ACTIVITY),
    guarantee("kernel and bias regularizers", common.classifier(body=(kernel,))),
    guarantee("mean_with_sample_weight", reduced(weighted_mean), common.weighted, rows="A16"),
    guarantee(
        "mean_with_sample_weight, padded",
        reduced(weighted_mean),
        common.weighted,
        num_rows=43,
        remainder="pad",
        rows="A16",
    ),
    guarantee("reduction sum", reduced("sum"), light, rows="A19"),
    guarantee("token masks", tagger("sum_over_batch_size"), common.tagged, rows="A17"),
    guarantee(
        "token masks, padded",
        tagger("sum_over_batch_size"),
        common.tagged,
        num_rows=43,
        remainder="pad",
        rows="A17",
        refused="must have the shape of the losses",
    ),
    guarantee("token masks and weights", tagger(weighted_mean), lightly_tagged, rows="A16 A17"),
    guarantee("two outputs, loss weights", two_outputs(two_means), two_targets, num_rows=43),
    guarantee(
        "two outputs, one of them summed",
        two_outputs(mean_and_sum),
        two_targets,
        num_rows=43,
        rows="A19",
    ),
    guarantee(
        "two outputs, weights for each", two_outputs(two_means), weights_for_each, num_rows=43
    ),
    guarantee("AUC, Precision, Recall, F1, IoU", binary, yes_or_no, num_rows=43, validate=True),
    guarantee("MeanIoU and top 2", mean_iou, num_rows=43, validate=True),
    guarantee("RMSE and R2", regression, common.numbers, num_rows=43, validate=True),
    guarantee("logs of an epoch", resting, num_rows=43, validate=True, rows="A9"),
]
