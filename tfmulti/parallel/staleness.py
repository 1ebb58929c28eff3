"""Bounded staleness: which step's gradient may be applied next, and how stale applied ones were.

The staleness of a step is the number of other steps' updates between its read of the weights and
the application of its gradient. Pure arithmetic; no TensorFlow.
"""

from __future__ import annotations

import numpy as np


class StalenessBound:
    """The steps under way, and which of them may be applied without making another too stale.

    At most `bound` other updates may be made between the begin of a step and its application. The
    oldest step may always be applied. A younger one may be applied if afterwards all older ones can
    still be applied in time, the oldest first. With at most `bound + 1` steps under way this is
    always possible, so nobody waits forever. (Limiting the number of steps under way is not enough:
    while a slow worker computes one step, a fast one can make any number of updates.)

    Args:
        bound: The largest allowed staleness; None for no bound.

    Example:
        >>> steps = StalenessBound(1)
        >>> steps.begin("slow"), steps.begin("fast")
        (None, None)
        >>> steps.may_apply("fast")
        True
        >>> steps.apply("fast")
        1
        >>> steps.begin("next")
        >>> steps.may_apply("next"), steps.may_apply("slow")
        (False, True)
    """

    def __init__(self, bound: int | None):
        self.bound = bound
        self.updates = 0
        self._began: dict[object, int] = {}

    def __len__(self):
        return len(self._began)

    @property
    def limit(self) -> int | None:
        """The largest number of steps under way; None for any."""
        return None if self.bound is None else self.bound + 1

    def begin(self, step) -> None:
        """Records a step, which may read the weights from now on."""
        self._began[step] = self.updates

    def may_apply(self, step) -> bool:
        """Whether a step may be applied now."""
        if self.bound is None:
            return True
        for place, (other, began) in enumerate(self._began.items()):
            if other == step:
                return True
            if began + self.bound < self.updates + 1 + place:
                return False
        raise KeyError(step)

    def apply(self, step) -> int:
        """Records that a step has been applied; returns the number of updates so far."""
        del self._began[step]
        self.updates += 1
        return self.updates


def summarize(staleness: list[int]) -> dict[str, float]:
    """Returns the mean, 95th percentile and maximum staleness, by their names in the history.

    Example:
        >>> summarize([0, 1, 1, 2])["staleness_mean"]
        1.0
    """
    values = np.asarray(staleness or [0])
    return {
        "staleness_mean": float(values.mean()),
        "staleness_p95": float(np.percentile(values, 95)),
        "staleness_max": float(values.max()),
    }
