"""How rows come to `fit`: through tfmulti's pipeline, as arrays, as batches of many kinds."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

SEED = 3
VALIDATION_ROWS = 11


def load(guarantee, place, num_rows=None):
    """Returns the guarantee's rows; those of each batch in the place's order."""
    data = guarantee.data(num_rows or guarantee.num_rows)
    index = np.concatenate(
        [
            start + within(len(rows), place.order)
            for start, rows in _batches(np.arange(len(keras.tree.flatten(data)[0])), guarantee)
        ]
    )
    return tf.nest.map_structure(lambda rows: rows[index], data)


def within(num_rows: int, order: int) -> np.ndarray:
    """Returns an order of a batch's rows: their own, backwards, or every second one first."""
    rows = np.arange(num_rows)
    return (rows, rows[::-1], np.concatenate([rows[1::2], rows[::2]]))[order]


def _batches(rows, guarantee):
    return [
        (start, rows[start : start + guarantee.batch_size])
        for start in range(0, len(rows), guarantee.batch_size)
    ]


def batches(guarantee, place) -> list[tuple]:
    """Returns the rows in global batches."""
    data = load(guarantee, place)
    return [
        tf.nest.map_structure(lambda rows, i=i: rows[i : i + guarantee.batch_size], data)
        for i in range(0, guarantee.num_rows, guarantee.batch_size)
    ]


def fit_arguments(guarantee, place) -> dict:
    """Returns what to give to `fit`: the data, and the validation data where it validates."""
    feed = guarantee.feed
    if place.stock and feed in ("pipeline", "stream"):
        feed = "arrays" if guarantee.convert is None else "dataset"
    arguments = _FEEDS[feed](guarantee, place)
    if guarantee.validate:
        arguments["validation_data"] = evaluation_rows(guarantee, place)
        if not isinstance(arguments["validation_data"], tf.data.Dataset):
            arguments["validation_batch_size"] = guarantee.batch_size
    return arguments


def evaluation_rows(guarantee, place):
    """Returns rows to evaluate: arrays without a strategy of tfmulti, else a dataset."""
    data = guarantee.data(VALIDATION_ROWS)
    if place.stock or place.strategy is None:
        return data
    import tfmulti

    return tfmulti.distribute_eval(data, _strategy_of(place), guarantee.batch_size)


def _strategy_of(place):
    if place.strategy is not None:
        return place.strategy
    import tfmulti

    return tfmulti.create_strategy("one_device", devices=["CPU:0"])


def _pipeline(guarantee, place, stream=False, **settings):
    import tfmulti

    data = guarantee.data(guarantee.num_rows)
    if stream:
        data = tf.data.Dataset.from_tensor_slices(data)
    # On one device no row is needed for filling, so that filling is tried against none.
    pads = place.strategy is None and guarantee.remainder == "pad"
    train = tfmulti.distribute_train(
        data,
        _strategy_of(place),
        guarantee.batch_size,
        seed=SEED,
        remainder="uneven" if pads else guarantee.remainder,
        **settings,
    )
    if guarantee.convert is not None:
        train = train.map(guarantee.convert)
    if place.order:
        train = train.map(lambda *batch: tf.nest.map_structure(_reorder(place.order), batch))
    return {"x": train}


def _reorder(order):
    def gather(rows):
        count = tf.range(tf.shape(rows)[0])
        backwards, halves = count[::-1], tf.concat([count[1::2], count[::2]], 0)
        return tf.gather(rows, backwards if order == 1 else halves)

    return gather


def _arrays(guarantee, place):
    data = load(guarantee, place)
    names = ("x", "y", "sample_weight")
    return {**dict(zip(names, data)), "batch_size": guarantee.batch_size, "shuffle": False}


def _dataset(guarantee, place):
    dataset = tf.data.Dataset.from_tensor_slices(load(guarantee, place)).batch(guarantee.batch_size)
    if guarantee.convert is not None:
        dataset = dataset.map(guarantee.convert)
    return {"x": dataset}


def _endless(guarantee, place):
    return {"x": _dataset(guarantee, place)["x"].repeat(), "steps_per_epoch": 2}


def _generator(guarantee, place):
    return {
        "x": (batch for batch in batches(guarantee, place) * guarantee.epochs),
        "steps_per_epoch": -(-guarantee.num_rows // guarantee.batch_size),
    }


class _Batches(keras.utils.PyDataset):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def _py_dataset(guarantee, place):
    return {"x": _Batches(batches(guarantee, place)), "shuffle": False}


_FEEDS = {
    "pipeline": _pipeline,
    "stream": lambda guarantee, place: _pipeline(guarantee, place, stream=True),
    "steps": lambda guarantee, place: _pipeline(guarantee, place, steps_per_epoch=2),
    "arrays": _arrays,
    "dataset": _dataset,
    "endless": _endless,
    "generator": _generator,
    "py_dataset": _py_dataset,
}
