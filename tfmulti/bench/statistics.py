"""Summary statistics of measured times."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of measured values: median, tenth and ninetieth percentile, mean, number, smallest."""

    median: float
    p10: float
    p90: float
    mean: float
    n: int
    best: float


def summarize(values: Sequence[float]) -> Summary | None:
    """Returns the summary of values; None of none.

    >>> summarize([3.0, 1.0, 2.0]).median, summarize([])
    (2.0, None)
    """
    if not values:
        return None
    ordered = sorted(values)
    return Summary(
        statistics.median(ordered),
        percentile(ordered, 10),
        percentile(ordered, 90),
        statistics.fmean(ordered),
        len(ordered),
        ordered[0],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of values in order, between two of them where it falls there.

    >>> percentile([0.0, 10.0], 90)
    9.0
    """
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def step_seconds(ends: Sequence[float], steps_per_execution: int = 1) -> list[float]:
    """Returns the seconds of each step of a block, from the times at the end of each call.

    The first call of a block begins with the making of an iterator, and is left out; so are two
    more where there are many.

    Args:
        ends: When each call ended.
        steps_per_execution: Steps of one call.

    >>> step_seconds([1.0, 3.0, 5.0], steps_per_execution=2)
    [1.0, 1.0]
    """
    seconds = [(after - before) / steps_per_execution for before, after in zip(ends, ends[1:])]
    return seconds[2:] if len(seconds) >= 8 else seconds
