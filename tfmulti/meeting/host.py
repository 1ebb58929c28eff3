"""The first worker's part: it waits for the others, and tells all of them what all said."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets

from tfmulti.cluster import Cluster
from tfmulti.cluster.errors import show
from tfmulti.meeting import messages
from tfmulti.meeting.errors import describe_fault
from tfmulti.meeting.listening import cut, open_listeners
from tfmulti.meeting.token import Token

LINE_S = 5.0
"""Seconds for a stranger to say who it is."""

_GOODBYE_S = 2.0
_MAX_STRANGERS = 128
_MAX_REMARKS = 3


@dataclasses.dataclass
class _Guest:
    index: int
    instance: str
    notes: dict
    left_s: float
    machine: str
    context: str
    writer: asyncio.StreamWriter


class Host:
    """One meeting, at the first worker.

    Args:
        cluster: The cluster, seen from its first worker.
        notes: What this worker says.
        token: The token.
        timeout_s: Seconds to wait for all.
    """

    def __init__(self, cluster: Cluster, notes: dict, token: Token, timeout_s: float):
        self.cluster, self.notes, self.token, self.timeout_s = cluster, notes, token, timeout_s
        self._guests: dict[str, _Guest] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._remarks: dict[str, None] = {}
        self._twice: dict | None = None
        self._ended = False

    async def hold(self) -> dict:
        """Waits for all, tells them the outcome, and frees the port.

        Returns:
            The outcome: `notes`, or `missing` with `remarks`, or `twice` with `machines`.

        Raises:
            MeetingError: Where nothing can listen at this worker's address.
        """
        self._changed = asyncio.Event()
        self._deadline = asyncio.get_running_loop().time() + self.timeout_s
        servers = []
        try:
            for listener in open_listeners(self.cluster):
                servers.append(
                    await asyncio.start_server(
                        self._receive, sock=listener, limit=messages.MAX_BYTES
                    )
                )
            await self._until(lambda: self._twice or not self._missing(), self._deadline_s)
            outcome = self._outcome()
            await self._tell(outcome)
            return outcome
        finally:
            self._ended = True
            for server in servers:
                server.close()
            for writer in list(self._connections):
                cut(writer)
            # The sockets are closed in the next turns of the loop.
            for _ in range(3):
                await asyncio.sleep(0)

    async def _until(self, is_so, deadline_s):
        clock = asyncio.get_running_loop().time
        while not is_so():
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline_s() - clock())
            except asyncio.TimeoutError:
                return

    def _deadline_s(self) -> float:
        return self._deadline

    def _missing(self) -> list[int]:
        there = {guest.index for guest in self._guests.values()}
        return [index for index in range(1, self.cluster.num_workers) if index not in there]

    def _outcome(self) -> dict:
        if self._twice:
            return self._twice
        if self._missing():
            return {"missing": self._missing(), "remarks": list(self._remarks)}
        said = {guest.index: guest.notes for guest in self._guests.values()}
        return {"notes": {0: self.notes, **said}}

    async def _tell(self, outcome):
        for guest in self._guests.values():
            line = messages.write(self.token.secret, "host", guest.context, outcome)
            guest.writer.write(line)
        limit = asyncio.get_running_loop().time() + _GOODBYE_S
        # Who has read it closes the connection, so that this port does not stay in TIME_WAIT.
        await self._until(lambda: not self._guests, lambda: limit)

    async def _receive(self, reader, writer):
        guest = None
        self._connections.add(writer)
        try:
            if self._ended or len(self._connections) - len(self._guests) > _MAX_STRANGERS:
                return
            random = secrets.token_hex(16)
            writer.write(messages.write_greeting(random))
            line = await asyncio.wait_for(messages.read_line(reader), LINE_S)
            guest = self._admit(line, random, writer)
            if guest is not None:
                self._changed.set()
                await reader.read(1)
        except (messages.BadMessage, asyncio.TimeoutError, EOFError, OSError) as error:
            self._remark(f"{_machine(writer)} came with {describe_fault(error)}")
        finally:
            if guest is not None and self._guests.get(guest.instance) is guest:
                del self._guests[guest.instance]
            self._connections.discard(writer)
            self._changed.set()
            cut(writer)

    def _admit(self, line, random, writer) -> _Guest | None:
        """Takes a worker in; returns None where it is refused, and has been told so."""
        try:
            content = messages.read(line, self.token.secret, "guest", random)
        except messages.BadMessage:
            self._refuse(line, writer)
            return None
        guest = _read_guest(content, random, writer, self.cluster.num_workers)
        others = [other for other in self._guests.values() if other.index == guest.index]
        before = self._guests.get(guest.instance)
        if before:
            cut(before.writer)
        elif others or guest.index == 0:
            first = others[0].machine if others else "the first worker itself"
            self._twice = {"twice": guest.index, "machines": [first, guest.machine]}
        self._guests[guest.instance] = guest
        # The first to run out of time ends it for all, so that all can tell who is missing.
        now = asyncio.get_running_loop().time()
        self._deadline = min(self._deadline, now + guest.left_s)
        return guest

    def _refuse(self, line, writer):
        """Tells why, without a code: who has no token could not check one."""
        reason = {"token_is_given": self.token.is_given}
        remark = "another token"
        if not self.token.is_given:
            reason["cluster"] = self.notes["cluster"]
            with contextlib.suppress(messages.BadMessage, AttributeError):
                theirs = messages.unchecked(line).get("notes").get("cluster")
                if theirs != self.notes["cluster"]:
                    remark = f"another cluster, {show(theirs)}"
        self._remark(f"{_machine(writer)} came with {remark}")
        writer.write(messages.write_refusal(reason))

    def _remark(self, text):
        if len(self._remarks) < _MAX_REMARKS:
            self._remarks[text] = None


def _read_guest(content, random, writer, num_workers) -> _Guest:
    index, instance = content.get("index"), content.get("instance")
    notes, left_s = content.get("notes"), content.get("left_s")
    is_index = type(index) is int and 0 <= index < num_workers
    is_time = type(left_s) in (int, float) and math.isfinite(left_s)
    if not (is_index and is_time and isinstance(instance, str) and isinstance(notes, dict)):
        raise messages.BadMessage("a message of another version")
    machine, context = _machine(writer), random + instance
    return _Guest(index, instance, notes, left_s, machine, context, writer)


def _machine(writer) -> str:
    peer = writer.get_extra_info("peername")
    return peer[0] if peer else "somebody"
