"""Which failures a job is restarted after, when, and how often."""

from __future__ import annotations

import collections
import signal
from collections.abc import Callable
from pathlib import Path

from tfmulti.cluster import environment
from tfmulti.launch.logs import WorkerExit
from tfmulti.runtime import command_line

FIRST_DELAY_S = 1.0
"""Seconds until the first restart; each further one waits twice as long."""

LONG_LIFE_S = 60.0
"""Seconds after which a worker that is restarted alone was preempted, not ended at its start."""

PERMANENT = (command_line.ERROR, command_line.BAD_USAGE, 126, 127)
"""Exit codes of errors of the program or the user, and of a command that cannot be run or does not
exist: a restart would not help."""

_LONGEST_DELAY_S = 30.0


class Restarts:
    """Counts the restarts of a job.

    Args:
        most: How many are allowed, besides those after preemptions.
        print_fn: Function that takes a line of text for the user.

    Attributes:
        total: Restarts so far, of all workers or of one.
    """

    def __init__(self, most: int, print_fn: Callable[[str], None]):
        self.total, self._most, self._print_fn = 0, most, print_fn
        self._counted, self._has_progress = 0, False
        self._short_lives: collections.Counter[int] = collections.Counter()

    def delay_of_all(self, first: WorkerExit, progress: Path) -> float | None:
        """Returns the seconds until all workers are restarted; None where they are not. Counts it.

        Args:
            first: The worker that failed first.
            progress: The folder where this start's workers create a file after their first step.
        """
        stepped = _has_files(progress)
        self._has_progress |= stepped
        if first.returncode in PERMANENT and not self._has_progress:
            if self._most:
                self._print_fn(
                    "Not restarted: it failed before the first training step. `fit` and "
                    "`train_on_batch` note that step; a custom loop must create the file that "
                    "TFMULTI_PROGRESS names: see docs/howto/launcher.md."
                )
            return None
        delay = _delay(self.total)
        # With no step done in this start, a job that is preempted again and again gets nowhere.
        restart = self._count(_is_by_sigterm(first) and stepped)
        if restart is None:
            return None
        self._print_fn(f"{restart} of all workers in {delay:g} s")
        return delay

    def delay_of_one(self, ended: WorkerExit, name: str, progress: Path) -> float | None:
        """Returns the seconds until one worker is restarted; None where it is not. Counts it.

        Args:
            ended: How it ended.
            name: Its name.
            progress: See `delay_of_all`.
        """
        by_sigterm, is_short = _is_by_sigterm(ended), ended.seconds < LONG_LIFE_S
        # The steps are the chief's: they tell nothing of a worker that ends at each start.
        restart = self._count(by_sigterm and not is_short and _has_files(progress))
        if restart is None:
            return None
        if not is_short:
            del self._short_lives[ended.index]
        delay = _delay(self._short_lives[ended.index])
        self._short_lives[ended.index] += by_sigterm and is_short
        self._print_fn(
            f"{name} {ended.describe()}. {restart} of {name} in {delay:g} s; the others go on"
        )
        return delay

    def _count(self, is_preempted) -> str | None:
        """Counts a restart, and returns its number as text; None where no more are allowed."""
        if is_preempted:
            self.total += 1
            return f"Restart {self.total} (preempted, not counted)"
        if self._counted >= self._most:
            return None
        self.total, self._counted = self.total + 1, self._counted + 1
        return f"Restart {self._counted} (of {self._most})"


def _is_by_sigterm(ended) -> bool:
    return ended.returncode in (environment.PREEMPTED, -signal.SIGTERM)


def _delay(number) -> float:
    # Bounded before: a job that is often preempted has more restarts than a float exponents.
    return min(FIRST_DELAY_S * 2.0 ** min(number, 10), _LONGEST_DELAY_S)


def _has_files(folder: Path) -> bool:
    # Workers keep temporary folders there, too.
    return any(each.is_file() for each in folder.iterdir())
