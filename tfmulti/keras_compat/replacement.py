"""What is known of one function of Keras or TensorFlow that is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras

from tfmulti.keras_compat import (
    replacing,
)

TRIED = {"keras": ("3.12", "3.15"), "tensorflow": ("2.20", "2.21")}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One function of Keras or TensorFlow that is replaced.

    Attributes:
        owner: The class or module.
        name: The function's name.
        make: Function of what was there, and of what `needs` names, that returns the new one.
            None where a context manager replaces it as long as one is in there.
        used: Function of the arguments that tells whether one of our strategies is in use; its
            docstring says where that is.
        cures: The message, or the wrong result, without it.
        canary: The test that fails when it is no longer needed.
        needs: Names of the functions that `install` is given for it.
        arguments: Arguments that it relies on; None for what is no function.
        within: The context manager.
        tried: Lowest and highest versions that it was tried on, by package.
    """

    owner: object
    name: str
    make: Callable | None
    used: Callable | None
    cures: str
    canary: str
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] | None = ()
    within: str = ""
    tried: dict = dataclasses.field(default_factory=lambda: TRIED)

    @property
    def target(self) -> str:
        """Where it is: the class or module and the name."""
        return f"{self.owner.__name__.split('.')[-1]}.{self.name}"

    def install(self, functions) -> None:
        """Puts it in its place, unless it is there; see `install`."""
        needed = [functions[name] for name in self.needs]
        replacing.replace(
            self.owner, self.name, lambda original: self.make(original, *needed), self.used
        )


def of_model(name, make, cures, canary, **more) -> Replacement:
    """An entry for a method of models."""
    return Replacement(keras.Model, name, make, replacing.of_model, cures, canary, **more)


def in_scope(owner, name, make, cures, canary, **more) -> Replacement:
    """An entry that acts in a strategy's scope."""
    return Replacement(owner, name, make, replacing.in_scope, cures, canary, **more)


def for_a_time(owner, name, within, cures, canary, **more) -> Replacement:
    """An entry that a context manager replaces."""
    return Replacement(owner, name, None, None, cures, canary, within=within, **more)
