"""Has a model's gradients checked during one `fit`, and not in what comes after it.

A function of a training step is traced with or without the check, so the model has two of them,
which are exchanged when `fit` begins and ends.
"""

from __future__ import annotations

import keras

from tfmulti import marks
from tfmulti.step import finite
from tfmulti.verification import verified
from tfmulti.verification.case import TRAIN


def guard(model: keras.Model) -> finite.FiniteGuard | None:
    """Has the gradients of a model's optimizer checked from now on.

    Args:
        model: The model.

    Returns:
        What checks them; None if the model has no optimizer.
    """
    if model.optimizer is None:
        return None
    found = finite.guard_of(model.optimizer)
    if found is None:
        found = finite.watch(model.optimizer)
        _exchange_function(model)
    return found


def release(model: keras.Model) -> None:
    """Ends the check, if there is one.

    Args:
        model: The model.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and finite.guard_of(optimizer) is not None:
        finite.unwatch(optimizer)
        _exchange_function(model)


def _exchange_function(model):
    now = model.train_function
    other = marks.OTHER_FUNCTION.get(now)
    if other is not None:
        # Nobody has made another one in the meantime. It need not be traced again.
        model.train_function = other
        return
    # What was verified is the step; the check only decides on its update.
    verified.expect_function(model, TRAIN)
    model.make_train_function(force=True)
    if now is not None:
        marks.OTHER_FUNCTION.set(now, model.train_function)
        marks.OTHER_FUNCTION.set(model.train_function, now)
