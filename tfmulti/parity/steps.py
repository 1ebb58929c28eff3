"""One training step of the user's model on one device, as often as an experiment needs it."""

from __future__ import annotations

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfmulti import strategies
from tfmulti.parity.calls import cut_rows
from tfmulti.parity.relations import CLOSE
from tfmulti.parity.training import Case, create_compiled_model, create_data, rounding_of
from tfmulti.sharding import share_slice


@dataclasses.dataclass
class Step:
    """What a training step did.

    Attributes:
        gradients: For each variable that a distributed optimizer updates: its gradient.
        changed: For each variable that changed: its value afterwards.
    """

    gradients: dict[str, np.ndarray]
    changed: dict[str, np.ndarray]


class Bench:
    """A model on one device, a batch, and the shares of it that replicas would see.

    Args:
        case: What is trained on.
        num_shares: Number of shares.
        pretend: Number of replicas that TensorFlow is told there are.

    Attributes:
        model: The model, built.
        batch: A batch of `num_rows` rows.
        parts: The rows of each share: (start, stop).
        weights: The part of all rows that each share has.
        close: How far rounding can take two values apart, relative to the largest of them.
    """

    def __init__(self, case: Case, num_shares: int, pretend: int = 1):
        one = strategies.create_strategy("one_device", devices=["CPU:0"])
        self._strategy = one if pretend == 1 else _create_pretender(pretend)
        train = create_data(case, one)
        batches = list(train.take(case.layout.steps_per_epoch))
        rows = [len(tf.nest.flatten(batch)[0]) for batch in batches]
        # The last batch makes shares of unequal size, if it has rows enough.
        chosen = -1 if rows[-1] >= 2 * num_shares else 0
        self.batch, self.num_rows = batches[chosen], rows[chosen]
        self.parts = [share_slice(self.num_rows, num_shares, n) for n in range(num_shares)]
        self.weights = [(stop - start) / self.num_rows for start, stop in self.parts]
        self.model = create_compiled_model(case, self._strategy, train)
        self.close = max(CLOSE, 10 * rounding_of(self.model))
        self._run(self.batch)
        self._begin = [value.numpy() for value in self._variables()]

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The distributed optimizers of the model."""
        owned = [*vars(self.model).values(), getattr(self.model, "optimizer", None)]
        found = [value for value in owned if getattr(value, "tfmulti_distributed", False)]
        return list({id(optimizer): optimizer for optimizer in found}.values())

    def cut(self, structure, part: tuple[int, int] | None = None):
        """Returns the rows of a share, or the whole."""
        start, stop = part or (0, self.num_rows)
        return cut_rows(structure, self.num_rows, start, stop)

    def step(self, part: tuple[int, int] | None = None) -> Step:
        """Does a training step on a share, or on the whole batch, from the same weights.

        Random numbers are drawn on from where they are.
        """
        self.restore()
        before = {variable.path: _read(variable) for variable in self.model.weights}
        gradients = {}
        with _watched(self.optimizers, gradients):
            self._run(self.cut(self.batch, part))
        after = {variable.path: _read(variable) for variable in self.model.weights}
        changed = {
            path: value for path, value in after.items() if not _is_same(value, before[path])
        }
        return Step(gradients, changed)

    def restore(self) -> None:
        """Makes the weights and the optimizers what they were at the beginning."""
        for variable, value in zip(self._variables(), self._begin):
            variable.assign(value)

    def _variables(self):
        variables = list(self.model.weights)
        for optimizer in self.optimizers:
            variables += optimizer.variables
        return [variable.value for variable in variables]

    def _run(self, batch):
        self._strategy.run(self.model.train_step, args=(batch,))


def _read(variable) -> np.ndarray:
    return keras.ops.convert_to_numpy(variable)


def _is_same(one, other) -> bool:
    return one.tobytes() == other.tobytes()


@contextlib.contextmanager
def _watched(optimizers, gradients):
    """Notes the gradients that optimizers are given."""
    plain = [vars(optimizer)["apply"] for optimizer in optimizers]

    def watch(optimizer, apply):
        def watched_apply(grads, trainable_variables=None):
            grads = list(grads)
            variables = list(trainable_variables or grads)
            for number, (variable, grad) in enumerate(zip(variables, grads)):
                if grad is not None:
                    path = getattr(variable, "path", f"gradient {number}")
                    gradients[path] = tf.convert_to_tensor(grad).numpy()
            return apply(grads, trainable_variables)

        object.__setattr__(optimizer, "apply", watched_apply)

    for optimizer, apply in zip(optimizers, plain):
        watch(optimizer, apply)
    try:
        yield
    finally:
        for optimizer, apply in zip(optimizers, plain):
            object.__setattr__(optimizer, "apply", apply)


def _create_pretender(count):
    """Creates a strategy on one device that says that it has `count` replicas."""
    kind = type(strategies.create_strategy("mirrored", devices=["CPU:0"]))
    pretender = type(kind.__name__, (kind,), {"num_replicas_in_sync": property(lambda _: count)})
    return pretender(["CPU:0"], cross_device_ops=tf.distribute.ReductionToOneDevice())
