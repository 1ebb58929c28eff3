"""Losses that users write: numbers for a whole batch, sums, and what layers add."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from conformance import training
from conformance.guarantee import TOLD
from conformance.guarantees import common
from conformance.guarantees.common import guarantee
from conformance.guarantees.layers import no_bias, synchronized
from conformance.guarantees.losses import MeanPenalty, activity


class Total(keras.losses.Loss):
    """Keras's `Loss` whose `__call__` is the user's: a sum."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 0.01 * tf.reduce_sum(tf.square(y_true - y_pred))


def of_shape_one(y_true, y_pred):
    return tf.reshape(0.01 * tf.reduce_sum(tf.square(y_true - y_pred)), (1,))


def root_mean_square(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))


def mean_square(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def averaged(y_true, y_pred):
    losses = tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)
    return tf.nn.compute_average_loss(losses, global_batch_size=16)


def averaged_over_all(y_true, y_pred):
    return tf.nn.compute_average_loss(tf.reduce_mean(tf.square(y_true - y_pred), axis=-1))


def masked_loss(label, pred):
    """TensorFlow's tutorial of the transformer."""
    mask = label != 0
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    loss = loss_object(label, pred)
    mask = tf.cast(mask, dtype=loss.dtype)
    loss *= mask
    return tf.reduce_sum(loss) / tf.reduce_sum(mask)


def without_zeros(label, pred):
    mask = label != 0
    losses = keras.losses.sparse_categorical_crossentropy(
        tf.boolean_mask(label, mask), tf.boolean_mask(pred, mask), from_logits=True
    )
    return tf.reduce_mean(losses)


def tagger(loss):
    def create(wrap):
        body = [keras.Input((6,)), layers.Embedding(9, 5), layers.Dense(6, "tanh")]
        model = keras.Sequential([*body, layers.Dense(common.NUM_CLASSES)])
        model.compile(wrap(common.sgd()), loss)
        return model

    return create


def supervised_contrastive(labels, features):
    """Khosla et al.: the rows of the same class in the batch are the positives."""
    labels = tf.reshape(labels, (-1, 1))
    features = tf.math.l2_normalize(features, axis=1)
    logits = tf.matmul(features, features, transpose_b=True) / 0.5
    same = tf.cast(tf.equal(labels, tf.transpose(labels)), tf.float32)
    same /= tf.reduce_sum(same, axis=1, keepdims=True)
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=same, logits=logits))


def overlap(loss):
    """A segmentation: small images to masks."""

    def create(wrap):
        body = [layers.Conv2D(4, 3, padding="same", activation="tanh")]
        last = layers.Conv2D(1, 1, activation="sigmoid")
        model = keras.Sequential([keras.Input((6, 6, 2)), *body, last])
        model.compile(wrap(common.sgd()), loss())
        return model

    return create


def segmented(num_rows):
    x, _ = common.images(num_rows)
    return x, (x[..., :1] + 0.3 * x[..., 1:] > 0.2).astype("float32")


def circle():
    return keras.losses.Circle(gamma=2.0)


def unit():
    return layers.UnitNormalization()


def along_rows():
    """A layer of Keras's own that combines the rows of the batch."""
    return layers.Softmax(axis=0)


def one_number_a_row(wrap):
    """Keras's own divergence is a sum along the last axis, which is that of the rows here."""
    last = [layers.Dense(1, "sigmoid"), layers.Reshape(())]
    model = keras.Sequential([keras.Input((5,)), common.hidden(), *last])
    model.compile(wrap(common.sgd()), "kl_divergence")
    return model


def chances(num_rows):
    x, y = common.numbers(num_rows)
    return x, (1 / (1 + np.exp(-y))).ravel().astype("float32")


def weighted_numbers(num_rows):
    return (*common.numbers(num_rows), common.weights(num_rows))


def first_class(y_true, y_pred):
    """A mean, of labels that are classes."""
    return ops.mean(ops.square(ops.cast(ops.reshape(y_true, (-1, 1)), "float32") - y_pred))


def note(layer, values):
    """A helper that a user keeps in a file of its own."""
    layer.add_loss(0.01 * tf.reduce_sum(values))


class SumPenalty(layers.Layer):
    def call(self, x):
        note(self, tf.square(x))
        return x


class SubsetPenalty(layers.Layer):
    """Adds the mean over the rows for which something holds."""

    def call(self, x):
        mask = tf.cast(x[:, :1] > 0, x.dtype)
        total = tf.reduce_sum(mask * tf.square(x))
        self.add_loss(0.1 * total / (tf.reduce_sum(mask) + 1.0))
        return x


class InBatch(keras.Model):
    """Two towers: the other rows of the batch are the negatives, as in CLIP and retrieval."""

    def __init__(self):
        super().__init__()
        self.left = keras.Sequential([keras.Input((5,)), layers.Dense(4)])
        self.right = keras.Sequential([keras.Input((1,)), layers.Dense(4)])
        self.build((None, 5))

    def call(self, x, training=False):
        return self.left(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = ops.matmul(y_pred, ops.transpose(self.right(y)))
        labels = ops.arange(ops.shape(logits)[0])
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        )


def in_batch(wrap):
    model = InBatch()
    model.compile(wrap(keras.optimizers.SGD(0.05)))
    return model


def mean_loss(**settings):
    return common.regressor(loss=mean_square, **settings)


def evaluated(guarantee, place):
    """Evaluates only, with an optimizer that nobody has made distributed."""
    keras.utils.set_random_seed(1)
    with place.scope():
        model = guarantee.create(lambda optimizer: optimizer)
    return training.evaluate(model, guarantee, place)


def summed_tokens(wrap):
    embed = layers.Embedding(9, 5, mask_zero=True)
    body = [keras.Input((6,)), embed, layers.LSTM(4, return_sequences=True)]
    model = keras.Sequential([*body, layers.Dense(common.NUM_CLASSES)])
    model.compile(wrap(common.sgd()), common.entropy(reduction="sum"))
    return model


def row_losses(wrap):
    model = keras.Sequential([keras.Input((5,)), common.hidden(), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(wrap(optimizer), keras.losses.MeanSquaredError(reduction="none"))
    return model


PADDED = {"remainder": "pad"}
both = (no_bias, synchronized)

GUARANTEES = [
    guarantee("Loss with a sum in __call__", common.regressor(loss=Total()), must=TOLD),
    guarantee("a sum of shape (1,)", common.regressor(loss=of_shape_one), must=TOLD),
    guarantee("reduction none", row_losses, must=TOLD),
    guarantee("compute_average_loss in compile", common.regressor(loss=averaged)),
    guarantee("compute_average_loss of all, in compile", common.regressor(loss=averaged_over_all)),
    guarantee("masked_loss of the transformer", tagger(masked_loss), common.tagged),
    guarantee("loss by boolean_mask", tagger(without_zeros), common.tagged),
    guarantee(
        "softmax along the rows",
        common.classifier(body=(common.hidden, along_rows)),
        common.plain,
        must=TOLD,
    ),
    guarantee("divergence of one number a row", one_number_a_row, chances, must=TOLD),
    guarantee("Dice", overlap(keras.losses.Dice), segmented),
    guarantee("Tversky", overlap(keras.losses.Tversky), segmented),
    guarantee("Circle", common.classifier(body=(common.hidden, unit), loss=circle), common.plain),
    guarantee("root of a batch's mean square", common.regressor(loss=root_mean_square)),
    guarantee("one number, sample weights", mean_loss(), weighted_numbers),
    guarantee(
        "one number, class weights",
        common.regressor(loss=first_class),
        common.plain,
        feed="arrays",
        fit={"class_weight": {0: 0.5, 1: 1.0, 2: 2.0}},
    ),
    guarantee(
        "supervised contrastive loss",
        common.classifier(loss=lambda: supervised_contrastive),
        common.plain,
        must=TOLD,
    ),
    guarantee("negatives of the batch, compute_loss", in_batch, must=TOLD),
    guarantee(
        "add_loss of a sum, by a helper",
        common.classifier(body=(common.hidden, SumPenalty)),
        common.plain,
        must=TOLD,
    ),
    guarantee(
        "add_loss over some of the rows",
        common.classifier(body=(common.hidden, SubsetPenalty)),
        common.plain,
        must=TOLD,
    ),
    guarantee(
        "add_loss beside synchronized",
        common.classifier(body=(common.hidden, MeanPenalty, *both)),
        common.plain,
    ),
    guarantee(
        "activity regularizer beside synchronized",
        common.classifier(body=(activity, *both)),
        common.plain,
        **common.OF_ACTIVITY,
    ),
    guarantee("one number, padded", mean_loss(), **PADDED),
    guarantee("synchronized, padded", common.classifier(body=both), common.plain, **PADDED),
    guarantee(
        "add_loss of a mean, padded",
        common.classifier(body=(common.hidden, MeanPenalty)),
        common.plain,
        **PADDED,
    ),
    guarantee(
        "activity regularizer, padded",
        common.classifier(body=(activity,)),
        common.plain,
        **common.OF_ACTIVITY,
        **PADDED,
    ),
    guarantee("one number, evaluated only", mean_loss(), run=evaluated),
    guarantee("masks and a sum, evaluated only", summed_tokens, common.tagged, run=evaluated),
]
