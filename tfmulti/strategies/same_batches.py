"""Compares the batches that workers read: each takes its rows of every batch, so all must be alike.

What they give to `train_on_batch` are their own rows, and must not be alike.

Batches of a pass are compared after the steps 1, 2, 3, 5, 8, 13, ... Labels that differ are an
error: rows would come twice or never. Inputs alone can differ by a random change without a seed.
"""

from __future__ import annotations

import warnings

import keras

from tfmulti import marks, topology
from tfmulti.step.digests import NUMBERS, Digest
from tfmulti.strategies import coordination
from tfmulti.strategies.nested_calls import StepsTaken

_ADVICE = (
    "Make the batches alike on every worker: call keras.utils.set_random_seed with one number "
    "before the data are made; seed random numbers of NumPy and PyTorch, which it may not reach "
    "(np.random.default_rng(1), torch.manual_seed(1)); sort what comes from a Python set or a "
    "folder; give interleave a cycle_length; and read no batch on one worker alone."
)

_PARTS_OF = ("train_on_batch", "test_on_batch")
# Their calls whose rows are compared.
_CALLS = (1, 2, 3, 5, 8)


class BatchComparison:
    """Compares the batches that workers take steps with, for one function of a step.

    Args:
        model: The model.
        kind: `"train"` or `"test"`.
    """

    def __init__(self, model: keras.Model, kind: str):
        self._model, self._kind = model, kind
        self._taken, self._has_warned = StepsTaken(), False

    def after(self, iterator, steps: int) -> None:
        """Compares batches after some steps; a collective, which all workers call alike.

        Args:
            iterator: The iterator that gave the batches.
            steps: How many steps were taken.

        Raises:
            ValueError: If labels differ.
        """
        taken = self._taken.add(iterator, steps)
        first = taken - steps
        samples = marks.SAMPLES.get(self._model).get(self._kind)
        if samples is None or samples.digests is None:
            return
        for number in NUMBERS:
            if first <= number < taken:
                self._compare(number, *samples.digests.at(number))

    def _compare(self, number, inputs, others):
        strategy = self._model.distribute_strategy
        place = f"in batch {number + 1} of this pass"
        worker = topology.worker_name(strategy)
        if _differ(strategy, others):
            raise ValueError(
                "All workers must read the same batches: each takes its rows of every batch, and "
                f"others would come twice or never. Received: {place} the labels on {worker} "
                f"differ from those on other workers. {_ADVICE}"
            )
        # All workers find the same, and so look alike often.
        if not self._has_warned and _differ(strategy, inputs):
            self._has_warned = True
            warnings.warn(
                f"Workers read different inputs: {place} those on {worker} differ from those on "
                "other workers, though each takes its rows of every batch. If the rows have "
                "another order, some come twice and others never; if they are changed at random, "
                f"the result depends on the number of workers. {_ADVICE}",
                stacklevel=2,
            )


def compare_parts(model: keras.Model, name: str, given: dict) -> None:
    """Warns once where all workers give the same rows to `train_on_batch` or `test_on_batch`.

    It is a collective, as these calls are themselves.

    Args:
        model: The model.
        name: The name of the method.
        given: Its arguments.
    """
    strategy, calls = model.distribute_strategy, marks.PARTS_GIVEN.get(model)
    number = calls.get(name, 0) + 1
    if number > _CALLS[-1] or topology.num_workers(strategy) == 1:
        return
    marks.PARTS_GIVEN.set(model, {**calls, name: number})
    if number not in _CALLS:
        return
    parts = [given.get(each) for each in ("x", "y", "sample_weight")]
    least, most = coordination.min_and_max(strategy, Digest.of_bits(parts))
    if least == most != 0:
        # All workers find the same.
        marks.PARTS_GIVEN.set(model, dict.fromkeys(_PARTS_OF, _CALLS[-1]))
        count = topology.num_workers(strategy)
        warnings.warn(
            f"`{name}` must be given each worker's own part of the batch. Received: the same rows "
            f"on all {count} workers, in call {number}: they count {count} times in sums, such as "
            "a loss with reduction='sum', in metrics that count, and in losses that compare rows. "
            f"Give each worker other rows of the batch, such as x[worker::{count}].",
            stacklevel=2,
        )


def _differ(strategy, digest) -> bool:
    """Whether a digest differs on any worker, where all have read the batch; a collective."""
    pairs = [coordination.min_and_max(strategy, number) for number in digest]
    least, most = (Digest(*numbers) for numbers in zip(*pairs))
    return least.exact > 0 and least.differs(most)
