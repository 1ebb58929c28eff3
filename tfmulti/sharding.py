"""The arithmetic of data: which rows each replica sees at each step of each epoch.

Everything here is a pure function of numbers. The order of examples depends on
(seed, epoch) alone, never on the number of replicas or workers, so step t of epoch e
holds the same examples on one device and on any cluster.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from tfmulti.settings import check_choice, check_whole_number

REMAINDERS = ("uneven", "pad", "drop", "repeat_first")

# Padding rows have weight -0.0. The sign distinguishes them from a zero weight of the user, which
# still counts in the denominator of a mean; a padding row must not.
PADDING_WEIGHT = np.float32(-0.0)


def is_padding(weights: np.ndarray) -> np.ndarray:
    """Returns which weights are those of padding rows.

    >>> is_padding(np.float32([1.0, 0.0, -0.0]))
    array([False, False,  True])
    """
    return (weights == 0) & np.signbit(weights)


def epoch_order(num_examples: int, seed: int | None, epoch: int) -> np.ndarray:
    """Returns the order of the examples in one epoch.

    Uses NumPy's frozen generators (`SeedSequence`, `MT19937`, `RandomState`), whose
    streams are guaranteed not to change between releases.

    Args:
        num_examples: Number of examples in the split.
        seed: Determines the order together with `epoch`; None keeps the order of the data.
        epoch: Number of the epoch, from 0.

    Returns:
        An int64 array of shape `(num_examples,)`.

    Example:
    >>> epoch_order(4, seed=None, epoch=3).tolist()
    [0, 1, 2, 3]
    >>> sorted(epoch_order(4, seed=7, epoch=0).tolist())
    [0, 1, 2, 3]
    """
    if seed is None:
        return np.arange(num_examples, dtype=np.int64)
    sequence = np.random.SeedSequence([seed, epoch])
    generator = np.random.RandomState(np.random.MT19937(sequence))
    return generator.permutation(num_examples).astype(np.int64)


def replica_slice(num_rows: int, num_replicas: int, number: int) -> tuple[int, int]:
    """Returns the half-open range of rows of a global batch that make one replica batch.

    Replica batches are contiguous, and their sizes differ by at most one; larger ones come first.

    >>> [replica_slice(5, 3, r) for r in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    >>> [replica_slice(1, 2, r) for r in range(2)]
    [(0, 1), (1, 1)]
    """
    size, longer = divmod(num_rows, num_replicas)
    start = number * size + min(number, longer)
    return start, start + size + (number < longer)


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Assigns the examples of a split to steps and replicas.

    Attributes:
        num_examples: Number of examples in the split.
        global_batch_size: Examples per step over all replicas.
        num_replicas: Number of replicas in the job.
        seed: Seed of the order; None reads the examples in their own order.
        remainder: What to do with the last, short batch: `"uneven"` keeps it short, `"pad"` fills
            it with rows of weight 0, `"drop"` drops it, and `"repeat_first"` fills short replica
            batches with the first examples of the split.
        steps: Steps per epoch. Defaults to one pass over the split; with another number, epochs
            divide an endless sequence of passes.

    Raises:
        ValueError: For invalid numbers.

    Example:
    >>> plan = ShardPlan(num_examples=43, global_batch_size=16, num_replicas=2, seed=None)
    >>> plan.steps_per_epoch
    3
    >>> [plan.replica_batch(0, 2, number)[0].tolist() for number in range(2)]
    [[32, 33, 34, 35, 36, 37], [38, 39, 40, 41, 42]]
    """

    num_examples: int
    global_batch_size: int
    num_replicas: int = 1
    seed: int | None = 0
    remainder: str = "uneven"
    steps: int | None = None

    def __post_init__(self):
        advice = "Use 'uneven' to keep every example once."
        check_choice("remainder", self.remainder, REMAINDERS, advice)
        check_batch_size(self.global_batch_size, self.num_replicas)
        if self.num_examples < 1:
            raise ValueError(
                "A dataset must hold at least one example. "
                f"Received: num_examples={self.num_examples}. Check the split and its filters."
            )
        advice = "Leave it out for one pass an epoch."
        check_whole_number("steps_per_epoch", self.steps, advice, optional=True)
        if self.remainder == "drop" and self.num_examples < self.global_batch_size:
            raise ValueError(
                '`remainder="drop"` keeps whole batches only, and there is none. '
                f"Received: num_examples={self.num_examples}, "
                f"global_batch_size={self.global_batch_size}. "
                'Use a smaller batch size or `remainder="uneven"`.'
            )

    @property
    def steps_per_pass(self) -> int:
        """Steps in one pass over the split."""
        if self.remainder == "drop":
            return self.num_examples // self.global_batch_size
        return -(-self.num_examples // self.global_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch: one pass, unless `steps` says otherwise."""
        return self.steps or self.steps_per_pass

    @property
    def has_static_shapes(self) -> bool:
        """Whether every replica batch of every step has the same number of rows."""
        if self.global_batch_size % self.num_replicas:
            return False
        return self.remainder in ("pad", "drop") or not self.num_examples % self.global_batch_size

    def locate(self, epoch: int, step: int) -> tuple[int, int]:
        """Returns the pass over the split and the step in it, for a step of an epoch."""
        return divmod(epoch * self.steps_per_epoch + step, self.steps_per_pass)

    def count(self, epoch: int, step: int) -> int:
        """Returns the number of rows of a global batch, without padding."""
        start = self.locate(epoch, step)[1] * self.global_batch_size
        rows = min(self.global_batch_size, self.num_examples - start)
        return rows + (-rows % self.num_replicas if self.remainder == "repeat_first" else 0)

    def count_before(self, epoch: int, step: int = 0) -> int:
        """Returns the number of rows before a step of an epoch, without padding."""
        passes, steps = self.locate(epoch, step)
        # All batches of a pass are like the first, but for the last one.
        first, last = self.count(0, 0), self.count(0, self.steps_per_pass - 1)
        return passes * ((self.steps_per_pass - 1) * first + last) + steps * first

    def batch(self, epoch: int, step: int) -> tuple[np.ndarray, int]:
        """Returns one global batch.

        Args:
            epoch: Number of the epoch, from 0.
            step: Number of the step in the epoch, from 0.

        Returns:
            The row numbers, int64 of shape `(rows,)`, and how many of them, from the first, are
            not padding.
        """
        number, step_in_pass = self.locate(epoch, step)
        order = _cached_order(self.num_examples, self.seed, number)
        start = step_in_pass * self.global_batch_size
        rows = order[start : start + self.global_batch_size]
        num_real = self.count(epoch, step)
        if self.remainder == "pad":
            rows = np.concatenate([rows, np.resize(rows, self.global_batch_size - len(rows))])
        if self.remainder == "repeat_first":
            first = np.arange(num_real - len(rows), dtype=np.int64) % self.num_examples
            rows = np.concatenate([rows, first])
        return rows, num_real

    def replica_batch(self, epoch: int, step: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of one replica batch.

        Args:
            epoch: Number of the epoch, from 0.
            step: Number of the step in the epoch, from 0.
            number: Index of the replica batch, from 0, in the order of the global batch.

        Returns:
            The row numbers, int64 of shape `(rows,)`, and their weights, float32 of the
            same shape: 1, or `PADDING_WEIGHT` for padding.
        """
        rows, num_real = self.batch(epoch, step)
        start, stop = replica_slice(len(rows), self.num_replicas, number)
        weights = np.where(np.arange(start, stop) < num_real, np.float32(1), PADDING_WEIGHT)
        return rows[start:stop], weights.astype(np.float32)


@functools.lru_cache(maxsize=4)
def _cached_order(num_examples: int, seed: int | None, number: int) -> np.ndarray:
    order = epoch_order(num_examples, seed, number)
    order.setflags(write=False)
    return order


def check_batch_size(global_batch_size: int, num_replicas: int) -> None:
    """Raises ValueError unless it is a whole number that gives every replica a row."""
    check_whole_number("global_batch_size", global_batch_size, "Use for example 64.")
    if global_batch_size < num_replicas:
        raise ValueError(
            "`global_batch_size` must be at least the number of replicas. "
            f"Received: global_batch_size={global_batch_size}, num_replicas={num_replicas}. "
            f"Use {num_replicas} or more."
        )
