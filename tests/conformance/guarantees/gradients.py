"""Clipping, accumulation, averages, loss scaling: what comes after the gradient."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from conformance.guarantee import Guarantee
from conformance.guarantees import common

SGD = keras.optimizers.SGD
# Each replica rounds its part of a gradient to this precision before the parts are added.
FLOAT16 = {"policy": "mixed_float16", "tolerance": 2.0**-11}
BFLOAT16 = {"policy": "mixed_bfloat16", "tolerance": 2.0**-8}


def with_sgd(**settings):
    return common.classifier(lambda: SGD(0.1, **settings))


def guarantee(name, create, data=common.plain, **settings):
    return Guarantee(name, create, data=data, **{"num_rows": 43, **settings})


def overflowing(num_rows):
    """The last row of the first batch overflows in half precision, for one replica only."""
    x, y = common.numbers(num_rows)
    x[15, 0] = 3000.0
    return x, y


def linear(optimizer):
    def create(wrap):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.Dense(1)])
        model.compile(wrap(optimizer()), keras.losses.Huber())
        return model

    return create


def loss_scale():
    return keras.optimizers.LossScaleOptimizer(SGD(0.01), initial_scale=2.0**15)


def sent_as(compression):
    """Rounds what replicas send, and their sum."""

    def create(wrap):
        def compress(optimizer):
            return wrap(optimizer, compression=compression)

        return common.classifier(lambda: SGD(0.1, global_clipnorm=0.5))(compress)

    return create


def schedule():
    return SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))


def accumulate_and_clip():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5)


class CustomOptimizer(keras.optimizers.Optimizer):
    """A user's own, with a slot for each variable."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.slots = self.add_optimizer_variables(variables, ["slot"])[0]

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slots[self._get_variable_index(variable)]
        self.assign(slot, 0.5 * slot + 0.5 * gradient)
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * keras.ops.tanh(slot))


def halve(epoch, rate):
    return rate * 0.5


GUARANTEES = [
    guarantee("clipnorm", with_sgd(clipnorm=0.1), rows="A2"),
    guarantee("global_clipnorm", with_sgd(global_clipnorm=0.2), rows="A2", stock_workers=True),
    guarantee("clipvalue", with_sgd(clipvalue=0.02), rows="A2"),
    guarantee(
        "global_clipnorm, even batches", with_sgd(global_clipnorm=0.2), num_rows=32, rows="A2"
    ),
    guarantee("gradient_accumulation_steps", with_sgd(gradient_accumulation_steps=2), rows="B4"),
    guarantee("accumulation and clipping, Adam", common.classifier(accumulate_and_clip), rows="B4"),
    guarantee("moving average of weights", with_sgd(use_ema=True, ema_momentum=0.8)),
    guarantee(
        "ema_overwrite_frequency",
        with_sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
        rows="B4",
    ),
    guarantee("weight decay", with_sgd(weight_decay=0.05)),
    guarantee("learning rate schedule", common.classifier(schedule)),
    guarantee(
        "LearningRateScheduler",
        with_sgd(),
        fit={"callbacks": [keras.callbacks.LearningRateScheduler(halve)]},
    ),
    guarantee(
        "LossScaleOptimizer, no overflow",
        common.classifier(lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1))),
    ),
    guarantee(
        "one replica overflows",
        linear(loss_scale),
        overflowing,
        feed="arrays",
        **FLOAT16,
        rows="A3 B8",
        stock_workers=True,
    ),
    guarantee("mixed_float16, as compile() has it", with_sgd(), **FLOAT16, rows="A3"),
    guarantee(
        "one replica overflows, as compile() has it",
        linear(lambda: SGD(0.01)),
        overflowing,
        feed="arrays",
        **FLOAT16,
        rows="A3 B8",
    ),
    guarantee("mixed_bfloat16", with_sgd(), **BFLOAT16),
    guarantee("gradients sent as bfloat16", sent_as("bfloat16"), tolerance=2.0**-8),
    guarantee("gradients sent as float16", sent_as("float16"), tolerance=2.0**-11),
    guarantee(
        "gradients sent as bfloat16, loss scaled",
        sent_as("bfloat16"),
        policy="mixed_float16",
        tolerance=2.0**-8,
    ),
    guarantee("custom optimizer", common.classifier(lambda: CustomOptimizer(0.1))),
    guarantee(
        "own optimizer, clipped and averaged",
        common.classifier(lambda: CustomOptimizer(0.1, clipnorm=0.1, use_ema=True)),
        rows="A2",
    ),
]


def constrained(wrap):
    unit = keras.constraints.UnitNorm()
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh", kernel_constraint=unit)])
    model.add(layers.Dense(common.NUM_CLASSES))
    model.layers[1].bias.trainable = False
    model.compile(wrap(common.sgd()), common.entropy())
    return model


def rare(num_rows):
    x, y = common.plain(num_rows)
    return np.where(np.arange(num_rows)[:, None] % 7 == 0, 20 * x, x), y


GUARANTEES += [
    guarantee("constraint, and a frozen bias", constrained),
    guarantee("global_clipnorm, a few huge rows", with_sgd(global_clipnorm=0.2), rare, rows="A2"),
]
