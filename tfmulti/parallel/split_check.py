"""Checks before training that a model's batches can be split and its metrics added."""

from __future__ import annotations

import functools
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.parallel.answers import Answer, add_gradients
from tfmulti.parallel.remote_step import RemoteStep
from tfmulti.sharding import replica_slice
from tfmulti.step import normalization
from tfmulti.step.rows import num_rows, some_rows
from tfmulti.verification import messages
from tfmulti.verification.custom_parts import local_normalization

_MOST_ROWS = 48
_TOLERANCE = 1e-3
# What one number is rounded by; rows are added in another order.
_ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7}
# Those of a step that needs more rows, and of a chief that lacks the device or the memory of a
# worker. A lost server has others.
_CANNOT = (
    tf.errors.InvalidArgumentError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnimplementedError,
)


def check(step: RemoteStep, batch, splits: bool, num_workers: int = 2) -> None:
    """Computes a batch in two parts, or two batches, and all at once, and compares.

    A few rows are enough for most steps. A step that needs groups of rows, or as many as a batch
    has, gets a whole batch, and the parts that workers would get.

    Args:
        step: The model's steps.
        batch: A batch.
        splits: Whether batches are split over workers, whose gradients are then added.
        num_workers: The number of workers.

    Raises:
        ValueError: If the parts do not add up: where batches are split, for a step that cannot
            compute parts, and for a loss or a change of a layer's state that is not a mean over
            rows; for metrics whose states cannot be added.
    """
    rows = int(num_rows(batch))
    if rows < 2:
        return
    layers = local_normalization(step.model)
    if layers and splits:
        warnings.warn(
            "Batch normalization uses the statistics of each worker's rows, so the result "
            "differs from that of one device. For the same result use layer normalization.",
            stacklevel=4,
        )
    few = min(rows, _MOST_ROWS)
    if splits:
        ranges = _ranges_of_workers(rows, num_workers)
        divisions = [_Split(step, batch, few, _two_ranges(few)), _Split(step, batch, rows, ranges)]
    else:
        divisions = [_Repeated(step, batch, each) for each in sorted({few, rows})]
    # The rest of the model is compared.
    with normalization.as_in_inference(layers):
        _compare(step, divisions)


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


class _Repeated:
    """A batch that is computed twice: by two workers, and by one after the other."""

    ranges = None

    def __init__(self, step, batch, rows):
        self._step, self.batch = step, some_rows(batch, 0, rows)

    @functools.cached_property
    def _first(self) -> Answer:
        return self._step.compute_here(self.batch)

    def whole(self) -> Answer:
        """Computes it after it has been computed before."""
        return self._step.compute_here(self.batch, self._first.metrics)

    def parts(self) -> list[Answer]:
        """Returns the answers of the two workers."""
        return [self._first] * 2

    def compare(self, whole, parts):
        """Compares what is added up with what comes one after the other."""
        _compare_metrics(self._step, whole, parts, "two batches, computed one after the other")


class _Split:
    """A batch that is split into ranges of rows."""

    def __init__(self, step, batch, rows, ranges):
        self._step, self.batch, self.rows = step, some_rows(batch, 0, rows), rows
        self.ranges = ranges

    def whole(self, batch=None) -> Answer:
        """Computes all rows of it, or of another batch, at once."""
        return self._step.compute_here(self.batch if batch is None else batch)

    def parts(self, batch=None) -> list[Answer]:
        """Computes each part of it, or of another batch."""
        batch = self.batch if batch is None else batch
        return [
            self._step.compute_here(some_rows(batch, start, stop), share=(stop - start) / self.rows)
            for start, stop in self.ranges
        ]

    def compare(self, whole, parts):
        """Compares the batch with the sum of its parts, and some variations of it."""
        # First: what is wrong in a loss is wrong in its metric, too.
        _compare_gradients(self._step, whole, parts)
        _compare_metrics(self._step, whole, parts, "two parts of the rows, computed at once")
        for other in _variations(self._step.model, self.batch, self.rows):
            try:
                whole, parts = self.whole(other), self.parts(other)
            except tf.errors.InvalidArgumentError:
                # Made-up labels need not be classes.
                continue
            if all(map(_is_finite, whole.gradients)):
                _compare_gradients(self._step, whole, parts)


def _compare(step, divisions):
    with keras_compat.noting_reductions() as reductions:
        division, whole, parts = _first_computed(divisions)
    if division.ranges:
        _refuse_other_divisors(reductions)
    if isinstance(parts, Exception):
        _tell_of_failure(division, whole, parts)
    elif step.is_random:
        warnings.warn(
            "`train_step` was not verified: it draws random numbers that cannot be repeated, as "
            "tf.random does. With keras.random it would be.",
            stacklevel=5,
        )
    else:
        division.compare(whole, parts)


def _first_computed(divisions) -> tuple:
    """Returns the first division that can be computed, with its answers; else errors of the last.

    Returns:
        The division; its answer to the whole, or None; those to the parts, or an error.
    """
    for division in divisions:
        whole = None
        try:
            whole = division.whole()
            return division, whole, division.parts()
        except _CANNOT as caught:
            error = caught
    return division, whole, error


def _tell_of_failure(division, whole, error):
    """Raises ValueError for a step that computes a batch and not its parts, and else warns."""
    if whole is None or not division.ranges:
        warnings.warn(
            "`train_step` was not verified: it cannot be computed by the chief. "
            f"Received: {messages.shorten(error)}.",
            stacklevel=6,
        )
        return
    sizes = " and ".join(str(stop - start) for start, stop in division.ranges)
    raise ValueError(
        "With `max_staleness=0` each batch is split over the workers, so `train_step` must be able "
        f"to compute parts of a batch. Received: parts of {sizes} rows, with which it fails: "
        f"{messages.shorten(error)}. Use a loss that takes any number of rows, a batch size whose "
        "parts have whole groups of rows, or leave max_staleness out; each batch then goes to one "
        "worker."
    ) from error


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


def _two_ranges(rows) -> list[tuple[int, int]]:
    first = _rows_of_first_part(rows)
    return [(0, first), (first, rows)]


def _ranges_of_workers(rows, num_workers) -> list[tuple[int, int]]:
    ranges = [replica_slice(rows, num_workers, part) for part in range(num_workers)]
    return [(start, stop) for start, stop in ranges if stop > start]


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


def _compare_metrics(step, whole, parts, what):
    first = step.first_metrics
    for number, (state, begin) in enumerate(zip(whole.metrics, first)):
        added = begin + sum(part.metrics[number] - begin for part in parts)
        if not _are_close(step, state, added):
            path = step.model.metrics_variables[number].path
            raise ValueError(
                "With parameter servers, the state of a metric must be a sum over batches. "
                f"Received: {path} is {_show(state)} for {what}, but the states of each add "
                f"up to {_show(added)}. Use a metric whose state is a sum, such as "
                "keras.metrics.Mean, or compute the value in a callback."
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
