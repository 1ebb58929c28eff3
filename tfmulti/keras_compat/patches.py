"""Replacements of how Keras builds models, and computes losses, metrics and statistics."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from tfmulti.keras_compat import hooks, replacement

# Rows of arrays that a model is built and verified with.
_LOOKED = 64


def untuned(create):
    """Ends the datasets that a strategy adds for its devices once nothing reads them."""

    def create_untuned(*args, **kwargs):
        return without_tuning(create(*args, **kwargs))

    return create_untuned


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without tf.data's tuning thread, unless its author has enabled it.

    Parallel maps that are left to it then take a thread for each core.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def build_from_one_replica(
    original, first_local_value, before_pass, build_by_step, once_built, refuse
):
    """Builds a model from one replica's batch instead of from the mean over replicas.

    A Python generator loses no batch to it.

    Args:
        original: Keras's own method.
        first_local_value: Function that takes a nested structure of distributed values to
            the first local replica's.
        before_pass: Function of a strategy and Keras's iterator over the batches of `fit` or
            `evaluate`, called before a pass is begun.
        build_by_step: Function of a model and a batch as the replicas have it, which builds what
            the model's own step would build as it is traced; it tells whether it has done so.
        once_built: Function of a strategy, a model that is built, its first batch as the
            replicas have it, and Keras's iterator or None.
        refuse: Function of a model that could not be built, which raises where it knows why.
    """

    def build(model, iterator=None, data_batch=None):
        strategy = model._distribute_strategy
        if strategy is None:
            # Made in no scope: the current one is not its own.
            return original(model, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            before_pass(strategy, iterator)
        peek = functools.partial(_peek, iterator) if iterator is not None else lambda: data_batch
        try:
            batch = _zeros_like_batches(iterator) if iterator is not None else None
            batch = peek() if batch is None else batch
            if lacks_call(model):
                model.built = True
            by_step = build_by_step(model, batch)
            # What `compile` was given, and the step makes no use of, is asked for its results.
            with contextlib.suppress(Exception) if by_step else contextlib.nullcontext():
                if not by_step or _has_built_layers(model):
                    _build_by_call(model, strategy, first_local_value(strategy, batch))
        except (ValueError, RuntimeError):
            refuse(model)
            # One that is run line by line builds itself as it goes.
            if not model.run_eagerly:
                raise
        once_built(strategy, model, peek, iterator)
        return None

    return build


def _zeros_like_batches(epoch_iterator):
    """Returns a batch of the shapes and types that a dataset tells, or None where it does not.

    To draw one would shuffle the rows of the first epoch another time than on one device.
    """
    spec = getattr(epoch_iterator._distributed_dataset, "element_spec", None)
    leaves = tf.nest.flatten(spec, expand_composites=False)
    own = [getattr(leaf, "_value_specs", (leaf,))[0] for leaf in leaves]
    if not own or not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank for leaf in own):
        return None
    zeros = [_zeros(leaf) for leaf in own]
    return tf.nest.pack_sequence_as(spec, zeros, expand_composites=False)


def _zeros(spec):
    shape = [1 if size is None else size for size in spec.shape]
    return tf.fill(shape, "") if spec.dtype == tf.string else tf.zeros(shape, spec.dtype)


def _peek(epoch_iterator):
    """Returns a batch, without a trace where that can be: from arrays, or one that Keras keeps."""
    adapter = epoch_iterator.data_adapter
    first_batches = getattr(adapter, "_first_batches", None)
    if first_batches:
        return first_batches[0]
    arrays = getattr(adapter, "_inputs", None)
    leaves = tf.nest.flatten(arrays) if arrays is not None else [None]
    if all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves):
        return tf.nest.map_structure(rows_from_all_over, arrays)
    if hasattr(adapter, "py_dataset"):
        batch = adapter._standardize_batch(adapter.py_dataset[0])
        return tf.nest.map_structure(tf.convert_to_tensor, batch)
    batch = hooks.first_of_copy(getattr(adapter, "_dataset", None))
    if batch is not None:
        return batch
    for _, _, iterator in epoch_iterator:
        peek = getattr(iterator, "peek", None)
        return peek() if peek else next(iterator)
    raise ValueError(
        "A dataset must hold at least one batch. Received: an empty dataset. "
        "Check the split and its filters."
    )


def rows_from_all_over(array):
    """Returns rows from all over an array or a tensor, which may be sorted."""
    count = int(array.shape[0])
    rows = np.arange(_LOOKED) * count // _LOOKED if count > _LOOKED else np.arange(count)
    taken = tf.gather(array, rows) if isinstance(array, tf.Tensor) else array[rows]
    return tf.convert_to_tensor(taken)


def lacks_call(model: keras.Model) -> bool:
    """Whether a model is a container with its own `train_step` only, as the usual GAN."""
    return type(model).call is keras.Model.call


def _has_built_layers(model) -> bool:
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def _build_by_call(model, strategy, batch):
    optimizer = model.optimizer
    with strategy.scope():
        if not lacks_call(model):
            model._symbolic_build(data_batch=batch)
        elif optimizer is not None and not optimizer.built and model.trainable_variables:
            optimizer.build(model.trainable_variables)


def count_replica_rows_in_moments(original, current_replica_batch):
    """Leaves an empty replica batch's padding row out of synchronized batch statistics.

    Args:
        original: Keras's own function.
        current_replica_batch: Function that returns the batch of the replica that is being traced,
            or None.
    """

    def moments(x, axes, keepdims):
        replica_batch = current_replica_batch()
        context = tf.distribute.get_replica_context()
        if replica_batch is None or not replica_batch.may_be_empty or context is None:
            return original(x, axes, keepdims)
        counted = replica_batch.num_real > 0
        keep = functools.partial(tf.reduce_sum, axis=axes, keepdims=True)
        sums = [keep(x), keep(tf.square(x)), keep(tf.ones_like(x))]
        sums = [tf.where(counted, value, tf.zeros_like(value)) for value in sums]
        total, squares, count = context.all_reduce("SUM", sums)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return moments


def count_masks_of_all_replicas(original, current_replica_batch):
    """Has synchronized batch normalization count the valid steps of all replicas under a mask.

    Args:
        original: Keras's own method.
        current_replica_batch: Function that returns the batch of the replica that is being traced,
            or None.
    """

    def moments(self, inputs, mask):
        replica_batch, context = current_replica_batch(), tf.distribute.get_replica_context()
        many = context is not None and context.num_replicas_in_sync > 1
        if mask is None or not self.synchronized or replica_batch is None or not many:
            return original(self, inputs, mask)
        valid = tf.cast(mask, inputs.dtype)[..., None] * tf.ones_like(inputs)
        valid = tf.where(replica_batch.num_real > 0, valid, tf.zeros_like(valid))
        keep = functools.partial(tf.reduce_sum, axis=self._reduction_axes, keepdims=True)
        masked = tf.where(valid > 0, inputs, tf.zeros_like(inputs))
        total, count = context.all_reduce("SUM", [keep(masked), keep(valid)])
        count += keras.backend.epsilon()
        mean = total / count
        apart = tf.where(valid > 0, inputs - mean, tf.zeros_like(inputs))
        variance = context.all_reduce("SUM", keep(tf.square(apart))) / count
        return tf.squeeze(mean), tf.squeeze(variance)

    return moments


def keep_means(original, keeps_means):
    """Has losses not divided by the replicas, which are averaged later.

    Args:
        original: Keras's own function of a value.
        keeps_means: Function that returns whether losses are averaged over replicas later.
    """

    def scale(value):
        return value if keeps_means() else original(value)

    return scale


def around_call_of(kind: type, call_loss) -> None:
    """Does what the table does with `Loss.__call__` for a class with a `__call__` of its own.

    Args:
        kind: The class of losses.
        call_loss: Function of its own `__call__`, a loss and that one's arguments.
    """
    if "__call__" in vars(kind):
        make = functools.partial(around, function=call_loss)
        replacement.replace(kind, "__call__", make, replacement.in_scope)


def update_with_function(original, update):
    """Computes metric functions that return one number from the rows of all replicas.

    Args:
        original: `MeanMetricWrapper.update_state`.
        update: Function of that one, a metric, its function, and that one's arguments.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        function = functools.partial(self._fn, **self._fn_kwargs)
        return update(original, self, function, y_true, y_pred, sample_weight)

    return update_state


def update_metric_by(metric: keras.metrics.Metric, update) -> None:
    """Has one metric be updated by a function of its own `update_state` and the arguments."""
    if "update_state" not in vars(metric):
        object.__setattr__(metric, "update_state", around(metric.update_state, update))


def around(original, function):
    """Returns a function that gives another one `original` before its own arguments."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call
