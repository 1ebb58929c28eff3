"""Synchronized batch normalization for existing models, such as pretrained ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from tfmulti import keras_compat
from tfmulti.runtime.scoped import with_attributes
from tfmulti.settings import check_type


def synchronize_batch_normalization(model: keras.Model) -> keras.Model:
    """Makes every batch normalization of a model use the statistics of all replicas' rows.

    One device normalizes with the statistics of the whole batch; with local statistics each
    replica would train a different model. PyTorch's `SyncBatchNorm.convert_sync_batchnorm` does
    the same. Call it after the model was created, for the whole model that `fit` trains, on which a
    later `fit` then acts; with one replica it changes nothing.

    Args:
        model: A model; nested layers are converted too.

    Returns:
        The same model.

    Raises:
        ValueError: If it is no model.

    Example:
    >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization()]
    >>> model = synchronize_batch_normalization(keras.Sequential(layers))
    >>> model.layers[0].synchronized
    True
    """
    check_type("model", model, keras.Model, "a Keras model", "Pass a model.")
    layers = keras_compat.all_layers(model)
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    for each in (model, *layers):
        if isinstance(each, keras.Model):
            # What `fit` and others have traced has the layers as they were; Keras makes new ones.
            each.train_function = each.test_function = each.predict_function = None
    return model


def synchronized_layers(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns a model's synchronized batch normalizations."""
    layers = keras_compat.all_layers(model)
    kind = keras.layers.BatchNormalization
    return [layer for layer in layers if isinstance(layer, kind) and layer.synchronized]


@contextlib.contextmanager
def synchronized(layers, value: bool) -> Iterator[None]:
    """Synchronizes local batch normalizations within the context, or the reverse."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(with_attributes(layer, synchronized=value))
        yield


@contextlib.contextmanager
def as_in_inference(layers) -> Iterator[None]:
    """Has batch normalizations use their moving statistics within the context."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(with_attributes(layer, call=_call_in_inference(layer.call)))
        yield


def _call_in_inference(call):
    return lambda inputs, training=None, **mask: call(inputs, training=False, **mask)
