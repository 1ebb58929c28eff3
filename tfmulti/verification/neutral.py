"""What differs by the user's choice, made alike for as long as a step is verified."""

from __future__ import annotations

import contextlib

import keras
from absl import logging

from tfmulti import keras_compat


@contextlib.contextmanager
def neutral_layers(model: keras.Model):
    """Has batch normalization that each replica does by itself synchronized meanwhile.

    It normalizes with the statistics of its own rows, which is another thing than on one device,
    and meant so. The rest of the model is then compared.
    """
    layers = [x for x in keras_compat.all_layers(model) if _is_local(x)]
    if layers:
        names = ", ".join(layer.name for layer in layers)
        logging.info("Verified as if it was synchronized: %s.", names)
    for layer in layers:
        layer.synchronized = True
    try:
        yield
    finally:
        for layer in layers:
            layer.synchronized = False


def _is_local(layer) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
