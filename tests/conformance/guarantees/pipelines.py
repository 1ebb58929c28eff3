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


def classify():
    """Arguments of `compile` for a model of classes."""
    return {"loss": common.entropy(), "metrics": ["accuracy"]}


def in_stages(create, maker=common.sgd, compiled=classify, **settings):
    """Returns a function of `wrap` that makes a compiled model of what `create` returns."""

    def make(wrap):
        model, optimizer = create(), wrap(maker())
        if hasattr(tf.distribute.get_strategy().extended, "receive_sent"):
            model = tfmulti.pipeline(model, **settings)
            optimizer = tfmulti.DistributedOptimizer(optimizer, shard="parameters")
        model.compile(optimizer, jit_compile=False, **compiled())
        return model

    return make


def on_devices(create, maker=common.sgd, compiled=classify, **settings):
    """Returns a function of `wrap` that makes a model whose stages are on two logical CPUs."""

    def make(wrap):
        model = create()
        if isinstance(tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy):
            model = tfmulti.pipeline(model, devices=["CPU:0", "CPU:1"], **settings)
        optimizer = wrap(maker())
        model.compile(optimizer, jit_compile=False, **compiled())
        return model

    return make


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


def two_inputs():
    """Inputs of unlike widths, of which the second enters late, and outputs of two stages."""
    given, late = keras.Input((5,), name="given"), keras.Input((2,), name="late")
    early = layers.Dense(4, "tanh")(given)
    joined = layers.Concatenate()([layers.Dense(3, "tanh")(early), late])
    outputs = {"a": layers.Dense(1, name="a")(early), "b": layers.Dense(1, name="b")(joined)}
    return keras.Model({"given": given, "late": late}, outputs)


def predict_two():
    """Arguments of `compile` for a model of two numbers."""
    losses, metrics = {"a": "mse", "b": "mae"}, {"a": ["mae"], "b": ["mse"]}
    return {"loss": losses, "loss_weights": {"a": 0.7, "b": 0.2}, "metrics": metrics}


def pairs(num_rows):
    """Returns two inputs, and a number for each output."""
    x = {"given": common.features(num_rows), "late": common.features(num_rows, 2, salt=8)}
    y = common.features(num_rows, 1, salt=3)
    return x, {"a": y, "b": 0.3 - y}


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
            f"{where}, two inputs and two outputs",
            cut(two_inputs, compiled=predict_two, micro_batches=3),
            data=pairs,
            num_rows=43,
            validate=True,
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
