"""Saving in one place and going on in another."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

from conformance import training
from conformance.promise import Place, Promise
from conformance.promises import common


def uninterrupted(promise, place):
    """Trains both epochs in one place."""
    model = training.create(promise, place)
    history = [training.fit(model, promise, place, epochs=1) for _ in range(2)]
    return training.results(model, place, history[1])


def moved(promise, place, first, second):
    """Trains an epoch in one place, saves, loads in another, and trains the second there."""
    model = training.create(promise, first)
    training.fit(model, promise, first, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        with second.scope():
            model = keras.models.load_model(Path(folder) / "model.keras")
            # A file holds the user's optimizer, which is bare.
            second.wrap(model.optimizer)
    history = training.fit(model, promise, second, epochs=1)
    return training.results(model, second, history)


def _alone(place):
    return Place(None, place.stock, place.worker, place.order)


def to_one(promise, place):
    if place.strategy is None:
        return uninterrupted(promise, place)
    return moved(promise, place, place, _alone(place))


def to_many(promise, place):
    if place.strategy is None:
        return uninterrupted(promise, place)
    return moved(promise, place, _alone(place), place)


def among_many(promise, place):
    if place.strategy is None:
        return uninterrupted(promise, place)
    return moved(promise, place, place, place)


def promise(name, run, rows=33, **settings):
    create = common.classifier(lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5))
    return Promise(
        name, create, data=common.plain, feed="arrays", run=run, num_rows=rows, **settings
    )


PROMISES = [
    promise("saved on many, goes on on one", to_one),
    promise("saved on one, goes on on many", to_many),
    promise("saved on many, goes on there", among_many),
]
