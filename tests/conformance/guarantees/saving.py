"""Saving in one place and going on in another."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras

from conformance import training
from conformance.guarantee import Guarantee, Origin
from conformance.guarantees import common


def uninterrupted(guarantee, place):
    """Trains both epochs in one place."""
    model = training.create(guarantee, place)
    history = [training.fit(model, guarantee, place, epochs=1) for _ in range(2)]
    return training.results(model, place, history[1])


def moved(guarantee, place, first, second):
    """Trains an epoch in one place, saves, loads in another, and trains the second there."""
    model = training.create(guarantee, first)
    training.fit(model, guarantee, first, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        with second.scope():
            model = keras.models.load_model(Path(folder) / "model.keras")
            # A file holds the user's optimizer, which is bare.
            second.wrap(model.optimizer)
    history = training.fit(model, guarantee, second, epochs=1)
    return training.results(model, second, history)


def _alone(place):
    return Origin(None, place.stock, place.worker, place.order)


def to_one(guarantee, place):
    if place.strategy is None:
        return uninterrupted(guarantee, place)
    return moved(guarantee, place, place, _alone(place))


def to_many(guarantee, place):
    if place.strategy is None:
        return uninterrupted(guarantee, place)
    return moved(guarantee, place, _alone(place), place)


def among_many(guarantee, place):
    if place.strategy is None:
        return uninterrupted(guarantee, place)
    return moved(guarantee, place, place, place)


def guarantee(name, run, rows=33, **settings):
    create = common.classifier(lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5))
    return Guarantee(
        name, create, data=common.plain, feed="arrays", run=run, num_rows=rows, **settings
    )


GUARANTEES = [
    guarantee("saved on many, goes on on one", to_one),
    guarantee("saved on one, goes on on many", to_many),
    guarantee("saved on many, goes on there", among_many),
]
