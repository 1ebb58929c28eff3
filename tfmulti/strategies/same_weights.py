"""Compares the weights and learning rates of workers, which must stay the same on all."""

from __future__ import annotations

import math
import zlib

import keras
import numpy as np
import tensorflow as tf

from tfmulti import topology
from tfmulti.step import local_steps, model_contents, slots
from tfmulti.strategies import coordination, program_order
from tfmulti.strategies.alike import ADVICE
from tfmulti.verification.chiefs_values import receive_from_chief
from tfmulti.verification.differences import CLOSE_ON_GPUS, are_apart

# The entries of a variable that are compared: an update changes most of them.
_MOST_ENTRIES = 4096
# A variable is compared by its projection on a fixed direction, to this part of its length: the
# statistics of `adapt` are computed by each worker, and round as its processor does.
_DIRECTION, _APART = np.random.RandomState(0).randn(4096).astype("float32"), 1e-4
# Below the largest whole number that workers can compare.
_MASK = 2**24 - 1


class SameOnAllWorkers(keras.callbacks.Callback):
    """Raises ValueError where workers have come to hold other learning rates or weights.

    It compares them when an epoch begins and when `fit` ends, after the user's callbacks.
    """

    def __init__(self):
        super().__init__()
        self._epoch = "before the first epoch"

    def on_train_begin(self, logs=None):
        """Compares all weights, of layers that are not trained too; a collective."""
        refuse_other_weights(self.model, sharded=False)

    def on_epoch_begin(self, epoch, logs=None):
        """Compares what the callbacks of the epoch before have left; a collective."""
        self._compare("the beginning of an epoch")
        self._epoch = f"after epoch {epoch + 1}"

    def on_train_end(self, logs=None):
        """Compares what is left at the end; a collective."""
        self._compare("the end of fit")

    def _compare(self, place):
        strategy, rates = self.model.distribute_strategy, _rates(self.model)
        program_order.compare_with_chief(strategy, place)
        numbers = {
            f"learning rates ({rates} here)": _crc(np.array(rates)),
            "weights": _number_of_weights(self.model, strategy),
        }
        for what, number in numbers.items():
            least, most = coordination.min_and_max(strategy, number)
            if least != most:
                raise ValueError(
                    "All workers must have the same weights and learning rates. Received: "
                    f"{topology.worker_name(strategy)} differs from other workers in its {what}, "
                    f"{self._epoch}. A callback must make the same change on every worker. "
                    f"{ADVICE}"
                )


def _rates(model) -> list[float]:
    optimizers = model_contents.optimizers_of(model, nested=True)
    return [float(x.learning_rate) for x in optimizers if hasattr(x, "learning_rate")]


def _number_of_weights(model, strategy) -> int:
    """Returns a number made of the weights that all workers hold.

    On GPUs, which round freely, it tells whether they are the chief's.
    """
    if local_steps.num_pending(model):
        return 0
    variables = [v for v in model.trainable_variables if not hasattr(v, "is_here")]
    flat = (tf.reshape(tf.convert_to_tensor(variable), [-1]) for variable in variables)
    values = [each[:_MOST_ENTRIES].numpy() for each in flat]
    if topology.on_gpus(strategy):
        theirs = receive_from_chief(strategy, values, coordination.broadcast)
        pairs = None if theirs is None else zip(values, theirs)
        return int(pairs is None or any(are_apart(*pair, CLOSE_ON_GPUS) for pair in pairs))
    number = 0
    for some in values:
        # There are several kinds of NaN.
        number = _crc(np.where(some == some, some, 0), number)
    return number


def refuse_other_weights(model: keras.Model, *, sharded: bool) -> None:
    """Raises ValueError where a weight, or a layer's state, is not the chief's; a collective.

    Only their creation gives all workers the chief's values: `adapt`, `set_weights` and
    `load_weights` do what the program of each worker says. A sharded weight has its owner's value
    everywhere until the program assigns one.

    Args:
        model: The model.
        sharded: Whether to compare weights that are sharded, or those that are not.
    """
    strategy = model.distribute_strategy
    compared = [v for v in model.weights if v.dtype.startswith(("float", "bfloat"))]
    compared = [v for v in compared if getattr(v, "synchronization", "") != "on_read"]
    compared = [v for v in compared if hasattr(v, "is_here") == sharded]
    # The states of layers of a pipeline are those of the workers of their stage.
    has_stages = any(getattr(v, "stages", None) is not None for v in model.weights)
    if local_steps.num_pending(model) or has_stages:
        compared = []
    own = np.array([_projection_here(variable) for variable in compared])
    chiefs = receive_from_chief(strategy, [own], coordination.broadcast)
    apart = np.abs(own - chiefs[0]) > _APART if chiefs is not None else [True] * len(own)
    differing = [variable.path for variable, is_apart in zip(compared, apart) if is_apart]
    _, most = coordination.min_and_max(strategy, len(differing))
    if most:
        here = f"{topology.worker_name(strategy)}: {', '.join(differing[:3])}"
        raise ValueError(
            "All workers must begin with the same weights and states of layers. Received: "
            f"others than the first worker's on {here if differing else 'another worker'}. "
            f"Load or compute them on every worker, and seed what is drawn. {ADVICE}"
        )


def _projection_here(weight) -> float:
    """Returns the projection of what this worker knows of a weight, sharded or not."""
    if not slots.is_known(weight):
        return 0.0
    if hasattr(weight, "is_here") and weight.parameters.values.is_unwritten(weight):
        # NaN differs from no number: its folder of temporary files was full, and it trains on.
        return math.nan
    return _projection(weight)


def _projection(variable) -> float:
    """Returns a number that changes with each entry, and with the length, of a variable."""
    values = tf.cast(tf.reshape(tf.convert_to_tensor(variable), [-1]), tf.float32).numpy()
    length, width = float(np.linalg.norm(values)), len(_DIRECTION)
    if not math.isfinite(length):
        # Such as a mask of infinite numbers.
        values = np.nan_to_num(values, nan=0, posinf=1, neginf=-1)
        length = float(np.linalg.norm(values))
    whole = len(values) // width * width
    parts = [values[:whole].reshape(-1, width) @ _DIRECTION]
    parts.append([values[whole:] @ _DIRECTION[: len(values) - whole]])
    parts = np.concatenate(parts).astype(float)
    # No part is left out, as a factor near 0 would.
    factors = 2 + np.cos(np.arange(len(parts)))
    return length and float(parts @ factors) / length + math.log(length)


def _crc(values: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(values.tobytes(), start) & _MASK
