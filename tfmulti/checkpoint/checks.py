"""What checkpoints need of a `fit`: its data, its model, and a finite loss."""

from __future__ import annotations

import keras
import numpy as np

from tfmulti import marks
from tfmulti.data.epochs import EpochDataset


def check_given(dataset, model: keras.Model) -> None:
    """Raises ValueError for data with a position that would not be saved."""
    given = marks.TRAINS_FROM.get(model)
    if dataset is None and isinstance(given, EpochDataset):
        raise ValueError(
            "`Checkpoint` needs `dataset` where `fit` trains from a result of distribute_train, or "
            "a resumed run takes the rows of the first epoch again. Received: dataset=None, and "
            f"data of {given.plan.steps_per_epoch} steps per epoch in `fit`. "
            "Use Checkpoint(folder, dataset=train), with the same result of distribute_train."
        )


def check_model(dataset, model: keras.Model) -> None:
    """Raises ValueError if the model does not train where the data were distributed to."""
    if dataset is not None and model.distribute_strategy is not dataset.strategy:
        raise ValueError(
            "A checkpoint with the position in `dataset` needs a model of that dataset's strategy. "
            f"Received: {model.name!r}, which was created outside of its scope. "
            "Create and compile it within `with strategy.scope():`."
        )


def check_steps(dataset, steps: int | None) -> None:
    """Raises ValueError if the epochs of `fit` differ from those of the data."""
    if dataset is not None and steps != dataset.plan.steps_per_epoch:
        raise ValueError(
            "`fit` must run whole epochs of `dataset`, or the position in it is unknown. "
            f"Received: {steps} steps, and {dataset.plan.steps_per_epoch} per epoch of the data. "
            "Give steps_per_epoch to distribute_train instead."
        )


def check_moved(dataset, began: tuple[int, int]) -> None:
    """Raises ValueError if a step was taken that was none of the data's."""
    if dataset.position == began:
        raise ValueError(
            "`fit` must train from the `dataset` given to `Checkpoint`, or resuming repeats rows. "
            f"Received: a training step that did not advance its position, {began}. Call "
            "model.fit(dataset), with the same result of distribute_train, for a strategy that "
            "create_strategy has made."
        )


def is_ended_by_nan(callbacks, logs) -> bool:
    """Whether a `TerminateOnNaN` ends the run after a step: its weights are of no use."""
    loss = (logs or {}).get("loss")
    watched = any(isinstance(each, keras.callbacks.TerminateOnNaN) for each in callbacks)
    return watched and loss is not None and not np.all(np.isfinite(loss))
