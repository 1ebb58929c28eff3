"""Which losses and metrics need the rows of the whole global batch."""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.step import losses, row_axis

# Keras's own losses that return a number for each row, and take labels of 0 for -1 if all labels of
# the batch are 0 or 1.
_HINGES = ("hinge", "squared_hinge")
# In the names of Keras's own losses whose labels have one axis less than the predictions.
_OF_OTHER_RANKS = ("sparse", "ctc")
# Keras's own losses that need the rows of the whole batch.
_OF_THE_BATCH = ("Dice", "Tversky", "Circle", "dice", "tversky", "circle", *_HINGES)


def is_hinge(loss) -> bool:
    """Whether a loss is one of Keras's hinges, which need the labels of the whole batch."""
    return _stock_name(loss) in _HINGES


def is_needed_by_loss(loss, y_true, y_pred) -> bool:
    """Whether a loss needs the rows of the whole batch.

    Args:
        loss: The loss.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
    """
    name = _stock_name(loss)
    if name and not _may_broadcast(name, y_true, y_pred):
        return name in _OF_THE_BATCH
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        # It may do anything with the number of rows.
        return True
    # Keras converts both to the loss's dtype before it calls `call`.
    rows = keras.tree.map_structure(
        lambda part: keras.ops.convert_to_tensor(part, dtype=loss.dtype), (y_true, y_pred)
    )
    return _combines_rows(loss.call, *rows)


def is_needed_by_metric(function: functools.partial, y_true, y_pred) -> bool:
    """Whether a metric that is a mean of a function needs the rows of the whole batch.

    Args:
        function: The function, with its settings.
        y_true: Labels of this replica's rows.
        y_pred: Predictions for them.
    """
    # A loss that is given as a metric is one number, also if its function is one of rows.
    is_loss = isinstance(function.func, keras.losses.Loss)
    name = "" if is_loss else _stock_name(function.func)
    if name and not _may_broadcast(name, y_true, y_pred):
        return name in _OF_THE_BATCH
    return _combines_rows(function, y_true, y_pred)


def _may_broadcast(name, y_true, y_pred) -> bool:
    """Whether the difference of labels and predictions may have two axes of rows.

    Keras makes ranks equal that differ by an axis of size 1. Others are broadcast from the last
    axis, as where a `Flatten` was forgotten: each row is compared with the labels of all.
    """
    if name in _OF_THE_BATCH or any(part in name.lower() for part in _OF_OTHER_RANKS):
        return False
    shapes = [getattr(part, "shape", None) for part in (y_true, y_pred)]
    if None in shapes or any(shape.rank is None for shape in map(tf.TensorShape, shapes)):
        return False
    longer, shorter = sorted(map(list, map(tf.TensorShape, shapes)), key=len, reverse=True)
    return len(longer) - len(shorter) > int(longer[-1:] == [1])


def _stock_name(part) -> str:
    """Returns the name of a function or a class of Keras's own, also that within a loss, or ""."""
    if not keras_compat.is_stock(part):
        # Also a class of the user's own with a function of Keras's, whose result it may change.
        return ""
    kind = getattr(part, "fn", None) or (part if hasattr(part, "__name__") else type(part))
    return getattr(kind, "__name__", "") if keras_compat.is_stock(kind) else ""


def _combines_rows(function, y_true, y_pred) -> bool:
    """Whether a function returns one number for a batch, or numbers for rows that need others."""
    # An eager step has no graph that could be followed.
    follows = not tf.executing_eagerly()
    try:
        # The step calls it once, as one device does: it may draw numbers, or change a variable.
        with keras_compat.scratch_graph(), losses.of_whole_batch():
            return _is_of_batch(function, *_stand_ins((y_true, y_pred)), follows)
    except Exception:
        # It communicates, computes in Python, or has too few rows.
        pass
    try:
        return _is_of_batch(function, y_true, y_pred, follows)
    except (ValueError, tf.errors.InvalidArgumentError):
        # As for want of rows.
        return True


def _stand_ins(structure):
    """Returns placeholders for tensors, of any number of rows, with their masks."""

    def stand_in(part):
        if not tf.is_tensor(part):
            return part
        shape = [None, *part.shape[1:]] if part.shape.rank else part.shape
        return tf.compat.v1.placeholder(part.dtype, shape)

    made = tf.nest.map_structure(stand_in, structure, expand_composites=True)
    parts = zip(tf.nest.flatten(made), tf.nest.flatten(structure))
    for part, original in parts:
        keras_compat.set_mask(part, keras_compat.mask_of(original))
    return made


def _is_of_batch(function, y_true, y_pred, follows) -> bool:
    values = function(y_true, y_pred)
    if values is None or keras.ops.ndim(values) == 0:
        return True
    if not follows or not tf.is_symbolic_tensor(values):
        return False
    given = [
        tensor for tensor in tf.nest.flatten((y_true, y_pred)) if tf.is_symbolic_tensor(tensor)
    ]
    return row_axis.combines_rows(values, [each for each in given if each.shape.rank])
