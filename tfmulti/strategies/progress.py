"""Tells the launcher that training is under way."""

from __future__ import annotations

import os
from pathlib import Path

import keras

from tfmulti.cluster import environment


class Progress(keras.callbacks.Callback):
    """Makes a file once a step is done: what fails before is not worth a restart.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path, self._made = Path(path), False

    def on_train_batch_end(self, batch, logs=None):
        """Makes the file after the first step."""
        if not self._made:
            self._path.touch()
            self._made = True


def callbacks_for(model: keras.Model) -> list[keras.callbacks.Callback]:
    """Returns the callback that a launcher waits for, in a list that is empty without one."""
    path = os.environ.get(environment.PROGRESS)
    ours = getattr(model.distribute_strategy, "repairs_keras", False)
    return [Progress(path)] if path and ours else []
