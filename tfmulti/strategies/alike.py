"""Finds what differs between workers: how their models were made, and what data they were given.

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
from tfmulti.step import model_contents
from tfmulti.strategies import feeds

_numbers = itertools.count()
# What may differ: the seeds of layers, which are drawn; and names, in which Keras counts.
_LEFT_OUT = ("seed", "name", "shared_object_id")
_COUNTER = re.compile(r"_\d+(?=[\"/])")
# Of arrays so many numbers are compared, of a row only the first ones, to this part of the largest.
_MOST_NUMBERS, _FIRST_NUMBERS, _CLOSE = 256, 16, 1e-3
_DATA = ("x", "y", "sample_weight", "validation_data")
ADVICE = (
    "Look for code that depends on the worker: a setting, a file, an `if` for the chief, the order "
    "of a Python set."
)
"""What to do about a difference between workers."""


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
            f"{', '.join(differing[:3])}. {ADVICE}"
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
