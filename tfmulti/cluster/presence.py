"""Whether a task of TensorFlow is running: it listens, and it answers.

The port of a process that is frozen, or whose network is cut, still accepts connections, and those
who wait for it get no error. A gRPC server sends its settings to each new connection immediately,
however busy its program is (RFC 9113, section 3.4).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tfmulti.cluster import network

MISSES = 3
"""After so many connections in a row that were refused, a task has gone."""

SILENCE_S = 10.0
"""After so many seconds without an answer a task counts as lost."""

_CONNECT_S = 2.0
# The length, the type and the flags of a frame, and its stream.
_FRAME_BYTES = 9
NO_ANSWER = "it does not answer (frozen or cut off)"
THERE, SILENT, GONE = "there", "silent", "gone"


def is_reachable(address: str) -> bool:
    """Whether a task listens at an address, and answers."""
    return probe(address) == THERE


def probe(address: str, timeout_s: float = _CONNECT_S) -> str:
    """Returns `THERE` for a task that answers, `SILENT` for one that does not, else `GONE`.

    Args:
        address: Its host and port.
        timeout_s: Seconds to wait for a connection, and for an answer.
    """
    try:
        connection = socket.create_connection(network.split_address(address), timeout=timeout_s)
    except TimeoutError:
        return SILENT
    except OSError:
        return GONE
    with connection:
        try:
            return THERE if connection.recv(_FRAME_BYTES) else GONE
        except TimeoutError:
            return SILENT
        except OSError:
            return GONE


class Presence:
    """The state of a task over successive checks.

    Args:
        address: Its host and port.
        probe_fn: Function of an address, as `probe`.
        clock: Returns seconds.

    Attributes:
        has_been_there: Whether it has ever answered.

    Example:
        >>> presence = Presence("127.0.0.1:1", probe_fn=lambda address: GONE)
        >>> [presence.check() for _ in range(3)]
        [None, None, 'nothing listens there']
    """

    def __init__(
        self,
        address: str,
        probe_fn: Callable[[str], str] = probe,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address = address
        self._probe, self._clock = probe_fn, clock
        self._misses, self._silent_since = 0, None
        self.has_been_there = False

    def check(self) -> str | None:
        """Looks once more; returns why the task counts as lost, or None."""
        return self.note(self._probe(self.address))

    def note(self, seen: str) -> str | None:
        """Notes what was seen; returns why the task counts as lost, or None."""
        now = self._clock()
        self._misses = self._misses + 1 if seen == GONE else 0
        if seen != SILENT:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        self.has_been_there |= seen == THERE
        if self._misses >= MISSES:
            return "nothing listens there"
        if self._silent_since is not None and now - self._silent_since >= SILENCE_S:
            return NO_ANSWER
        return None
