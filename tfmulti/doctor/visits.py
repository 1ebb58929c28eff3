"""Connects each worker of the cluster to each other, and measures the connection.

There is a rendezvous at the address of every worker, not of the first one only: two workers may be
unable to connect although both reach the first, or the first may be missing. After each, the
clients measure their connection to that worker, which the rendezvous before training does not do;
this module has the messages for that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import socket
import time
from collections.abc import Mapping

from tfmulti.cluster import Cluster, environment
from tfmulti.rendezvous.client import Client
from tfmulti.rendezvous.errors import RendezvousError, describe_fault
from tfmulti.rendezvous.messages import MessageError, digest_cluster, find_token, read_line
from tfmulti.rendezvous.server import Server

LOAD_S, ALL_LOADS_S, MEASURING_S = 0.5, 20.0, 60.0
"""Seconds to measure one speed, all speeds of a worker, and all with the waits for a turn."""

_TURN, _GO, _BUSY, _PING, _DONE = b"turn\n", b"go\n", b"busy\n", b"ping\n", b"done\n"
_STALL_S = 10.0
_PINGS = 20
_CHUNK = bytes(1 << 20)
_FIRST_LOAD, _MAX_LOAD = 1 << 20, 1 << 30
_REST_S = (0.01, 0.1)


@dataclasses.dataclass
class Visit:
    """The results of connecting to another worker.

    Attributes:
        index: Its position in `cluster.tasks`.
        came: Whether it has connected to this worker.
        notes: Its description of itself; None if it could not be reached.
        round_trip_s: Seconds from a question to its answer, the shortest of several.
        ahead_s: Seconds that its clock is ahead of this worker's.
        bytes_per_s: Speed of sending to it, over one connection.
        fault: Why a value is missing.
        refused: Whether it has refused this worker.
        has_no_address: Whether its name cannot be resolved here.
    """

    index: int
    came: bool = False
    notes: dict | None = None
    round_trip_s: float | None = None
    ahead_s: float | None = None
    bytes_per_s: float | None = None
    fault: str = ""
    refused: bool = False
    has_no_address: bool = False


class _Visitor:
    """Serves at one worker's address, and visits all others; each measures alone."""

    def __init__(self, cluster, notes, token, timeout_s):
        self._cluster, self._notes, self._token = cluster, notes, token
        self._timeout_s, self._turn = timeout_s, asyncio.Lock()
        others = [index for index in range(cluster.num_workers) if index != cluster.worker_index]
        self._load_s = min(LOAD_S, ALL_LOADS_S / (2 * len(others)))
        self._visits = [Visit(index) for index in others]
        self._server = Server(cluster, notes, token, timeout_s, self._answer, MEASURING_S)

    async def visit_all(self) -> tuple[list[Visit], dict[int, set[str]]]:
        serving = self._server.serve()
        outcomes = await asyncio.gather(serving, *(self._visit(found) for found in self._visits))
        twice: dict[int, set[str]] = {}
        for outcome in outcomes:
            if "twice" in outcome:
                twice.setdefault(outcome["twice"], set()).update(outcome["machines"])
        for visit in self._visits:
            visit.came = visit.index in outcomes[0]["settings"]
        return self._visits, twice

    async def _visit(self, found) -> dict:
        async def measure(reader, writer):
            try:
                await asyncio.wait_for(self._measure(found, reader, writer), MEASURING_S)
            except asyncio.TimeoutError:
                found.fault = "its speed could not be measured in time"
            except (OSError, EOFError, MessageError, ValueError) as error:
                found.fault = f"while its speed was measured: {describe_fault(error)}"

        own = self._cluster, self._notes, self._token, self._timeout_s
        client = Client(*own, found.index, measure)
        try:
            outcome = await client.join()
        except RendezvousError as error:
            found.refused, found.fault = True, str(error)
            self._server.give_up(found.index)
            return {}
        found.notes = outcome.get("settings", {}).get(str(found.index))
        if found.notes is None and client.fault is not None:
            found.fault = describe_fault(client.fault)
            is_unknown = isinstance(client.fault, (socket.gaierror, UnicodeError))
            found.has_no_address = is_unknown and not self._cluster.names_come_late
        return outcome

    async def _measure(self, found, reader, writer):
        while True:
            async with self._turn:
                writer.write(_TURN)
                if await read_line(reader) == _GO:
                    return await _in_thread(writer, _ask, found, self._load_s)
            # Random delays, so that two workers do not retry at the same time forever.
            await asyncio.sleep(random.uniform(*_REST_S))

    async def _answer(self, reader, writer):
        while await read_line(reader) == _TURN:
            if self._turn.locked():
                writer.write(_BUSY)
                continue
            async with self._turn:
                return await _in_thread(writer, _answer_questions)


async def _in_thread(writer, function, *arguments):
    """Hands a connection to blocking code: else asyncio, not the network, would set the speed."""
    writer.transport.pause_reading()
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        connection.settimeout(_STALL_S)
        await asyncio.to_thread(function, connection, *arguments)


def _ask(connection, found, load_s):
    with connection.makefile("rb") as reader:
        for _ in range(_PINGS):
            wall, began = time.time(), time.perf_counter()
            connection.sendall(_PING)
            line = reader.readline(64)
            seconds = time.perf_counter() - began
            if found.round_trip_s is None or seconds < found.round_trip_s:
                found.round_trip_s = seconds
                # The clock is read in the middle of the shortest round trip, as NTP does.
                found.ahead_s = float(line) - (wall + seconds / 2)
        size = _FIRST_LOAD
        for _ in range(2):
            found.bytes_per_s = size / _send(connection, reader, size)
            size = int(min(max(found.bytes_per_s * load_s, _FIRST_LOAD), _MAX_LOAD))


def _send(connection, reader, size) -> float:
    """Returns the seconds that sending takes."""
    connection.sendall(b"load %d\n" % size)
    began = time.perf_counter()
    for start in range(0, size, len(_CHUNK)):
        connection.sendall(memoryview(_CHUNK)[: size - start])
    if not reader.readline(64):
        raise EOFError
    return time.perf_counter() - began


def _answer_questions(connection):
    """Answers until the other side ends the connection."""
    chunk = memoryview(bytearray(len(_CHUNK)))
    connection.sendall(_GO)
    with connection.makefile("rb") as reader:
        while line := reader.readline(64):
            if line == _PING:
                connection.sendall(b"%.9f\n" % time.time())
                continue
            left = int(line.removeprefix(b"load "))
            while left > 0:
                count = reader.readinto(chunk[: min(left, len(chunk))])
                if not count:
                    raise EOFError
                left -= count
            connection.sendall(_DONE)


def visit_all(
    cluster: Cluster, notes: dict, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> tuple[list[Visit], dict[int, set[str]]]:
    """Connects to all other workers, and serves them, until all have connected.

    Args:
        cluster: The cluster, seen from this worker.
        notes: The description for the others, as from `describe_worker`.
        timeout_s: Seconds that all have to connect.
        environ: The environment, with the token.

    Returns:
        What was found at each other worker; and by position the machines of the workers that claim
        the same task.

    Raises:
        RendezvousError: If it cannot listen at this worker's address.
    """
    # Another check reports whether a token is given.
    secret = environ.get(environment.TOKEN)
    token = find_token(cluster, secret or digest_cluster(cluster), {})
    token = dataclasses.replace(token, is_given=bool(secret))
    return asyncio.run(_Visitor(cluster, notes, token, timeout_s).visit_all())
