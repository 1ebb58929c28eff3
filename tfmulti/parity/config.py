"""The settings of a comparison, checked before TensorFlow is imported."""

from __future__ import annotations

import dataclasses

from tfmulti.choices import DEFAULT_GLOBAL_BATCH_SIZE, OPTIMIZERS
from tfmulti.settings import check_model, check_settings, setting
from tfmulti.sharding import check_batch_size


@dataclasses.dataclass(frozen=True)
class ParityConfig:
    """One comparison; every setting is a flag of `python -m tfmulti.parity`.

    Raises:
        ValueError: For an invalid value.

    Example:
    >>> ParityConfig(replicas="2,3", workers="2").setups
    (('replicas', 2), ('replicas', 3), ('workers', 2))
    """

    model: str = setting("cnn", "cnn, mlp, or package.module:function.")
    dataset: str = setting(
        "digits", "digits, a tensorflow-datasets name, or package.module:function."
    )
    replicas: str = setting("2,3", "Numbers of replicas on logical CPUs; 0 for none.")
    workers: str = setting("2", "Numbers of worker processes on this machine; 0 for none.")
    steps: int = setting(20, "Steps to train, in two or more short epochs.", at_least=1)
    global_batch_size: int | None = setting(
        None,
        f"Examples per step; by default {DEFAULT_GLOBAL_BATCH_SIZE}, less for few data.",
        at_least=1,
    )
    optimizer: str | None = setting(
        None, "Optimizer of a model that is not compiled. By default adam.", OPTIMIZERS
    )
    learning_rate: float | None = setting(
        None, "Learning rate of a model that is not compiled.", at_least=0.0
    )
    seed: int = setting(0, "Seed of weights, order and randomness.", at_least=0)
    tolerance: float = setting(
        1e-6, "Difference allowed, absolute or relative to one device's value.", at_least=0.0
    )
    timeout: int = setting(600, "Seconds for each configuration.", at_least=1)
    json: str | None = setting(None, "File to write the result to, with every difference.")

    def __post_init__(self):
        check_settings(self)
        check_model(self.model)
        if not self.setups:
            raise ValueError(
                "`replicas` and `workers` must name at least one configuration. "
                f"Received: replicas={self.replicas!r}, workers={self.workers!r}. "
                "Use for example --replicas 2,3."
            )
        largest = max(count for _, count in self.setups)
        if self.global_batch_size is not None:
            check_batch_size(self.global_batch_size, largest)

    @property
    def setups(self) -> tuple[tuple[str, int], ...]:
        """The configurations to compare with one device: `("replicas" or "workers", number)`."""
        chosen = [("replicas", n) for n in _numbers("replicas", self.replicas)]
        return (*chosen, *(("workers", n) for n in _numbers("workers", self.workers)))


def _numbers(name, text) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if parts in (["0"], [""]):
        return []
    if not all(part.isdecimal() and int(part) >= 2 for part in parts):
        raise ValueError(
            f"`{name}` must be numbers from 2, separated by commas, or 0 for none. "
            f"Received: {name}={text!r}. Use for example --{name} 2,3."
        )
    return sorted({int(part) for part in parts})
