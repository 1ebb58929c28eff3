"""One line of the doctor."""

from __future__ import annotations

import dataclasses

OK, WARNING, FAILURE, UNKNOWN = "ok", "warning", "failure", "unknown"


@dataclasses.dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and what to do.

    Attributes:
        name: What was looked at.
        status: `"ok"`, `"warning"` (training works, worse than it could), `"failure"` (it does
            not), or `"unknown"` (the doctor could not look).
        detail: What was found.
        hint: What to do; empty where there is nothing to do.
    """

    name: str
    status: str
    detail: str
    hint: str = ""


def worst(statuses) -> str:
    """Returns the gravest of several statuses.

    >>> worst(["ok", "warning", "unknown"]), worst([])
    ('warning', 'ok')
    """
    order = (OK, UNKNOWN, WARNING, FAILURE)
    return max(statuses, key=order.index, default=OK)


def megabytes(count: float) -> str:
    """Returns a number of bytes for people, in powers of ten.

    >>> megabytes(64e6), megabytes(16.04e9)
    ('64 MB', '16.0 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def plural(count: int, word: str) -> str:
    """Returns a number with its word.

    >>> plural(1, "GPU"), plural(2, "GPU")
    ('1 GPU', '2 GPUs')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
