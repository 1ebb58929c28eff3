"""Compares the batches that workers read: each takes its rows of every batch, so all must be alike.

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


def _differ(strategy, digest) -> bool:
    """Whether a digest differs on any worker, where all have read the batch; a collective."""
    pairs = [coordination.min_and_max(strategy, number) for number in digest]
    least, most = (Digest(*numbers) for numbers in zip(*pairs))
    return least.exact > 0 and least.differs(most)
