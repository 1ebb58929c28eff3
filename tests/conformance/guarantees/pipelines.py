"""Models in stages: each worker over MPI, or two devices of one process, have them.

In the other columns of these rows the same model is whole.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, optimizers

import tfmulti
from conformance.guarantee import Guarantee
from conformance.guarantees import common


def in_stages(create, maker=common.sgd, **settings):
    """Returns a function of `wrap` that makes a compiled model of what `create` returns."""

    def compiled(wrap):
        model, optimizer = create(), wrap(maker())
        if hasattr(tf.distribute.get_strategy().extended, "receive_sent"):
            model = tfmulti.pipeline(model, **settings)
            optimizer = tfmulti.DistributedOptimizer(optimizer, shard="parameters")
        model.compile(optimizer, common.entropy(), metrics=["accuracy"], jit_compile=False)
        return model

    return compiled


def on_devices(create, maker=common.sgd, **settings):
    """Returns a function of `wrap` that makes a model whose stages are on two logical CPUs."""

    def compiled(wrap):
        model = create()
        if isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy):
            model = tfmulti.pipeline(model, devices=["CPU:0", "CPU:1"], **settings)
        optimizer = wrap(maker())
        model.compile(optimizer, common.entropy(), metrics=["accuracy"], jit_compile=False)
        return model

    return compiled


def skips():
    """A value that passes a stage, and a layer that both stages share."""
    given, shared = keras.Input((5,)), layers.Dense(5, "tanh")
    one = shared(given)
    two = layers.Add()([layers.Dense(5, "tanh")(one), given])
    return keras.Model(given, layers.Dense(common.NUM_CLASSES)(shared(two)))


def recurrent():
    """Masks that go from stage to stage."""
    hidden = [layers.Embedding(9, 6, mask_zero=True), layers.GRU(6, return_sequences=True)]
    last = [layers.GRU(6), layers.Dense(common.NUM_CLASSES)]
    return keras.Sequential([keras.Input((6,)), *hidden, *last])


def penalized():
    """Penalties on weights and on what layers give."""
    square = keras.regularizers.L2(0.01)
    hidden = [layers.Dense(6, "tanh", kernel_regularizer=square) for _ in range(3)]
    return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(common.NUM_CLASSES)])


def clipped():
    """An optimizer for which the gradients of all stages count together."""
    return optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.3)


def guarantees(where, cut):
    """Returns the guarantees of one way to cut a model into stages."""
    return [
        Guarantee(
            f"{where}, skip connections and a shared layer",
            cut(skips, micro_batches=3),
            data=common.plain,
            num_rows=43,
        ),
        Guarantee(
            f"{where}, recurrent under a mask",
            cut(recurrent, micro_batches=2, checkpoint_activations=True),
            data=common.tokens,
        ),
        Guarantee(
            f"{where}, clipped by the norm of all stages",
            cut(penalized, clipped, micro_batches=4),
            data=common.weighted,
            validate=True,
        ),
    ]


GUARANTEES = [
    *guarantees("a pipeline", in_stages),
    *guarantees("stages on two devices", on_devices),
]
