"""Connects to another worker: its identity, the round trip, its clock, the bandwidth."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import time

from tfmulti.cluster.network import split_address
from tfmulti.doctor.peer_listener import (
    BUSY,
    BYE,
    GO,
    LINE_S,
    LISTENER,
    LOAD,
    MAX_LOAD_BYTES,
    PING,
    VISITOR,
    Round,
    prepare,
    read_line,
)
from tfmulti.rendezvous import messages
from tfmulti.rendezvous.errors import describe_fault

_RETRY_S = 0.2
_PINGS = 20
_CHUNK = bytes(1 << 20)
_FIRST_LOAD = 1 << 20
_REST_S = (0.01, 0.1)


@dataclasses.dataclass
class Visit:
    """The results of a visit to another worker.

    Attributes:
        index: Its position in `cluster.tasks`.
        notes: What it says of itself; None where it could not be visited.
        round_trip_s: Seconds from a question to its answer, the shortest of several.
        ahead_s: Seconds that its clock is ahead of this worker's.
        bytes_per_s: Speed of sending to it, over one connection.
        fault: Why something is missing.
        refused: Whether it has refused this worker.
        has_no_address: Whether its name is not found here.
    """

    index: int
    notes: dict | None = None
    round_trip_s: float | None = None
    ahead_s: float | None = None
    bytes_per_s: float | None = None
    fault: str = ""
    refused: bool = False
    has_no_address: bool = False


class Visitor:
    """Visits other workers.

    Args:
        round_: The round.
    """

    def __init__(self, round_: Round):
        self.round = round_

    def visit(self, found: Visit) -> None:
        """Connects as often as needed until it succeeds, or the timeout expires.

        Args:
            found: Receives the results.
        """
        while self.round.left_s:
            try:
                self._try(found)
                return
            except TimeoutError:
                found.fault = "no answer"
            except socket.gaierror as error:
                found.fault = describe_fault(error)
                found.has_no_address = not self.round.cluster.names_come_late
                if found.has_no_address:
                    return
            except (OSError, EOFError, messages.MessageError, ValueError) as error:
                found.fault = describe_fault(error)
            if found.notes is not None or found.refused:
                return
            time.sleep(min(_RETRY_S, self.round.left_s))

    def _try(self, found):
        kind, number = self.round.cluster.tasks[found.index]
        host, port = split_address(self.round.cluster.spec[kind][number])
        limit = max(0.1, min(LINE_S, self.round.left_s))
        with socket.create_connection((host, port), timeout=limit) as connection:
            # A connection from a port to itself succeeds although nothing listens.
            if connection.getsockname() == connection.getpeername():
                raise ConnectionRefusedError("connection refused")
            prepare(connection)
            with connection.makefile("rb") as reader:
                found.notes = self._introduce(connection, reader, found)
                if found.notes is None:
                    return
                connection.settimeout(max(1.0, self.round.left_s))
                _measure_time(connection, reader, found)
                found.fault = ""
                if self.round.load_s:
                    self._measure_speed(connection, reader, found)
                connection.sendall(BYE + b"\n")
                with contextlib.suppress(OSError):
                    reader.readline(64)

    def _introduce(self, connection, reader, found) -> dict | None:
        greeting = messages.read_greeting(read_line(reader))
        mine = self.round
        said = {"index": mine.cluster.worker_index, "instance": mine.instance, "round": mine.name}
        connection.sendall(messages.write(self.round.token.secret, VISITOR, greeting, said))
        line = read_line(reader)
        refusal = messages.read_refusal(line)
        if refusal is not None:
            found.refused, found.fault = True, self._why(refusal)
            return None
        context = greeting + self.round.instance
        return messages.read(line, self.round.token.secret, LISTENER, context)["notes"]

    def _why(self, refusal) -> str:
        if self.round.token.is_given or refusal.get("token_is_given"):
            return "it has another TFMULTI_TOKEN, or only one of the two has one"
        return f"it has another cluster: {refusal.get('cluster')}"

    def _measure_speed(self, connection, reader, found):
        size, seconds = _FIRST_LOAD, None
        for _ in range(2):
            seconds = self._load(connection, reader, size)
            if seconds is None:
                found.fault = "no turn came to measure its speed"
                return
            found.bytes_per_s = size / seconds
            size = int(min(max(found.bytes_per_s * self.round.load_s, _FIRST_LOAD), MAX_LOAD_BYTES))

    def _load(self, connection, reader, size) -> float | None:
        """Returns the seconds of sending; None if the timeout expires before both have a turn."""
        while left_s := self.round.left_s:
            if not self.round.loading.acquire(timeout=left_s):
                return None
            try:
                connection.sendall(LOAD + f" {size}\n".encode())
                word = reader.readline(64).strip()
                if word == GO:
                    began = time.perf_counter()
                    for start in range(0, size, len(_CHUNK)):
                        connection.sendall(memoryview(_CHUNK)[: size - start])
                    if not reader.readline(64):
                        raise EOFError
                    return time.perf_counter() - began
                if word != BUSY:
                    raise EOFError
            finally:
                self.round.loading.release()
            # Random delays, so that two workers do not retry at the same time forever.
            time.sleep(random.uniform(*_REST_S))
        return None


def _measure_time(connection, reader, found):
    """The clock is read in the middle of the shortest round trip, as NTP does."""
    for _ in range(_PINGS):
        wall, began = time.time(), time.perf_counter()
        connection.sendall(PING + b"\n")
        line = reader.readline(64)
        seconds = time.perf_counter() - began
        if not line:
            raise EOFError
        if found.round_trip_s is None or seconds < found.round_trip_s:
            found.round_trip_s = seconds
            found.ahead_s = float(line) - (wall + seconds / 2)
