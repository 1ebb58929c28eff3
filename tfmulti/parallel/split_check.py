"""Checks before training that a model's batches can be split and its metrics added."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel.answers import Answer, add_gradients
from tfmulti.parallel.remote_step import RemoteStep
from tfmulti.step import normalization
from tfmulti.step.rows import num_rows, some_rows
from tfmulti.verification.custom_parts import local_normalization

_MOST_ROWS = 48
_TOLERANCE = 1e-3
# What one number is rounded by; rows are added in another order.
_ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7}


def check(step: RemoteStep, batch, splits: bool) -> None:
    """Computes some rows in two parts, and at once or one part after the other, and compares.

    Args:
        step: The model's steps.
        batch: A batch.
        splits: Whether batches are split over workers, whose gradients are then added.

    Raises:
        ValueError: If the parts do not add up: where batches are split, for a loss or a change of
            a layer's state that is not a mean over rows; for metrics whose states cannot be added.
    """
    batch = some_rows(batch, 0, _MOST_ROWS)
    if int(num_rows(batch)) < 2:
        return
    layers = local_normalization(step.model)
    if layers and splits:
        warnings.warn(
            "Batch normalization uses the statistics of each worker's rows, so the result "
            "differs from that of one device. For the same result use layer normalization.",
            stacklevel=3,
        )
    # The rest of the model is compared.
    with normalization.as_in_inference(layers):
        _compare(step, batch, splits)


def refuse_synchronized(model: keras.Model) -> None:
    """Raises ValueError for synchronized batch normalization, if batches are split over workers."""
    layers = [each for each in normalization.synchronized_layers(model) if each.trainable]
    if layers:
        raise ValueError(
            "With `max_staleness=0` each batch is split over the workers, and batch normalization "
            "cannot span the workers of parameter servers. Received: "
            f"{layers[0].name}, synchronized=True. Use synchronized=False for the statistics of "
            "each worker's rows, keras.layers.GroupNormalization, or leave max_staleness out; each "
            "batch then goes to one worker."
        )


def _compare(step, batch, splits):
    rows = int(num_rows(batch))
    with keras_compat.noting_reductions() as reductions:
        parts = _compute_parts(step, batch, rows, splits)
    if splits:
        _refuse_other_divisors(reductions)
    if step.is_random:
        warnings.warn(
            "`train_step` was not verified: it draws random numbers that cannot be repeated, as "
            "tf.random does. With keras.random it would be.",
            stacklevel=4,
        )
        return
    if not splits:
        second = some_rows(batch, _rows_of_first_part(rows), rows)
        both = step.compute_here(second, parts[0].metrics)
        _compare_metrics(step, both, parts, "one part after the other")
        return
    whole = step.compute_here(batch)
    # First: what is wrong in a loss is wrong in its metric, too.
    _compare_gradients(step, whole, parts)
    _compare_metrics(step, whole, parts, "at once")
    for other in _variations(step.model, batch, rows):
        try:
            whole, parts = step.compute_here(other), _compute_parts(step, other, rows)
        except tf.errors.InvalidArgumentError:
            # Made-up labels need not be classes.
            continue
        if all(map(_is_finite, whole.gradients)):
            _compare_gradients(step, whole, parts)


def _refuse_other_divisors(reductions):
    """Raises ValueError if a loss divides by a number that rows do not tell."""
    for reduction, has_weights, has_mask in reductions:
        by_weights = reduction == "mean_with_sample_weight" and has_weights
        if by_weights or (has_mask and reduction not in ("sum", "none", None)):
            divisor = "the sum of sample weights" if by_weights else "the values that a mask leaves"
            raise ValueError(
                "With `max_staleness=0` each batch is split over the workers, so the loss must be "
                f"a mean over rows. Received: a loss with reduction={reduction!r} that divides by "
                f"{divisor}. Use reduction='sum_over_batch_size' without a mask of the outputs and "
                "without ignore_class, or leave max_staleness out; each batch then goes to one "
                "worker."
            )


def _compute_parts(step, batch, rows, splits=True) -> list[Answer]:
    """Returns the answers to two parts of a batch, or to two batches."""
    first = _rows_of_first_part(rows)
    return [
        step.compute_here(
            some_rows(batch, start, stop), share=(stop - start) / rows if splits else 1.0
        )
        for start, stop in ((0, first), (first, rows))
    ]


def _rows_of_first_part(rows):
    return rows // 3 or 1


def _variations(model, batch, rows):
    """Yields other batches, for what the first rows of a training need not show."""
    yield _with_zeros(batch, rows)
    if isinstance(batch, tuple) and len(batch) > 1:
        inputs, labels, *others = batch
        yield (inputs, _changed(labels, _without_classes(rows)), *others)
    if keras_compat.has_custom_step(model, "train"):
        # A step may clip gradients once they are large.
        yield _changed(batch, lambda x: x * 1000 if x.dtype.is_floating else x)


def _changed(structure, change):
    return tf.nest.map_structure(lambda x: change(x) if tf.is_tensor(x) else x, structure)


def _without_classes(rows):
    """Returns a function that replaces labels of one part by -1, which often means none."""
    is_first = np.arange(rows) < _rows_of_first_part(rows)

    def change(labels):
        if not labels.dtype.is_integer or labels.dtype.is_unsigned:
            return labels
        return tf.where(is_first.reshape([rows] + [1] * (labels.ndim - 1)), -1, labels)

    return change


def _is_finite(gradient):
    values = gradient[0] if isinstance(gradient, tuple) else gradient
    return values is None or bool(np.all(np.isfinite(values)))


def _with_zeros(batch, rows):
    """Returns a batch with zeros in one part, where token ids and labels often mean padding.

    The first batch of a training need not have rows of different lengths.
    """
    is_first = np.arange(rows) < _rows_of_first_part(rows)

    def change(tensor):
        is_number = tensor.dtype.is_integer or tensor.dtype.is_floating
        if not is_number or tensor.ndim < (2 if tensor.dtype.is_integer else 3):
            return tensor
        is_second_half = np.arange(tensor.shape[1]) >= (tensor.shape[1] + 1) // 2
        zeros = is_first[:, np.newaxis] & is_second_half
        zeros = zeros.reshape(zeros.shape + (1,) * (tensor.ndim - 2))
        return tf.where(zeros, tf.zeros_like(tensor), tensor)

    return _changed(batch, change)


def _compare_metrics(step, whole, parts, how):
    first = step.first_metrics
    for number, (state, begin) in enumerate(zip(whole.metrics, first)):
        added = begin + sum(part.metrics[number] - begin for part in parts)
        if not _are_close(step, state, added):
            path = step.model.metrics_variables[number].path
            raise ValueError(
                "With parameter servers, the state of a metric must be a sum over batches. "
                f"Received: {path} is {_show(state)} for two parts of the rows, computed {how}, "
                f"but the states of the parts add up to {_show(added)}. Use a metric whose state "
                "is a sum, such as keras.metrics.Mean, or compute the value in a callback."
            )


def _compare_gradients(step, whole, parts):
    """Compares gradients, and changes of layers' states."""
    gradients, changes = add_gradients(parts)
    for number, (one, other) in enumerate(zip(whole.gradients, gradients)):
        if one is None:
            continue
        one, other = _dense_sum(one), _dense_sum(other)
        if not _are_close(step, one, other):
            raise ValueError(
                "With `max_staleness=0` each batch is split over the workers, so the loss must be "
                f"a mean over rows. Received: the gradient of {step.name_of(number)} is "
                f"{_show(one)} for {whole.rows} rows, but {_show(other)} when they are split in "
                "two. Use a loss that is a mean over rows (reduction='sum_over_batch_size', "
                "without a mask), clip by the optimizer and not in the step, or leave "
                "max_staleness out; each batch then goes to one worker."
            )
    for number, (one, other) in enumerate(zip(whole.changes, changes)):
        if not _are_close(step, one, other):
            raise ValueError(
                "With `max_staleness=0` each batch is split over the workers, so what a step adds "
                "to the state of a layer must be a mean over rows. Received: "
                f"{step.name_of_state(number)} changes by {_show(one)} for {whole.rows} rows, but "
                f"by {_show(other)} when they are split in two. Keep a mean, or the sum in a "
                "metric; or leave max_staleness out; each batch then goes to one worker."
            )


def _dense_sum(gradient):
    """Returns a dense gradient unchanged; of a sparse one, the sum for each row, in order."""
    if not isinstance(gradient, tuple):
        return gradient
    values, ids = gradient
    unique, places = np.unique(ids, return_inverse=True)
    added = np.zeros((len(unique), *values.shape[1:]), values.dtype)
    np.add.at(added, places.ravel(), values)
    return added


def _are_close(step, one, other) -> bool:
    one, other = _as_known(one), _as_known(other)
    if one.dtype.kind not in "fc":
        return bool(np.array_equal(one, other))
    size = max(float(np.max(np.abs(one), initial=0)), float(np.max(np.abs(other), initial=0)))
    dtypes = {layer.compute_dtype for layer in keras_compat.all_layers(step.model)}
    tolerance = max([_TOLERANCE, *(8 * _ROUNDING.get(dtype, 0) for dtype in dtypes)])
    return bool(np.max(np.abs(one - other), initial=0) <= tolerance * size + 1e-7)


def _as_known(values) -> np.ndarray:
    """Returns an array; of bfloat16, which NumPy knows by its size alone, as float32."""
    values = np.asarray(values)
    return values.astype("float32") if values.dtype.kind == "V" else values


def _show(values) -> str:
    values = np.asarray(values).ravel()
    return f"{values[np.argmax(np.abs(values))]:.4g}" if values.size else "nothing"
