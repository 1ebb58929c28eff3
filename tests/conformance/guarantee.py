"""What a guarantee is, and where it is tried."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

TOLERANCE = 1e-6
# Two orders of the same rows differ by rounding alone; a run may differ by ten times as much.
NOISE_FACTOR = 10
# What may come of a guarantee on several replicas: one device's result alone, or that or
# an error in place of the first update that says what cannot be had.
EXACT, TOLD = "exact", "told"


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """A small training that must end as on one device, whatever the strategy.

    Attributes:
        name: Plain words, for the table.
        rows: What is known of stock Keras, by short labels; for the JSON only.
        create: Function of `wrap` that returns a compiled model; `wrap` takes the optimizer.
        data: Function of the number of rows that returns `(x, y)` or `(x, y, weights)`.
        num_rows: Rows to train on.
        batch_size: The global batch size.
        epochs: Epochs to train.
        feed: How the rows come to `fit`; see `feeds`.
        remainder: As for `distribute_train`.
        convert: Function of a batch, for kinds of tensors that NumPy lacks.
        fit: More arguments of `fit`.
        validate: Whether to validate, evaluate and predict too.
        policy: Keras's dtype policy.
        own_seeds: Whether each worker seeds its random numbers otherwise.
        run: Function of the guarantee and the place, for what is more than one `fit`.
        tolerance: The difference that rounding may make.
        refused: A part of the error that several replicas must raise.
        must: `EXACT`, or `TOLD` for what need not be exact on several replicas, but may never
            differ without a word: see `compare.is_told`.
        on_difference: As in `create_strategy`.
        ordered: Whether the order of a batch's rows matters, so that no noise can be measured.
        judge: Function of all workers' results that returns what is seen, for guarantees that
            are a property; it raises AssertionError where they are broken.
        stock_workers: Whether to try it on two stock workers as well.
    """

    name: str
    create: Callable
    rows: str = ""
    data: Callable | None = None
    num_rows: int = 33
    batch_size: int = 16
    epochs: int = 2
    feed: str = "pipeline"
    remainder: str = "uneven"
    convert: Callable | None = None
    fit: dict = dataclasses.field(default_factory=dict)
    validate: bool = False
    policy: str = "float32"
    own_seeds: bool = False
    run: Callable | None = None
    tolerance: float = TOLERANCE
    refused: str = ""
    must: str = EXACT
    on_difference: str = "error"
    ordered: bool = False
    judge: Callable | None = None
    stock_workers: bool = False


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a guarantee is tried.

    Attributes:
        strategy: A strategy of tfmulti or of stock TensorFlow, or None for plain Keras.
        stock: Whether tfmulti must have no part in it.
        worker: Number of this worker, from 0.
        order: Which order the rows have within each batch; 0 is their own.
    """

    strategy: Any = None
    stock: bool = False
    worker: int = 0
    order: int = 0

    def scope(self):
        """The scope to make models in."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def wrap(self, optimizer, **settings):
        """Makes an optimizer distributed, where the place is tfmulti's."""
        if self.stock or self.strategy is None:
            return optimizer
        import tfmulti

        return tfmulti.DistributedOptimizer(optimizer, **settings)

    def local_values(self, variable) -> list:
        """The values that this process's replicas have of a Keras variable."""
        if self.strategy is None:
            return [variable.numpy()]
        if not getattr(variable, "is_here", True):
            return []
        values = self.strategy.experimental_local_results(variable.value)
        return [value.numpy() for value in values]
