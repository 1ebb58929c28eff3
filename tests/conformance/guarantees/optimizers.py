"""Each optimizer that Keras has."""

from __future__ import annotations

import keras

from conformance.guarantee import Guarantee
from conformance.guarantees import common

optimizers = keras.optimizers

MAKERS = {
    "SGD, momentum, nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
    "AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
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


def classifier(maker):
    """Returns a function of `wrap` that makes a model whose optimizer is built."""

    def create(wrap):
        model = common.classifier(maker)(wrap)
        # Built within its first step, ScheduleFreeAdamW is wrong in plain Keras on one device.
        model.optimizer.build(model.trainable_variables)
        return model

    return create


GUARANTEES = [
    Guarantee(name, classifier(maker), data=common.plain, num_rows=43, rows="A1")
    for name, maker in MAKERS.items()
]
