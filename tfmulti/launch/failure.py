"""Which worker failed first, how, and what it said last."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

from tfmulti.cluster import environment

_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"(^|\s)error: ")
# Lines of C++ and absl logs, which follow a traceback without an empty line.
_LOG_LINE = re.compile(r"([IWEF]\d{4} |\d{4}-\d\d-\d\d |\(--traceback)")
_MAX_LINES = 40
_MAX_MESSAGE_LINES = 12
_LAST_LINES = 5


@dataclasses.dataclass(frozen=True)
class Ended:
    """A worker that has ended.

    Attributes:
        index: Its index.
        returncode: Its exit code; negative where a signal ended it.
        seconds: Seconds from its start to its end.
    """

    index: int
    returncode: int
    seconds: float

    @property
    def exit_code(self) -> int:
        """The exit code as a shell tells it: 128 and the number of a signal."""
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    def describe(self) -> str:
        """Says how it ended.

        Example:
        >>> Ended(1, -9, 12.3).describe(), Ended(1, 3, 0.5).describe()
        ('was ended by SIGKILL after 12.3 s', 'failed with exit code 3 after 0.5 s')
        """
        if self.returncode < 0:
            try:
                name = signal.Signals(-self.returncode).name
            except ValueError:
                name = f"signal {-self.returncode}"
            return f"was ended by {name} after {self.seconds:.1f} s"
        return f"failed with exit code {self.returncode} after {self.seconds:.1f} s"


def first_failure(ended: Sequence[Ended]) -> Ended | None:
    """Returns the first that failed, in the order given; who lost a peer only if no other did.

    Example:
    >>> first_failure([Ended(0, 144, 1.0), Ended(2, 0, 1.1), Ended(1, 1, 1.2)]).index
    1
    """
    failed = [each for each in ended if each.returncode]
    causes = [each for each in failed if each.returncode != environment.PEER_LOST]
    return next(iter(causes or failed), None)


def last_words(text: str) -> str:
    r"""Returns the traceback or the error that a log ends with, else its last lines.

    Example:
    >>> last_words("Epoch 1\nerror: No data. Received: 0.\n(--traceback shows more)\n")
    'error: No data. Received: 0.'
    """
    lines = text.splitlines()
    start = max((i for i, line in enumerate(lines) if line.startswith(_TRACEBACK)), default=None)
    block = [] if start is None else _read_traceback(lines[start:])
    after = 0 if start is None else start + len(block)
    errors = [i for i in range(after, len(lines)) if _ERROR.search(lines[i].lower())]
    if errors:
        block = _read_message(lines[errors[-1] :])
    elif not block:
        block = lines[-_LAST_LINES:]
    if len(block) > _MAX_LINES:
        block = [block[0], "  ...", *block[-_MAX_LINES:]]
    return "\n".join(block)


def _read_traceback(lines) -> list[str]:
    """Takes the frames, which are indented, and the message after them."""
    frames = 1
    while frames < len(lines) and lines[frames].startswith(" "):
        frames += 1
    return lines[:frames] + _read_message(lines[frames:])


def _read_message(lines) -> list[str]:
    """Takes an error's line and those after it: messages of TensorFlow have empty lines too."""
    message = lines[:1]
    for line in lines[1:_MAX_MESSAGE_LINES]:
        if _LOG_LINE.match(line):
            break
        message.append(line)
    while message and not message[-1].strip():
        message.pop()
    return message
