"""Finds what differs between workers: how their models were made, and what callbacks did to them.

Workers whose variables have the same shapes train together, whatever activations, losses and
learning rates they have: each applies the same gradients in its own way, and the result is that of
no device.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import zlib

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import local_steps, model_contents
from tfmulti.strategies import coordination

_numbers = itertools.count()
# What may differ: the seeds of layers, which are drawn; and names, in which Keras counts.
_LEFT_OUT = ("seed", "name", "shared_object_id")
_COUNTER = re.compile(r"_\d+(?=[\"/])")
# The entries of a variable that are compared: an update changes most of them.
_MOST_ENTRIES = 4096
# Below the largest whole number that workers can compare.
_MASK = 2**24 - 1
_ADVICE = (
    "Look for code that depends on the worker: a setting, a file, an `if` for the chief, the order "
    "of a Python set."
)


def compare_models(model: keras.Model) -> None:
    """Raises ValueError if another layer, loss or optimizer is on the chief; before `fit`.

    Every worker must call it.

    Args:
        model: The model.
    """
    strategy = model.distribute_strategy
    if not getattr(strategy, "checks_call_order", False):
        return
    here, key = _descriptions(model), f"tfmulti/model/{next(_numbers)}"
    if topology.is_chief(strategy):
        keras_compat.publish(key, json.dumps(here))
        return
    there = json.loads(keras_compat.read_published(key, *topology.cluster_of(strategy).tasks[0]))
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if differing:
        raise ValueError(
            "All workers must train the same model, with the same loss, metrics and optimizer. "
            f"Received: on {topology.worker_name(strategy)}, in place of what the first worker "
            f"has, another {', '.join(differing[:3])}. {_ADVICE}"
        )


def _descriptions(model) -> dict[str, int]:
    """Returns numbers that stand for the configurations of a model's parts."""
    layers = [each for each in keras_compat.all_layers(model) if each is not model]
    parts = {
        f"layer {i + 1} ({type(each).__name__})": each.get_config for i, each in enumerate(layers)
    }
    compiled = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
    for name in compiled:
        parts[name] = lambda name=name: model.get_compile_config()[name]
    found = {}
    for name, describe in parts.items():
        # A custom part may have no configuration.
        with contextlib.suppress(Exception):
            found[name] = _number_of(describe())
    return found


def _number_of(config) -> int:
    text = json.dumps(_comparable(config), sort_keys=True, default=lambda x: type(x).__name__)
    return zlib.crc32(_COUNTER.sub("", text).encode())


def _comparable(config):
    if isinstance(config, dict):
        return {str(k): _comparable(v) for k, v in config.items() if k not in _LEFT_OUT}
    if isinstance(config, (list, tuple)):
        return [_comparable(each) for each in config]
    return config.tolist() if isinstance(config, (np.ndarray, np.generic)) else config


class SameOnAllWorkers(keras.callbacks.Callback):
    """Raises ValueError where workers have come to hold other learning rates or weights.

    It compares them when an epoch begins and when `fit` ends, after the user's callbacks.
    """

    def __init__(self):
        super().__init__()
        self._epoch = "before the first epoch"

    def on_epoch_begin(self, epoch, logs=None):
        """Compares what the callbacks of the epoch before have left; a collective."""
        self._compare()
        self._epoch = f"after epoch {epoch + 1}"

    def on_train_end(self, logs=None):
        """Compares what is left at the end; a collective."""
        self._compare()

    def _compare(self):
        strategy, rates = self.model.distribute_strategy, _rates(self.model)
        numbers = {
            f"learning rates, {rates} here": _crc(np.array(rates)),
            "weights": _number_of_weights(self.model),
        }
        for what, number in numbers.items():
            least, most = coordination.min_and_max(strategy, number)
            if least != most:
                raise ValueError(
                    "All workers must have the same weights and learning rates. Received: on "
                    f"{topology.worker_name(strategy)} and other workers different {what}, "
                    f"{self._epoch}. A callback must change the same on every worker. {_ADVICE}"
                )


def _rates(model) -> list[float]:
    optimizers = model_contents.optimizers_of(model, nested=True)
    return [float(x.learning_rate) for x in optimizers if hasattr(x, "learning_rate")]


def _number_of_weights(model) -> int:
    """Returns a number made of the weights, where all workers hold all of them."""
    variables = model.trainable_variables
    if local_steps.steps_of(model) > 1 or any(hasattr(v, "is_here") for v in variables):
        return 0
    number = 0
    for variable in variables:
        some = tf.reshape(tf.convert_to_tensor(variable), [-1])[:_MOST_ENTRIES].numpy()
        # There are several kinds of NaN.
        number = _crc(np.where(some == some, some, 0), number)
    return number


def _crc(values: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(values.tobytes(), start) & _MASK
