"""Verifies a step again that changes while `fit` runs."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfmulti import keras_compat, marks, verification
from tfmulti.strategies import checks, coordination
from tfmulti.verification import verified
from tfmulti.verification.case import TRAIN
from tfmulti.verification.differences import same_bits
from tfmulti.verification.python_values import attributes_of

# After so many changes a step is verified again at the changes of which the number is 2^k.
_ALWAYS = 3


def verify_again(model: keras.Model, kind: str) -> None:
    """Verifies a step again if its function is made anew, with other Python attributes perhaps.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
    """
    if not verified.take_function(model, kind):
        verified.forget(model, kind)
        if kind == TRAIN:
            _verify_within_fit(model)


def _verify_within_fit(model):
    feed = marks.FEED.get(model)
    if feed is not None and feed.by_python:
        checks.verify_at_first_batch(model, TRAIN, feed)
    elif feed is not None:
        verification.verify_once(model, TRAIN, feed, checks.WORKERS)


class VerifyAgain(keras.callbacks.Callback):
    """Verifies a step again where a callback has changed what it reads, as the phase of training.

    That is a small variable which the step does not change itself, or with `run_eagerly=True` an
    attribute of the model or of an object that it holds.
    """

    def __init__(self):
        super().__init__()
        self._attributes: dict | None = None
        self._changes = 0

    def on_train_begin(self, logs=None):
        """Notes the attributes that an eager step was verified with."""
        verified.take_function(self.model, TRAIN)
        if self.model.run_eagerly or tf.config.functions_run_eagerly():
            self._attributes = attributes_of(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Compares the values; a collective of all workers, where a step has such values."""
        settings = marks.SETTINGS.get(self.model)
        nothing = self._attributes is None and settings is None
        if marks.FEED.get(self.model) is None or nothing:
            return
        # All workers must take part, also one whose model is not changed.
        if not coordination.any_worker(self.model.distribute_strategy, self._has_changed()):
            return
        self._changes += 1
        # What changes with every epoch, as a weight of the loss, is not verified every time.
        if self._changes <= _ALWAYS or self._changes.bit_count() == 1:
            verified.forget(self.model, TRAIN)
            _verify_within_fit(self.model)
            # A step that all replicas compute from the whole batch has another function.
            self.model.make_train_function()
        if self._attributes is not None:
            self._attributes = attributes_of(self.model)

    def on_train_end(self, logs=None):
        """Lets go of the data."""
        marks.FEED.set(self.model, None)
        marks.SAMPLES.set(self.model, {})

    def _has_changed(self) -> bool:
        settings = marks.SETTINGS.get(self.model) or ()
        values = [(keras_compat.read_handle(handle), value) for handle, value in settings]
        by_variable = any(not same_bits(now, then) for now, then in values)
        is_eager = self._attributes is not None
        return by_variable or (is_eager and self._attributes != attributes_of(self.model))
