"""Replacements in building models, and in computing losses, metrics and batch statistics."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.losses import loss as keras_loss

from tfmulti.keras_compat import replaced_data, replacement
from tfmulti.keras_compat.batch_sizes import batch_sizes_of
from tfmulti.runtime.scoped import with_attributes

# The number of rows of arrays with which a model is built and verified: more where they are small.
_FEW_ROWS, MAX_ROWS, MAX_BYTES = 64, 256, 2**24


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without tf.data's tuning thread, unless its author has enabled it.

    Parallel maps with `AUTOTUNE` then use a thread for each core.
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

    It takes no batch away from a Python generator.

    Args:
        original: Keras's own method.
        first_local_value: Function of a strategy and a nested structure of distributed values that
            returns the first local replica's values.
        before_pass: Function of a strategy and Keras's iterator over the batches of `fit` or
            `evaluate`, called before a pass begins.
        build_by_step: Function of a model and a batch of the replicas that builds the model by
            tracing its own step, and returns whether it has done so.
        once_built: Function of a strategy, a built model, a function that returns its first batch
            of the replicas, and Keras's iterator or None.
        refuse: Function of a model that could not be built, which raises an error if it knows why.
    """

    def build_from(model, batch):
        if lacks_call(model):
            # Nothing else marks a model without `call` as built, and `is_built` asks.
            model.built = True
        by_step = build_by_step(model, batch)
        # Keras asks losses and metrics of `compile` for results even if the step ignores them.
        with contextlib.suppress(Exception) if by_step else contextlib.nullcontext():
            if not by_step or _has_built_layers(model):
                strategy = model._distribute_strategy
                _build_by_call(model, strategy, first_local_value(strategy, batch))

    def build(model, iterator=None, data_batch=None):
        strategy = model._distribute_strategy
        if strategy is None:
            # The model was created in no scope, so the current one is not its own.
            return original(model, iterator=iterator, data_batch=data_batch)
        if iterator is not None:
            before_pass(strategy, iterator)
        peek = functools.partial(_peek, iterator) if iterator is not None else lambda: data_batch
        try:
            _build_from_any(build_from, model, iterator, peek, refuse)
        except (ValueError, RuntimeError):
            refuse(model)
            # A model that runs eagerly builds itself in its first step.
            if not model.run_eagerly:
                raise
        once_built(strategy, model, peek, iterator)
        return None

    return build


def _build_from_any(build_from, model, epoch_iterator, peek, refuse):
    """Calls a function of a batch, and again with the rows of a whole one if that fails.

    The first one may have guessed sizes, or too few rows for a layer that needs groups of them.
    """
    if epoch_iterator is None:
        build_from(model, peek())
        return
    try:
        batch = _batch_to_build_from(epoch_iterator)
        build_from(model, peek() if batch is None else batch)
    except (ValueError, RuntimeError):
        refuse(model)
        sizes = batch_sizes_of(epoch_iterator) or [(None,)]
        rows = _rows_of_all_replicas(model._distribute_strategy, peek(), sizes[0][0])
        build_from(model, rows)


def _rows_of_all_replicas(strategy, batch, most):
    """Returns as many rows as the whole batch has; other workers' rows are this worker's again."""
    is_shared = any(_is_distributed(value) for value in tf.nest.flatten(batch))
    num_workers = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)

    def whole(part):
        if not isinstance(part, tf.Tensor | tf.RaggedTensor | np.ndarray):
            return part
        return tf.concat([part] * num_workers, axis=0) if is_shared else part[:most]

    with tf.device("CPU:0"):
        rows = gather_local(strategy, batch)
        return tf.nest.map_structure(whole, rows, expand_composites=False)


def gather_local(strategy: tf.distribute.Strategy, batch):
    """Returns the rows of all local replicas as one batch."""

    def join(value):
        if not _is_distributed(value):
            return value
        parts = strategy.experimental_local_results(value)
        if isinstance(parts[0], tf.SparseTensor):
            return tf.sparse.concat(0, list(parts))
        with tf.device("CPU:0"):
            return tf.concat(list(parts), axis=0)

    return tf.nest.map_structure(join, batch, expand_composites=False)


def _is_distributed(value) -> bool:
    return isinstance(value, tf.distribute.DistributedValues)


def _batch_to_build_from(epoch_iterator):
    """Returns a batch with a dataset's shapes and dtypes, or None.

    Drawing a batch would shuffle the rows of the first epoch differently than on one device. So it
    is zeros; or, if the dataset does not tell the size of a row, as `timeseries_dataset_from_array`
    does not tell the number of steps, the first batch of a copy: a model may take one size only.
    A dataset that cannot be copied gets zeros with a guessed size of 1.
    """
    spec = getattr(epoch_iterator._distributed_dataset, "element_spec", None)
    leaves = tf.nest.flatten(spec, expand_composites=False)
    own = [getattr(leaf, "_value_specs", (leaf,))[0] for leaf in leaves]
    if not own or not all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank for leaf in own):
        return None
    is_known = all(leaf.shape[1:].is_fully_defined() for leaf in own)
    adapter = epoch_iterator.data_adapter
    batch = None if is_known else replaced_data.first_of_copy(getattr(adapter, "_dataset", None))
    if batch is not None:
        return batch
    counts = (batch_sizes_of(epoch_iterator) or [(None,)])[0]
    counts = counts if len(counts) == len(own) else counts[:1] * len(own)
    with tf.device("CPU:0"):
        zeros = [_zeros(leaf, count) for leaf, count in zip(own, counts)]
    return tf.nest.pack_sequence_as(spec, zeros, expand_composites=False)


def _zeros(spec, num_rows):
    shape = [1 if size is None else size for size in [num_rows or spec.shape[0], *spec.shape[1:]]]
    return tf.zeros(shape, spec.dtype)


def _peek(epoch_iterator):
    """Returns a batch, if possible without side effects on the data: from arrays or a copy."""
    adapter = epoch_iterator.data_adapter
    first_batches = getattr(adapter, "_first_batches", None)
    # Keras has drawn them from the generator to find its signature, and gives them back later.
    if first_batches:
        return first_batches[0]
    arrays = getattr(adapter, "_inputs", None)
    leaves = tf.nest.flatten(arrays) if arrays is not None else [None]
    if all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves):
        return rows_from_all_over(arrays)
    if hasattr(adapter, "py_dataset"):
        batch = adapter._standardize_batch(adapter.py_dataset[0])
        return tf.nest.map_structure(tf.convert_to_tensor, batch)
    batch = replaced_data.first_of_copy(getattr(adapter, "_dataset", None))
    if batch is not None:
        return batch
    for _, _, iterator in epoch_iterator:
        peek = getattr(iterator, "peek", None)
        return peek() if peek else next(iterator)
    raise ValueError(
        "A dataset must hold at least one batch. Received: an empty dataset. "
        "Check the split and its filters."
    )


def rows_from_all_over(arrays):
    """Returns up to 256 rows spread evenly over arrays or tensors, which may be sorted.

    Args:
        arrays: A structure of arrays with as many rows each.
    """
    parts = tf.nest.flatten(arrays)
    count = min(int(part.shape[0]) for part in parts)
    size = sum(part.size * part.dtype.itemsize for part in parts if isinstance(part, np.ndarray))
    most = max(_FEW_ROWS, min(MAX_ROWS, MAX_BYTES * count // max(size, 1)))
    rows = np.arange(most) * count // most if count > most else np.arange(count)
    return tf.nest.map_structure(lambda part: _rows_of(part, rows), arrays)


def _rows_of(part, rows):
    taken = tf.convert_to_tensor(
        tf.gather(part, rows) if isinstance(part, tf.Tensor) else part[rows]
    )
    # So does Keras with arrays.
    return tf.cast(taken, keras.config.floatx()) if taken.dtype.is_floating else taken


def lacks_call(model: keras.Model) -> bool:
    """Whether a model has no `call`, only its own `train_step`, like the usual GAN."""
    return type(model).call is keras.Model.call


def _has_built_layers(model) -> bool:
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def _build_by_call(model, strategy, batch):
    optimizer = model.optimizer
    with strategy.scope():
        if not lacks_call(model):
            model._symbolic_build(data_batch=batch)
        elif optimizer is not None and not optimizer.built and model.trainable_variables:
            # Not in the step: creating slots of several replicas in a trace fails.
            optimizer.build(model.trainable_variables)


def clear_gradients_of_masked_steps(original):
    """Gives the masked time steps of a recurrent layer on a GPU a gradient of zero.

    cuDNN skips these steps, and TensorFlow returns whatever the memory of their gradient held.
    """
    signature = inspect.signature(original)

    def call(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        inputs, mask = given.arguments["inputs"], given.arguments["mask"]
        if mask is not None:
            is_kept = tf.cast(mask, tf.bool)[..., None]
            given.arguments["inputs"] = tf.where(is_kept, inputs, tf.zeros_like(inputs))
        return original(*given.args, **given.kwargs)

    return call


def around_call_of(kind: type, call_own_loss) -> None:
    """Replaces the `__call__` of a class of losses, as the table replaces `Loss.__call__`.

    Args:
        kind: The class; without a `__call__` of its own it stays unchanged.
        call_own_loss: Function of the class's `__call__`, a loss and the arguments of the call.
    """
    if "__call__" in vars(kind):
        make = functools.partial(around, function=call_own_loss)
        replacement.replace(kind, "__call__", make, replacement.in_scope)


def update_with_function(original, update):
    """Computes metric functions that return one number from the rows of all replicas.

    Args:
        original: `MeanMetricWrapper.update_state`.
        update: Function of `original`, a metric, its function, and the arguments of that function.
    """

    def update_state(self, y_true, y_pred, sample_weight=None):
        function = functools.partial(self._fn, **self._fn_kwargs)
        return update(original, self, function, y_true, y_pred, sample_weight)

    return update_state


def update_metric_by(metric: keras.metrics.Metric, update) -> None:
    """Replaces one metric's `update_state` by a function of it and its arguments."""
    if "update_state" not in vars(metric):
        object.__setattr__(metric, "update_state", around(metric.update_state, update))


def around(original, function):
    """Returns a function that passes `original` and its arguments to another function."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return function(original, *args, **kwargs)

    return call


@contextlib.contextmanager
def means_updated_by(update) -> Iterator[None]:
    """Passes updates of running means and sums to another function within the context.

    Args:
        update: Function of `Mean.update_state` or `Sum.update_state`, and its arguments.
    """
    kinds = keras.metrics.Mean, keras.metrics.Sum
    originals = [kind.update_state for kind in kinds]
    for kind, original in zip(kinds, originals):
        kind.update_state = around(original, update)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals):
            kind.update_state = original


@contextlib.contextmanager
def reading_kernels_first() -> Iterator[None]:
    """Makes convolutions read their kernels outside of what Keras compiles with XLA.

    Keras does so with grouped ones, and where the number of channels is unknown. XLA cannot read
    a variable of another process.
    """
    original = keras_nn.conv

    @functools.wraps(original)
    def conv(inputs, kernel, *args, **kwargs):
        return original(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    with with_attributes(keras_nn, conv=conv):
        yield


@contextlib.contextmanager
def noting_reductions() -> Iterator[list[tuple[str | None, bool, bool]]]:
    """Notes the losses of Keras's kind that are reduced to a number within the context.

    Yields:
        A list with the reduction of each, whether it has sample weights, and whether it has a mask:
        that of the outputs, or of classes that it ignores.
    """
    noted: list = []
    original = keras_loss.reduce_weighted_values

    @functools.wraps(original)
    def reduce(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
        noted.append((reduction, sample_weight is not None, mask is not None))
        return original(values, sample_weight, mask, reduction, dtype)

    with with_attributes(keras_loss, reduce_weighted_values=reduce):
        yield noted
