"""The slots of an optimizer with sharded state: one worker keeps the value of each."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfmulti.step.sharded_state import Shards

_local = threading.local()


class SlotVariable(keras.Variable):
    """A slot of an optimizer, such as a momentum, that one worker keeps.

    On the other workers it has a name, a shape and no memory. A value that is assigned there goes
    to a file, and reading it in a step is an error.

    Attributes:
        owner: The number of the worker that keeps it.
        is_here: Whether that is this worker.
        number: Its place in `Shards.slots`.

    Args:
        shards: The shards of the optimizer.
        owner: The number of the worker that keeps it.
        shape: Its shape.
        initializer: Its initializer.
        dtype: Its dtype.
        name: Its name.
    """

    def __init__(self, shards: Shards, owner: int, shape, initializer, dtype, name: str):
        self.owner, self.is_here, self._shards = owner, owner == shards.worker, shards
        self.number = len(shards.slots)
        self._whole = tf.TensorShape(shape)
        initializer = keras.initializers.get(initializer) if self.is_here else np.zeros([0])
        dtype = dtype or keras.config.floatx()
        super().__init__(initializer, self._whole, dtype, trainable=False, name=name)

    @property
    def shape(self):
        """The shape that the owner's value has."""
        return self._whole

    @property
    def value(self):
        """The owner's `tf.Variable`.

        Raises:
            RuntimeError: On another worker.
        """
        if not self.is_here:
            raise RuntimeError(
                "With shard='state' a slot can be read by its variable's own update alone: one "
                f"worker keeps it. Received: a read of {self.path}, which worker {self.owner} "
                f"keeps, on worker {self._shards.worker}. Update each variable from its own slots, "
                "log no slots in a step, or leave shard out for this optimizer."
            )
        return super().value

    def assign(self, value):
        """Assigns the whole value on the owner; other workers keep it in a file."""
        return super().assign(value) if self.is_here else self._shards.keep_value(self, value)

    def numpy(self) -> np.ndarray:
        """Returns the whole value; see `Shards.read` in `sharded_state`."""
        return self._shards.read(self)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)


@contextlib.contextmanager
def gathering():
    """Makes reading slots a collective within the context, which every worker must enter."""
    previous = getattr(_local, "gathers", False)
    _local.gathers = True
    try:
        yield
    finally:
        _local.gathers = previous


def is_gathering() -> bool:
    """Whether all workers read slots now; see `gathering`."""
    return getattr(_local, "gathers", False)


class KeptValues:
    """Values by number, in files of a temporary folder, with the step at which each was kept."""

    def __init__(self):
        self.steps: dict[int, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="tfmulti_state_")

    def write(self, number: int, value: np.ndarray, step: int) -> None:
        """Writes a value, and the step at which it is known."""
        np.save(self._file(number), value)
        self.steps[number] = step

    def read(self, number: int) -> np.ndarray:
        """Reads a value."""
        return np.load(self._file(number))

    def _file(self, number) -> Path:
        return Path(self._folder.name) / f"{number}.npy"
