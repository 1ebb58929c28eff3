"""Public methods of Keras that are surrounded, once a process."""

from __future__ import annotations

import functools

import keras


def around_callbacks(prepare, agree) -> None:
    """Lets stock callbacks be prepared for several workers, and stops agreed on.

    Cures "BadZipFile", "unable to lock file" and doubled lines where every worker writes what
    one should, and "Collective ... expected type" where one worker alone stops after an epoch.
    A callback learns of its model here only, and no method of `Model` sees the callbacks.

    Args:
        prepare: Function of a callback and the model that is going to be trained.
        agree: Function of that model, called after every epoch.
    """
    holder = keras.callbacks.CallbackList
    if hasattr(holder.set_model, "__wrapped__"):
        return
    set_model, on_epoch_end = holder.set_model, holder.on_epoch_end

    @functools.wraps(set_model)
    def set_model_of_all(self, model):
        for callback in self.callbacks if model else []:
            prepare(callback, model)
        return set_model(self, model)

    @functools.wraps(on_epoch_end)
    def end_epoch(self, epoch, logs=None):
        on_epoch_end(self, epoch, logs)
        agree(self.model)

    holder.set_model, holder.on_epoch_end = set_model_of_all, end_epoch


def after_loading(distribute) -> None:
    """Makes the optimizer of a model that is loaded under a strategy distributed again.

    A file holds the user's optimizer as it is; `compile_from_config` makes it anew.

    Args:
        distribute: Function of the model that was loaded and compiled.
    """
    original = keras.Model.compile_from_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def compile_from_config(self, config):
        original(self, config)
        distribute(self)

    keras.Model.compile_from_config = compile_from_config


class _OfUnknownLength:
    """A data adapter whose number of batches is found out by reaching their end."""

    num_batches = None

    def __init__(self, adapter):
        self._adapter = adapter

    def __getattr__(self, name):
        return getattr(self._adapter, name)


def number_of_batches(epoch_iterator) -> int | None:
    """Returns the batches that Keras expects of a pass, or None where it waits for the end."""
    return epoch_iterator.data_adapter.num_batches


def forget_number_of_batches(epoch_iterator) -> None:
    """Makes Keras read to the end of the data instead of counting its own batches."""
    epoch_iterator.data_adapter = _OfUnknownLength(epoch_iterator.data_adapter)
