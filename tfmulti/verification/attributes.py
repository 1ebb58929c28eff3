"""Python attributes that a step changes, such as a counter of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np

from tfmulti.verification.state import walk

_NUMBERS = (bool, int, float, np.number)
# Keras sets these itself.
_OF_KERAS = ("built", "stop_training")


class Numbers:
    """The numbers that a model, and the objects that it holds, have as Python attributes.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        self._held = [
            (path, thing, name, value)
            for path, thing in walk(model)
            if hasattr(thing, "__dict__")
            for name, value in vars(thing).items()
            if isinstance(value, _NUMBERS) and not name.startswith("_") and name not in _OF_KERAS
        ]

    def changed(self) -> list[str]:
        """Returns the names of those that have another value now."""
        return [
            f"{path}/{name}" if path else name
            for path, thing, name, value in self._held
            if not _is_same(vars(thing).get(name), value)
        ]

    def restore(self) -> None:
        """Gives them the values that they had."""
        for _, thing, name, value in self._held:
            vars(thing)[name] = value


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[Numbers]:
    """Restores the Python numbers of a model on exit."""
    numbers = Numbers(model)
    try:
        yield numbers
    finally:
        numbers.restore()


def _is_same(value, other) -> bool:
    return value is other or (isinstance(value, _NUMBERS) and bool(value == other))
