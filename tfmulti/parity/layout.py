"""How much data a comparison trains on: short epochs, each with an uneven last batch."""

from __future__ import annotations

import dataclasses

from tfmulti.parity.config import DEFAULT_GLOBAL_BATCH_SIZE, ParityConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """The steps of a comparison.

    Attributes:
        num_examples: Examples to train on.
        global_batch_size: Examples of a whole batch.
        epochs: Passes over them.
    """

    num_examples: int
    global_batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass, the last of them short."""
        return -(-self.num_examples // self.global_batch_size)

    @property
    def steps(self) -> int:
        """Steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    @property
    def last_batch(self) -> int:
        """Examples of each epoch's last batch."""
        return self.num_examples - (self.steps_per_epoch - 1) * self.global_batch_size

    def describe(self) -> str:
        """Returns the layout in words."""
        whole = self.steps_per_epoch - 1
        batches = f"{whole} {'batch' if whole == 1 else 'batches'} of {self.global_batch_size}"
        batches += f" and one of {self.last_batch}"
        return f"{self.steps} steps: {self.epochs} epochs, each of {batches} examples"


def choose_layout(available: int, config: ParityConfig) -> Layout:
    """Chooses how many of the examples to train on, and in how many epochs.

    The last batch of an epoch does not divide by any configuration's replicas, and training goes on
    after it.

    Args:
        available: Examples there are.
        config: The comparison.

    Raises:
        ValueError: Where there are too few examples.

    Example:
    >>> choose_layout(1437, ParityConfig(steps=20)).describe()
    '20 steps: 2 epochs, each of 9 batches of 64 and one of 31 examples'
    """
    counts = [count for _, count in config.setups]
    size = config.global_batch_size
    if size is None:
        size = max(max(counts), min(DEFAULT_GLOBAL_BATCH_SIZE, available // 3))
    whole = min(-(-config.steps // 2) - 1, (available - 1) // size)
    last = _uneven(min(size - 1, available - whole * size), counts)
    if available < max(counts) or last < 1:
        raise ValueError(
            "The training split must hold more examples than there are replicas. "
            f"Received: {available} examples, global_batch_size={size}, for {max(counts)} "
            "replicas. Use a larger split."
        )
    return Layout(whole * size + last, size, epochs=max(2, -(-config.steps // (whole + 1))))


def _uneven(most: int, counts: list[int]) -> int:
    """Returns a number of rows near `most` / 2 or below it that none of `counts` divides."""
    for rows in range(max(most // 2, 1), 0, -1):
        if all(rows % count for count in counts):
            return rows
    return 0
