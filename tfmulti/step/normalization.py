"""Batch normalization of a model that somebody else has made."""

from __future__ import annotations

import keras

from tfmulti import keras_compat


def synchronize_batch_normalization(model: keras.Model) -> keras.Model:
    """Has every batch normalization of a model use the statistics of all replicas' rows.

    On one device it uses those of the whole batch; on several, each replica's own would be
    another model. PyTorch's `SyncBatchNorm.convert_sync_batchnorm` does the same. Call it after
    the model was made and before `fit`; on one device it changes nothing.

    Args:
        model: A model, with layers within layers.

    Returns:
        The same model.

    Example:
    >>> layers = [keras.Input((4,)), keras.layers.BatchNormalization()]
    >>> model = synchronize_batch_normalization(keras.Sequential(layers))
    >>> model.layers[0].synchronized
    True
    """
    for layer in keras_compat.all_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    return model
