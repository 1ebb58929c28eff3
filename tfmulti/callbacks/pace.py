"""What `Throughput` counts, and how it tells it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping

NAMES = (
    "examples_per_second",
    "examples_per_second_now",
    "examples_per_second_per_replica",
    "steps_per_second",
    "input_share",
)
"""What an epoch's logs get."""


@dataclasses.dataclass
class TimedSteps:
    """Steps that were timed.

    Attributes:
        steps: How many.
        seconds: How long they took.
        waited: Seconds of these for which they waited for data; None where it is not known.
    """

    steps: int = 0
    seconds: float = 0.0
    waited: float | None = None

    def add(self, other: TimedSteps) -> None:
        """Adds the steps and the seconds of another."""
        self.steps += other.steps
        self.seconds += other.seconds


def describe(found: Mapping[str, float], seconds_left: float | None = None) -> str:
    """Returns a line for people about what `Throughput` adds to the logs.

    >>> describe({"examples_per_second": 1234.5, "input_share": 0.031}, seconds_left=125.0)
    '1,234 examples/s so far, 3% of the time waiting for data, about 0:02:05 left'
    """
    formats = {
        "examples_per_second_now": "{:,.0f} examples/s now",
        "examples_per_second": "{:,.0f} examples/s so far",
        "examples_per_second_per_replica": "{:,.0f} per replica",
        "steps_per_second": "{:,.4g} steps/s",
        "input_share": "{:.0%} of the time waiting for data",
    }
    parts = [text.format(found[name]) for name, text in formats.items() if name in found]
    if seconds_left is not None:
        parts.append(f"about {datetime.timedelta(seconds=round(seconds_left))} left")
    return ", ".join(parts)
