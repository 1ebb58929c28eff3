"""Layers with state of their own, with randomness, and with sparse or sequential inputs."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfmulti
from conformance import training
from conformance.guarantee import Guarantee
from conformance.guarantees import common


def guarantee(name, body, data=common.plain, shape=(5,), **settings):
    create = common.classifier(body=body, shape=shape)
    return Guarantee(name, create, data=data, **settings)


def no_bias():
    return layers.Dense(6, use_bias=False)


def synchronized():
    return layers.BatchNormalization(synchronized=True)


def convolution():
    return layers.Conv2D(4, 3, activation="tanh", use_bias=False)


def embedding():
    return layers.Embedding(9, 5, mask_zero=True)


class Attention(layers.Layer):
    """A block of a transformer."""

    def __init__(self):
        super().__init__()
        self.normalize = layers.LayerNormalization()
        self.attend = layers.MultiHeadAttention(2, 3)

    def call(self, x):
        return x + self.attend(self.normalize(x), x)


def alike(runs):
    """Tells whether batch statistics are finite, have moved, and are one on all replicas."""
    for name in runs[0]:
        values = np.concatenate([run[name] for run in runs if name.startswith("weight/")] or [[]])
        assert np.isfinite(values).all(), "not finite"
        assert all(np.array_equal(value, values[0]) for value in values), "differ"
    return "same on all"


class Masks(layers.Layer):
    """Keeps the dropout mask of each step of this process's replicas."""

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=11)
        self.seen = {}

    def call(self, x, training=False):
        mask = self.dropout(tf.ones([40, 40]), training=training)
        context, shape = tf.distribute.get_replica_context(), x.shape
        if training and context is not None:
            replica = context.replica_id_in_sync_group

            def note(replica, mask):
                self.seen.setdefault(int(replica), []).append(mask > 0)
                return np.float32(0)

            x = x + tf.numpy_function(note, [replica, mask], tf.float32)
        return tf.ensure_shape(x, shape)


def train_twice(guarantee, place):
    """Returns the masks of two trainings that are the same in all."""
    arrays = {}
    for run in range(2):
        model = training.create(guarantee, place)
        # It draws the same for a row on every replica, and the layer would note that too.
        model.distribute_strategy.verify = "never"
        training.fit(model, guarantee, place)
        masks = next(layer for layer in model.layers if isinstance(layer, Masks))
        arrays |= {
            f"{run}/{replica}/{step}": mask
            for replica, steps in masks.seen.items()
            for step, mask in enumerate(steps)
        }
    return arrays


def independent(runs):
    """Tells whether masks differ from replica to replica and come again in the second run."""
    masks = {name: mask for run in runs for name, mask in run.items()}
    first = {name[2:]: mask for name, mask in masks.items() if name.startswith("0/")}
    assert first, "no masks"
    for name, mask in first.items():
        assert np.array_equal(mask, masks[f"1/{name}"]), "not reproducible"
    values = list(first.values())
    for index, mask in enumerate(values):
        for other in values[:index]:
            # 1,600 fair coins agree on 800, give or take 20.
            assert abs((mask == other).sum() - 800) < 120, "same on replicas"
    return "differ, repeatable"


def blocks():
    """Blocks whose statistics are those of all rows."""
    body = [no_bias(), synchronized(), layers.Activation("tanh")]
    return keras.Sequential([keras.Input((6,)), *body])


def checkpointed_blocks(wrap):
    model = keras.Sequential([keras.Input((5,)), no_bias(), blocks(), blocks(), layers.Dense(3)])
    return _checkpointed(model, wrap)


def checkpointed_parts(wrap):
    tokens = keras.Input((6,), dtype="int32")
    x = embedding()(tokens)
    for _ in range(3):
        x = layers.Dense(5, activation="tanh", activity_regularizer="l2")(x)
        x = layers.LayerNormalization()(x)
    x = layers.GlobalAveragePooling1D()(x)
    return _checkpointed(keras.Model(tokens, layers.Dense(3)(x)), wrap)


def _checkpointed(model, wrap):
    tfmulti.checkpoint_activations(model)
    model.compile(wrap(common.sgd()), common.entropy())
    return model


GUARANTEES = [
    guarantee("batch normalization, synchronized", (no_bias, synchronized), rows="A4 A5"),
    guarantee(
        "batch normalization, each its own",
        (no_bias, layers.BatchNormalization),
        judge=alike,
        rows="A4 A5",
    ),
    Guarantee("checkpointed blocks, synchronized", checkpointed_blocks, data=common.plain),
    Guarantee(
        "checkpointed parts, masked, add_loss",
        checkpointed_parts,
        data=common.tokens,
        **common.OF_ACTIVITY,
    ),
    guarantee("dropout", (Masks,), num_rows=32, run=train_twice, judge=independent, rows="A6"),
    guarantee("LayerNormalization", (common.hidden, layers.LayerNormalization)),
    guarantee(
        "GroupNormalization",
        (lambda: layers.Dense(6, "tanh"), lambda: layers.GroupNormalization(2)),
    ),
    guarantee(
        "UnitNormalization, SpectralNormalization",
        (lambda: layers.SpectralNormalization(layers.Dense(6)), layers.UnitNormalization),
    ),
    guarantee(
        "convolution, replica batches without a row",
        (convolution, layers.Flatten),
        common.images,
        (6, 6, 2),
        rows="A1",
    ),
    guarantee(
        "convolution, pooling, synchronized",
        (convolution, synchronized, lambda: layers.AveragePooling2D(2), layers.Flatten),
        common.images,
        (6, 6, 2),
        rows="A4 A5",
    ),
    guarantee(
        "depthwise and transposed convolution",
        (
            lambda: layers.DepthwiseConv2D(3, activation="tanh"),
            lambda: layers.Conv2DTranspose(2, 2),
            layers.GlobalAveragePooling2D,
        ),
        common.images,
        (6, 6, 2),
    ),
    guarantee(
        "Embedding",
        (lambda: layers.Embedding(9, 5), layers.Flatten),
        common.tokens,
        (6,),
        num_rows=43,
    ),
    guarantee(
        "LSTM", (lambda: layers.Embedding(9, 5), lambda: layers.LSTM(4)), common.tokens, (6,)
    ),
    guarantee("GRU with a mask", (embedding, lambda: layers.GRU(4)), common.tokens, (6,)),
    guarantee(
        "bidirectional, masked",
        (embedding, lambda: layers.Bidirectional(layers.SimpleRNN(4))),
        common.tokens,
        (6,),
    ),
    guarantee(
        "attention",
        (lambda: layers.Embedding(9, 6), Attention, layers.GlobalAveragePooling1D),
        common.tokens,
        (6,),
    ),
    Guarantee(
        "Embedding, Adam, clipped",
        common.classifier(
            lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
            (lambda: layers.Embedding(9, 5), layers.Flatten),
            (6,),
        ),
        data=common.tokens,
        num_rows=43,
        rows="A2",
    ),
]
