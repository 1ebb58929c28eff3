"""One round of visits: what its listener and its visitors have in common, and their words."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time

from tfmulti.cluster import Cluster
from tfmulti.meeting.token import Token

VISITOR, LISTENER = "doctor", "doctor's host"
PING, LOAD, BYE = b"ping", b"load", b"bye"
GO, BUSY, DONE = b"go", b"busy", b"done"
MAX_LOAD_BYTES = 1 << 30
LINE_S = 5.0
"""Seconds for a stranger to say who it is."""


@dataclasses.dataclass
class Round:
    """One round of visits, seen from one worker.

    Attributes:
        name: What the round is for; who is in another one comes again later.
        cluster: The cluster, seen from this worker.
        token: The token.
        deadline: `time.monotonic()` at which everything ends.
        load_s: Seconds that measuring one speed should take; 0 measures none.
        loading: Held while this worker measures a speed, so that each measures alone.
        instance: A random name of this worker.
    """

    name: str
    cluster: Cluster
    token: Token
    deadline: float
    load_s: float = 0.0
    loading: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    instance: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))

    @property
    def left_s(self) -> float:
        """Seconds until everything ends, at least 0."""
        return max(0.0, self.deadline - time.monotonic())
