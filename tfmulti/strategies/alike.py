"""Finds what differs between workers: how their models were made, and what callbacks did to them.

Workers whose variables have the same shapes train together, whatever activations, losses and
learning rates they have: each applies the same gradients in its own way, and the result is that of
no device.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
import marshal
import math
import random
import re
import secrets
import types
import zlib
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, marks, topology
from tfmulti.step import local_steps, model_contents
from tfmulti.strategies import coordination, feeds, program_order
from tfmulti.verification.chiefs_values import receive_from_chief
from tfmulti.verification.differences import CLOSE_ON_GPUS, are_apart

_numbers = itertools.count()
# What may differ: the seeds of layers, which are drawn; and names, in which Keras counts.
_LEFT_OUT = ("seed", "name", "shared_object_id")
_COUNTER = re.compile(r"_\d+(?=[\"/])")
# The entries of a variable that are compared: an update changes most of them.
_MOST_ENTRIES = 4096
# A variable is compared by its projection on a fixed direction, to this part of its length: the
# statistics of `adapt` are computed by each worker, and round as its processor does.
_DIRECTION, _APART = np.random.RandomState(0).randn(4096).astype("float32"), 1e-4
# Of arrays so many numbers are compared, of a row only the first ones, to this part of the largest.
_MOST_NUMBERS, _FIRST_NUMBERS, _CLOSE = 256, 16, 1e-3
_DATA = ("x", "y", "sample_weight", "validation_data")
# Below the largest whole number that workers can compare.
_MASK = 2**24 - 1
_ADVICE = (
    "Look for code that depends on the worker: a setting, a file, an `if` for the chief, the order "
    "of a Python set."
)


def compare(model: keras.Model, name: str, given: Mapping[str, object]) -> None:
    """Raises ValueError if another model or other data are on the chief; before a call.

    The chief also chooses the seed by which all of them shuffle arrays.

    Every worker must call it.

    Args:
        model: The model; `fit` compares its layers, loss and optimizer.
        name: `"fit"`, `"evaluate"` or `"predict"`.
        given: The arguments by name; of its data arrays are compared, and what datasets were made
            of.
    """
    strategy = model.distribute_strategy
    # Of the validation within `fit`, which gives the same data in each epoch, `fit` has compared.
    is_again = given.get("_use_cached_eval_dataset", False)
    if is_again or not getattr(strategy, "checks_call_order", False):
        return
    for each in _DATA:
        feeds.refuse_unlike_order(given.get(each))
    own = _descriptions(model) if name == "fit" else {}
    here = [own, describe_arguments(given), _state_of_order(name, given), secrets.randbits(31)]
    key = f"tfmulti/model/{next(_numbers)}"
    if topology.is_chief(strategy):
        keras_compat.publish(key, json.dumps(here))
        marks.ORDER_SEED.set(model, here[3])
        return
    there = json.loads(keras_compat.read_published(key, *topology.cluster_of(strategy).tasks[0]))
    marks.ORDER_SEED.set(model, there[3])
    _refuse_other_models(strategy, here[0], there[0])
    for each in _DATA:
        mine, other = here[1].get(each, []), there[1].get(each, [])
        if not are_same_data(mine, other):
            is_dataset = feeds.is_plain_dataset(given.get(each))
            error = _dataset_error if is_dataset else _arrays_error
            raise error(each, topology.worker_name(strategy), mine, other)
    if here[2] != there[2]:
        raise ValueError(
            "Every worker must read the batches of a `PyDataset` in the same order; it takes its "
            "share of each. Received: Python's random numbers, by which Keras shuffles them, are "
            f"in another state on {topology.worker_name(strategy)} than on the first worker. Call "
            "keras.utils.set_random_seed with one number on every worker, or give shuffle=False."
        )


def _state_of_order(name, given) -> int:
    """Returns a number that stands for the order in which `fit` shuffles batches; 0 for none."""
    data, shuffles = given.get("x"), name == "fit" and given.get("shuffle", True)
    # Keras shuffles no endless ones.
    if shuffles and isinstance(data, keras.utils.PyDataset) and data.num_batches is not None:
        return zlib.crc32(repr(random.getstate()).encode())
    return 0


def _arrays_error(name, worker, mine, other) -> ValueError:
    return ValueError(
        "Every worker must be given the whole data, the same on all of them; it takes its "
        f"share of each batch. Received: in `{name}` the arrays on {worker} differ in shape or "
        f"values from those on the first worker: {_shapes(mine)} here, {_shapes(other)} there. "
        "Load all rows on every worker, in the same order, seed random data, and sort what comes "
        "from a Python set or a folder, such as the names of classes or files; "
        "tfmulti.distribute_train reads only the rows that it needs."
    )


def _dataset_error(name, worker, mine, other) -> ValueError:
    return ValueError(
        "Every worker must be given the same dataset of all rows; it takes its share of each "
        f"batch. Received: in `{name}` the dataset on {worker} is made of other arrays, files, "
        "seeds, counts or shards than that on the first worker. Make it alike on every worker: "
        "without .shard(), with one seed, and with names of files and classes that are sorted. If "
        "workers are to have rows of their own, give it the option "
        "experimental_distribute.auto_shard_policy = OFF."
    )


def _shapes(parts) -> str:
    return ", ".join(str(tuple(shape)) for shape, *_ in parts) or "no arrays"


def describe_arguments(given: Mapping[str, object]) -> dict[str, list]:
    """Returns what `describe_data` does for each argument of `fit` that has data.

    Args:
        given: All arguments by name.
    """
    return {name: describe_data(given[name]) for name in _DATA if given.get(name) is not None}


def describe_data(data) -> list:
    """Returns of each array its shape, a digest and some numbers, as JSON; [] for other data.

    Args:
        data: Arrays, a dataset, or anything else.
    """
    leaves = tf.nest.flatten(_arrays_of(data), expand_composites=False)
    leaves = [leaf for leaf in leaves if leaf is not None]
    if not all(hasattr(leaf, "__array__") and len(getattr(leaf, "shape", ())) for leaf in leaves):
        return []
    return [[list(map(int, leaf.shape)), *_some_values(leaf)] for leaf in leaves]


def _arrays_of(data):
    """Returns the arrays of data, or what a dataset was made of; other data as they are."""
    dataset = getattr(data, "stream", data)
    if dataset is None:
        return data.arrays
    if not isinstance(dataset, tf.data.Dataset):
        return data
    if dataset is data and not feeds.is_shared_by_rows(data):
        return []
    # The same files may be in another folder on each host.
    return [
        tf.strings.regex_replace(each, ".*/", "") if each.dtype == tf.string else each
        for each in keras_compat.source_tensors(dataset)
    ]


def _some_values(array) -> tuple[int, list[float]]:
    """Returns a number that stands for some values, or 0 and them where they are not exact."""
    number, width = int(array.shape[0]), math.prod(map(int, array.shape[1:]))
    # Labels have one number a row: more rows of them.
    most = _MOST_NUMBERS // max(1, min(width, _FIRST_NUMBERS))
    rows = np.unique(np.linspace(0, number - 1, min(number, most)).astype(int))
    if isinstance(array, (tf.Tensor, tf.Variable)):
        taken = tf.gather(array, rows)
    else:
        # Of a table of pandas, brackets take columns.
        taken = getattr(array, "iloc", array)[rows]
    values = np.asarray(taken).reshape(len(rows), width)[:, :_FIRST_NUMBERS].reshape(-1)
    if values.dtype.kind == "f":
        return 0, values.astype(float).tolist()
    return zlib.crc32(repr(values.tolist()).encode()), []


def are_same_data(one: list, other: list) -> bool:
    """Whether two workers have the same data; another processor may compute other last digits.

    Args:
        one: What `describe_data` returned.
        other: The same on another worker.
    """
    if [exact for *exact, _ in one] != [exact for *exact, _ in other]:
        return False
    return all(_are_close(np.array(a), np.array(b)) for (*_, a), (*_, b) in zip(one, other))


def _are_close(one: np.ndarray, other: np.ndarray) -> bool:
    # Infinity would make all numbers close, and NaN none.
    largest = np.max(np.abs(other[np.isfinite(other)]), initial=0)
    if one.shape != other.shape:
        return False
    return np.allclose(one, other, rtol=_CLOSE, atol=_CLOSE * largest, equal_nan=True)


def _refuse_other_models(strategy, here, there):
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if differing:
        raise ValueError(
            "All workers must train the same model, with the same loss, metrics and optimizer. "
            f"Received: {topology.worker_name(strategy)} differs from the first worker in "
            f"{', '.join(differing[:3])}. {_ADVICE}"
        )


def _descriptions(model) -> dict[str, int]:
    """Returns numbers that stand for the configurations of a model's parts."""
    layers = [each for each in keras_compat.all_layers(model) if each is not model]
    parts = {
        f"layer {i + 1} ({type(each).__name__})": functools.partial(_configuration, each)
        for i, each in enumerate(layers)
    }
    compiled = ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")
    for name in compiled:
        parts[name] = lambda name=name: model.get_compile_config()[name]
    parts["settings of DistributedOptimizer"] = lambda: _settings_of_optimizers(model)
    found = {}
    for name, describe in parts.items():
        # A custom part may have no configuration.
        with contextlib.suppress(Exception):
            found[name] = _number_of(describe())
    return found


def _configuration(layer) -> list:
    """Returns a layer's configuration, and the words that `adapt` or `set_vocabulary` gave it."""
    has_words = hasattr(layer, "get_vocabulary")
    return [layer.get_config(), layer.get_vocabulary() if has_words else None]


def _settings_of_optimizers(model) -> list:
    optimizers = model_contents.optimizers_of(model, nested=True)
    shards = [marks.SHARDS.get(each) for each in optimizers]
    sharded = [each.shards_parameters if each is not None else None for each in shards]
    settings = (marks.COMPRESSION, marks.SYNCHRONIZE_EVERY)
    return [sharded, *([mark.get(each) for each in optimizers] for mark in settings)]


def _number_of(config) -> int:
    text = json.dumps(_comparable(config), sort_keys=True, default=lambda x: type(x).__name__)
    return zlib.crc32(_COUNTER.sub("", text).encode())


def _comparable(config):
    if isinstance(config, dict):
        code = _code_in(config)
        kept = {k: v for k, v in config.items() if k not in _LEFT_OUT}
        return {str(k): _comparable(v) for k, v in (kept | code).items()}
    if isinstance(config, (list, tuple)):
        return [_comparable(each) for each in config]
    return config.tolist() if isinstance(config, (np.ndarray, np.generic)) else config


def _code_in(config) -> dict:
    """Returns the code of a function in a configuration, without the file that it stands in."""
    if not isinstance(config.get("code"), str) or "closure" not in config:
        return {}
    return {"code": _parts_of(marshal.loads(base64.b64decode(config["code"])))}


def _parts_of(code) -> list | str:
    """Returns what a function does, of its code; of a constant its text."""
    if isinstance(code, frozenset):
        return sorted(map(repr, code))
    if not isinstance(code, types.CodeType):
        return repr(code)
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return [code.co_code.hex(), *map(list, names), [_parts_of(each) for each in code.co_consts]]


class SameOnAllWorkers(keras.callbacks.Callback):
    """Raises ValueError where workers have come to hold other learning rates or weights.

    It compares them when an epoch begins and when `fit` ends, after the user's callbacks.
    """

    def __init__(self):
        super().__init__()
        self._epoch = "before the first epoch"

    def on_train_begin(self, logs=None):
        """Compares all weights, of layers that are not trained too; a collective."""
        _refuse_other_weights(self.model, self.model.distribute_strategy)

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
                    f"{_ADVICE}"
                )


def _rates(model) -> list[float]:
    optimizers = model_contents.optimizers_of(model, nested=True)
    return [float(x.learning_rate) for x in optimizers if hasattr(x, "learning_rate")]


def _number_of_weights(model, strategy) -> int:
    """Returns a number made of the weights, where all workers hold all of them.

    On GPUs, which round freely, it tells whether they are the chief's.
    """
    variables = model.trainable_variables
    if local_steps.num_pending(model) or any(hasattr(v, "is_here") for v in variables):
        return 0
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


def _refuse_other_weights(model, strategy):
    """Raises ValueError where a weight, or a layer's state, is not the chief's.

    Only their creation gives all workers the chief's values: `adapt`, `set_weights` and
    `load_weights` do what the program of each worker says.
    """
    compared = [v for v in model.weights if v.dtype.startswith(("float", "bfloat"))]
    compared = [v for v in compared if getattr(v, "synchronization", "") != "on_read"]
    if local_steps.num_pending(model) or any(hasattr(v, "is_here") for v in model.weights):
        compared = []
    own = np.array([_projection(variable) for variable in compared])
    chiefs = receive_from_chief(strategy, [own], coordination.broadcast)
    apart = np.abs(own - chiefs[0]) > _APART if chiefs is not None else [True] * len(own)
    differing = [variable.path for variable, is_apart in zip(compared, apart) if is_apart]
    _, most = coordination.min_and_max(strategy, len(differing))
    if most:
        here = f"{topology.worker_name(strategy)}: {', '.join(differing[:3])}"
        raise ValueError(
            "All workers must begin with the same weights and states of layers. Received: "
            f"others than the first worker's on {here if differing else 'another worker'}. "
            f"Load or compute them on every worker, and seed what is drawn. {_ADVICE}"
        )


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
