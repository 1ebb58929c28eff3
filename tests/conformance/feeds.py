"""How rows come to `fit`: through tfmulti's pipeline, as arrays, as batches of many kinds."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

SEED = 3
VALIDATION_ROWS = 11


def load(promise, place, num_rows=None):
    """Returns the promise's rows; those of each batch in the place's order."""
    data = promise.data(num_rows or promise.num_rows)
    index = np.concatenate(
        [
            start + within(len(rows), place.order)
            for start, rows in _batches(np.arange(len(keras.tree.flatten(data)[0])), promise)
        ]
    )
    return tf.nest.map_structure(lambda rows: rows[index], data)


def within(num_rows: int, order: int) -> np.ndarray:
    """Returns an order of a batch's rows: their own, backwards, or every second one first."""
    rows = np.arange(num_rows)
    return (rows, rows[::-1], np.concatenate([rows[1::2], rows[::2]]))[order]


def _batches(rows, promise):
    return [
        (start, rows[start : start + promise.batch_size])
        for start in range(0, len(rows), promise.batch_size)
    ]


def batches(promise, place) -> list[tuple]:
    """Returns the rows in global batches."""
    data = load(promise, place)
    return [
        tf.nest.map_structure(lambda rows, i=i: rows[i : i + promise.batch_size], data)
        for i in range(0, promise.num_rows, promise.batch_size)
    ]


def fit_arguments(promise, place) -> dict:
    """Returns what to give to `fit`: the data, and the validation data where it validates."""
    feed = promise.feed
    if place.stock and feed in ("pipeline", "stream"):
        feed = "arrays" if promise.convert is None else "dataset"
    arguments = _FEEDS[feed](promise, place)
    if promise.validate:
        arguments["validation_data"] = evaluation_rows(promise, place)
        if not isinstance(arguments["validation_data"], tf.data.Dataset):
            arguments["validation_batch_size"] = promise.batch_size
    return arguments


def evaluation_rows(promise, place):
    """Returns rows to evaluate: arrays without a strategy of tfmulti, else a dataset."""
    data = promise.data(VALIDATION_ROWS)
    if place.stock or place.strategy is None:
        return data
    import tfmulti

    return tfmulti.distribute_eval(data, _strategy_of(place), promise.batch_size)


def _strategy_of(place):
    if place.strategy is not None:
        return place.strategy
    import tfmulti

    return tfmulti.create_strategy("one_device", devices=["CPU:0"])


def _pipeline(promise, place, stream=False, **settings):
    import tfmulti

    data = promise.data(promise.num_rows)
    if stream:
        data = tf.data.Dataset.from_tensor_slices(data)
    # On one device no row is needed for filling, so that filling is tried against none.
    pads = place.strategy is None and promise.remainder == "pad"
    train = tfmulti.distribute_train(
        data,
        _strategy_of(place),
        promise.batch_size,
        seed=SEED,
        remainder="uneven" if pads else promise.remainder,
        **settings,
    )
    if promise.convert is not None:
        train = train.map(promise.convert)
    if place.order:
        train = train.map(lambda *batch: tf.nest.map_structure(_reorder(place.order), batch))
    return {"x": train}


def _reorder(order):
    def gather(rows):
        count = tf.range(tf.shape(rows)[0])
        backwards, halves = count[::-1], tf.concat([count[1::2], count[::2]], 0)
        return tf.gather(rows, backwards if order == 1 else halves)

    return gather


def _arrays(promise, place):
    data = load(promise, place)
    names = ("x", "y", "sample_weight")
    return {**dict(zip(names, data)), "batch_size": promise.batch_size, "shuffle": False}


def _dataset(promise, place):
    dataset = tf.data.Dataset.from_tensor_slices(load(promise, place)).batch(promise.batch_size)
    if promise.convert is not None:
        dataset = dataset.map(promise.convert)
    return {"x": dataset}


def _endless(promise, place):
    return {"x": _dataset(promise, place)["x"].repeat(), "steps_per_epoch": 2}


def _generator(promise, place):
    return {
        "x": (batch for batch in batches(promise, place) * promise.epochs),
        "steps_per_epoch": -(-promise.num_rows // promise.batch_size),
    }


class _Batches(keras.utils.PyDataset):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def _py_dataset(promise, place):
    return {"x": _Batches(batches(promise, place)), "shuffle": False}


_FEEDS = {
    "pipeline": _pipeline,
    "stream": lambda promise, place: _pipeline(promise, place, stream=True),
    "steps": lambda promise, place: _pipeline(promise, place, steps_per_epoch=2),
    "arrays": _arrays,
    "dataset": _dataset,
    "endless": _endless,
    "generator": _generator,
    "py_dataset": _py_dataset,
}
