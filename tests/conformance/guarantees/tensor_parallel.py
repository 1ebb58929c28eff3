"""Wide layers that are split: over MPI each worker has a part of each, elsewhere all of them."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, optimizers

import tfmulti
from conformance.guarantee import Guarantee
from conformance.guarantees import common


def in_parts(create, layout, maker=common.sgd):
    """Returns a function of `wrap` that makes a compiled model of what `create` returns."""

    def compiled(wrap):
        model, optimizer = create(), wrap(maker())
        if hasattr(tf.distribute.get_strategy().extended, "exchange_among"):
            model = tfmulti.tensor_parallel(model, layout)
            optimizer = tfmulti.DistributedOptimizer(optimizer, shard="parameters")
        model.compile(optimizer, common.entropy(), metrics=["accuracy"], jit_compile=False)
        return model

    return compiled


def dense():
    """Seven columns, which two workers cannot share evenly, and rows that take them."""
    wide = layers.Dense(7, "tanh", name="wide", kernel_regularizer="l2")
    hidden = [wide, layers.Dense(common.NUM_CLASSES, name="back")]
    return keras.Sequential([keras.Input((5,)), *hidden])


def attention():
    """Words under a mask, whose table, heads and wide layer are split."""
    given = keras.Input((6,))
    one = layers.Embedding(9, 6, mask_zero=True, name="table")(given)
    two = layers.Add()([one, layers.MultiHeadAttention(3, 4, name="attention")(one, one)])
    two = layers.Dense(6, name="back")(layers.Dense(7, "relu", name="wide")(two))
    last = layers.Dense(common.NUM_CLASSES)(layers.GlobalAveragePooling1D()(two))
    return keras.Model(given, last)


def clipped():
    """An optimizer for which the gradients of all parts count together."""
    return optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)


PAIR = {"wide/kernel": "column", "back/kernel": "row"}
HEADS = {"(query|key|value)/kernel": "column", "attention_output/kernel": "row"}

GUARANTEES = [
    Guarantee(
        "layers split by column and by row, a penalty",
        in_parts(dense, PAIR),
        data=common.weighted,
        num_rows=43,
        validate=True,
    ),
    Guarantee(
        "attention and a table, split",
        in_parts(attention, PAIR | HEADS | {"table": "vocabulary"}, clipped),
        data=common.tokens,
    ),
]
