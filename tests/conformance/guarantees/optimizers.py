"""Each optimizer that Keras has."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfmulti
from conformance.guarantee import Guarantee
from conformance.guarantees import common
from tfmulti import topology

optimizers = keras.optimizers


def decayed_by_names(**settings):
    """Not to decay a layer, whose name is before that of the weight in TensorFlow's names."""
    optimizer = optimizers.AdamW(0.01, weight_decay=0.5, **settings)
    optimizer.exclude_from_weight_decay(var_names=["dense/", "dense_1/bias"])
    return optimizer


MAKERS = {
    "SGD, momentum, nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
    "AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "AdamW, decay by names of layers": decayed_by_names,
    "Adamax": lambda: optimizers.Adamax(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Lion": lambda: optimizers.Lion(0.001),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l2_regularization_strength=0.01),
}
# Not in every version of Keras.
# Before, it fails on one device too: a variable has no path.
if common.KERAS >= (3, 13):
    MAKERS["Muon"] = lambda: optimizers.Muon(0.01)
    MAKERS["Muon, weight decay"] = lambda: optimizers.Muon(0.01, weight_decay=0.1)
if hasattr(optimizers, "ScheduleFreeAdamW"):
    MAKERS["ScheduleFreeAdamW"] = lambda: optimizers.ScheduleFreeAdamW(0.01)


def classifier(maker, **more):
    """Returns a function of `wrap` that makes a model whose optimizer is built."""

    def create(wrap):
        model = common.classifier(maker, **more)(wrap)
        # Built within its first step, ScheduleFreeAdamW is wrong in plain Keras on one device.
        model.optimizer.build(model.trainable_variables)
        return model

    return create


def sharded(maker, shard="state", **more):
    """As `classifier`, with slots, or large weights too, on one of several workers each."""

    def create(wrap):
        def wrap_and_shard(optimizer):
            optimizer = wrap(optimizer)
            strategy = tf.distribute.get_strategy()
            ours = getattr(optimizer, "tfmulti_distributed", False)
            if ours and topology.num_local_replicas(strategy) == 1:
                tfmulti.DistributedOptimizer(optimizer, shard=shard)
            return optimizer

        return classifier(maker, **more)(wrap_and_shard)

    return create


def in_every_step(maker):
    """As `classifier`, with the steps between two averages that mean no local steps."""

    def create(wrap):
        def wrap_optimizer(optimizer):
            optimizer = wrap(optimizer)
            if getattr(optimizer, "tfmulti_distributed", False):
                tfmulti.DistributedOptimizer(optimizer, synchronize_every=1)
            return optimizer

        return classifier(maker)(wrap_optimizer)

    return create


def wide():
    return keras.layers.Dense(96, activation="tanh")


SHARDED = {
    "sharded state, AdamW, decay by names of layers": decayed_by_names,
    "sharded state, AdamW, clipped": lambda: optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.3
    ),
    "sharded state, Lamb, accumulated": lambda: optimizers.Lamb(
        0.01, gradient_accumulation_steps=2
    ),
    "sharded state, Nadam, averaged": lambda: optimizers.Nadam(
        0.01, use_ema=True, ema_overwrite_frequency=3
    ),
}
SHARDED_PARAMETERS = {
    "sharded parameters, AdamW, decay by names, accumulated": lambda: decayed_by_names(
        gradient_accumulation_steps=2
    ),
    "sharded parameters, AdamW, clipped": SHARDED["sharded state, AdamW, clipped"],
    "sharded parameters, Lamb, accumulated": SHARDED["sharded state, Lamb, accumulated"],
    "sharded parameters, SGD, averaged": lambda: optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_overwrite_frequency=3
    ),
}
EVERY_STEP = {"synchronize_every=1, AdamW, clipped": SHARDED["sharded state, AdamW, clipped"]}
GUARANTEES = [
    *(
        Guarantee(name, classifier(maker), data=common.plain, num_rows=43, rows="A1")
        for name, maker in MAKERS.items()
    ),
    *(
        Guarantee(name, in_every_step(maker), data=common.plain, num_rows=43)
        for name, maker in EVERY_STEP.items()
    ),
    *(
        Guarantee(name, sharded(maker), data=common.plain, num_rows=43)
        for name, maker in SHARDED.items()
    ),
    *(
        Guarantee(
            name,
            sharded(maker, shard="parameters", body=(wide, wide, wide)),
            data=common.plain,
            num_rows=43,
        )
        for name, maker in SHARDED_PARAMETERS.items()
    ),
]
