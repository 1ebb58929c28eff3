"""Batches of every size, and every way in which they come."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from conformance import feeds, training
from conformance.guarantee import Guarantee
from conformance.guarantees import common


class Totals(keras.Model):
    """Takes ragged or sparse rows."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(common.NUM_CLASSES)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor(shape=[None, 6])
        elif isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        return self.head(tf.ensure_shape(x, [None, 6]))


def totals(wrap):
    model = Totals()
    model.compile(wrap(common.sgd()), common.entropy())
    return model


def sparse_inputs(wrap):
    """Stock layers; a row of the kernel occurs once in its gradient on one device."""
    body = [keras.Input((6,), sparse=True), layers.Dense(5), layers.Dense(common.NUM_CLASSES)]
    model = keras.Sequential(body)
    model.compile(wrap(keras.optimizers.Adam(0.01)), common.entropy())
    return model


def lists(num_rows):
    rows, classes = common.tokens(num_rows)
    return rows.astype("float32"), classes


def to_ragged(x, y):
    return tf.RaggedTensor.from_tensor(x, padding=0.0), y


def to_sparse(x, y):
    return tf.sparse.from_dense(x), y


def single_batches(guarantee, place):
    """Trains, tests and predicts batch by batch."""
    model = training.create(guarantee, place)
    logs = []
    for _ in range(guarantee.epochs):
        for batch in feeds.batches(guarantee, place):
            logs.append(model.train_on_batch(*batch, return_dict=True)["loss"])
    tested = model.test_on_batch(*batch, return_dict=True)["loss"]
    return training.results(model, place, {"loss": logs, "tested": [tested]})


def two_inputs(wrap):
    left, right = keras.Input((5,), name="left"), keras.Input((2,), name="right")
    x = layers.concatenate([common.hidden()(left), layers.Dense(3)(right)])
    model = keras.Model({"left": left, "right": right}, layers.Dense(3)(x))
    model.compile(wrap(common.sgd()), common.entropy())
    return model


def pair(num_rows):
    x = {"left": common.features(num_rows), "right": common.features(num_rows, 2, salt=1)}
    return x, common.labels(num_rows)


class Unbuilt(keras.Model):
    """Learns its inputs from the first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.last = common.hidden(), layers.Dense(common.NUM_CLASSES)

    def call(self, x):
        return self.last(self.first(x))


def unbuilt(wrap):
    model = Unbuilt()
    model.compile(wrap(common.sgd()), common.entropy())
    return model


dense = common.classifier()


def guarantee(name, create=dense, data=common.plain, **settings):
    return Guarantee(name, create, data=data, **settings)


GUARANTEES = [
    guarantee("43 examples in batches of 16", num_rows=43, rows="A1", stock_workers=True),
    guarantee("33 examples in batches of 16", rows="A1", stock_workers=True, validate=True),
    guarantee("45 examples in batches of 15", num_rows=45, batch_size=15, rows="A1 B2"),
    guarantee("43 examples in one odd batch", num_rows=43, batch_size=43, rows="A1 B2"),
    guarantee("1 example alone", num_rows=1, rows="A1"),
    guarantee("32 examples, all batches even", num_rows=32, stock_workers=True),
    guarantee("padded with rows of weight 0", num_rows=43, remainder="pad", rows="A14 A15"),
    guarantee(
        "padded, with weights of its own",
        data=common.weighted,
        num_rows=43,
        remainder="pad",
        rows="A14 A15",
    ),
    guarantee("last batch dropped", num_rows=43, remainder="drop"),
    guarantee("arrays given to fit", feed="arrays", num_rows=43, rows="A1"),
    guarantee("tf.data batches given to fit", feed="dataset", num_rows=43, rows="A1"),
    guarantee("tf.data examples, distributed", feed="stream", num_rows=43, rows="A1"),
    guarantee("Python generator", feed="generator", num_rows=43, rows="A11"),
    guarantee("PyDataset", feed="py_dataset", num_rows=43),
    guarantee("endless dataset, steps per epoch", feed="endless", num_rows=43),
    guarantee("fewer steps an epoch than data", feed="steps", num_rows=43, epochs=3),
    guarantee("train_on_batch, test_on_batch", num_rows=43, run=single_batches),
    guarantee("workers with seeds of their own", num_rows=43, own_seeds=True, rows="A12"),
    guarantee("ragged rows", totals, lists, feed="dataset", convert=to_ragged, rows="B3"),
    guarantee("sparse rows", totals, lists, feed="dataset", convert=to_sparse, rows="B3"),
    guarantee(
        "sparse rows, Adam", sparse_inputs, lists, feed="dataset", convert=to_sparse, num_rows=43
    ),
    guarantee("ragged rows, distributed", totals, lists, convert=to_ragged, rows="B3"),
    guarantee("two inputs by name", two_inputs, pair),
    guarantee("subclassed model, not yet built", unbuilt, num_rows=43),
    guarantee(
        "class weights", num_rows=43, fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}, rows="A1"
    ),
    guarantee("sample weights", data=common.weighted, num_rows=43, rows="A1"),
]


def zero_weights(num_rows):
    """Weights of a user's own that are 0 for half of the rows."""
    x, y = common.plain(num_rows)
    return x, y, (np.arange(num_rows) % 2).astype("float32")


GUARANTEES.append(guarantee("weights of 0, the user's own", data=zero_weights, num_rows=43))
