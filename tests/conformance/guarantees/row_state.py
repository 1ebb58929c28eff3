"""Layers whose state, or whose output, comes from all rows of a batch."""

from __future__ import annotations

import keras
from keras import layers, ops

from conformance.guarantee import TOLD, Guarantee
from conformance.guarantees import common
from conformance.guarantees.layers import alike, no_bias


def guarantee(name, body, data=common.plain, shape=(5,), **settings):
    create = common.classifier(body=body, shape=shape)
    return Guarantee(name, create, data=data, **{"num_rows": 43, **settings})


class RunningMean(layers.Layer):
    """Subtracts a moving average, and then adds its rows' mean to it."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        centred = x - self.mean
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return centred


class RunningMeanFirst(layers.Layer):
    """Adds its rows' mean to a moving average, and subtracts that: each replica another one."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - self.mean


class Centred(layers.Layer):
    """Subtracts the mean over the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Counted(layers.Layer):
    """Counts rows and adds them up, and divides by their mean size."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.total = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(ops.cast(ops.shape(x)[0], "float32"))
            self.total.assign_add(ops.sum(ops.mean(ops.abs(x), axis=-1)))
        return x * self.count / self.total


class Codebook(layers.Layer):
    """A vector quantizer whose codes follow moving averages of rows: VQ-VAE."""

    num_codes = 4

    def build(self, shape):
        def make(shape, start):
            return self.add_weight(shape=shape, initializer=start, trainable=False)

        start = keras.initializers.RandomNormal(seed=7)
        self.codes = make((self.num_codes, shape[-1]), start)
        self.counts = make((self.num_codes,), "ones")
        self.sums = make((self.num_codes, shape[-1]), start)

    def call(self, x, training=False):
        far = ops.sum(ops.square(x[:, None] - self.codes[None]), axis=-1)
        chosen = ops.one_hot(ops.argmin(far, axis=-1), self.num_codes)
        quantized = ops.matmul(chosen, self.codes)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(ops.transpose(chosen), x))
            self.codes.assign(self.sums / (self.counts[:, None] + 0.1))
        return x + ops.stop_gradient(quantized - x)


class Queue(layers.Layer):
    """Keeps the last rows, as NNCLR's, and adds their mean."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(8, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        output = x + ops.mean(self.rows, axis=0)
        if training:
            self.rows.assign(ops.concatenate([x, self.rows], axis=0)[:8])
        return output


def synchronized():
    return layers.BatchNormalization(synchronized=True)


def masked_synchronized():
    """Batch normalization of tokens, which leaves out those under the mask."""
    return (lambda: layers.Embedding(9, 5, mask_zero=True), synchronized, lambda: layers.LSTM(4))


class Grouped(layers.Layer):
    """Ghost batch normalization: its number of rows must be a multiple of eight."""

    def call(self, x):
        groups = ops.reshape(x, [-1, 8, x.shape[-1]])
        groups -= ops.mean(groups, axis=1, keepdims=True)
        return ops.reshape(groups, [-1, x.shape[-1]])


def renormalized():
    return layers.BatchNormalization(renorm=True)


def float8(wrap):
    """A layer that keeps the largest numbers of its steps, to scale by them."""
    body = [layers.Dense(6), layers.Activation("tanh"), layers.Dense(common.NUM_CLASSES)]
    model = keras.Sequential([keras.Input((5,)), *body])
    model.layers[0].quantize("float8")
    model.compile(wrap(common.sgd()), common.entropy())
    return model


GUARANTEES = [
    guarantee("synchronized under a mask", masked_synchronized(), common.tokens, (6,)),
    guarantee("own running mean", (common.hidden, RunningMean)),
    guarantee("own running mean, empty replica batches", (common.hidden, RunningMean), num_rows=33),
    guarantee("own running mean, used at once", (common.hidden, RunningMeanFirst), must=TOLD),
    *(
        [guarantee("renormalized, each its own", (no_bias, renormalized), judge=alike)]
        if common.KERAS >= (3, 14)
        else []
    ),
    guarantee("centres over the batch", (common.hidden, Centred), must=TOLD),
    guarantee(
        "normalizes groups of eight rows",
        (Grouped,),
        num_rows=32,
        ordered=True,
        on_difference="replicate",
    ),
    guarantee("counts its rows", (common.hidden, Counted), must=TOLD),
    guarantee("codebook of a vector quantizer", (common.hidden, Codebook), must=TOLD),
    guarantee("a queue of rows", (common.hidden, Queue), must=TOLD, ordered=True),
    Guarantee("float8, the largest numbers", float8, data=common.plain, num_rows=43, must=TOLD),
]
