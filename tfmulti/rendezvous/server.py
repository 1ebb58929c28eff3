"""The server, at one worker's address: it waits for all clients, and sends them the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import math
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

from tfmulti.cluster import Cluster, network
from tfmulti.cluster.errors import show
from tfmulti.rendezvous import messages
from tfmulti.rendezvous.errors import RendezvousError, describe_fault
from tfmulti.rendezvous.messages import Token

_BACKLOG = 1024


def open_listeners(cluster: Cluster) -> list[socket.socket]:
    """Listens at the address of this worker.

    It listens on the interfaces of that address, or on all if this machine does not have it:
    behind network address translation (NAT) the others use another address.

    Raises:
        RendezvousError: If another process listens there, or the port is not permitted.
    """
    host, port = network.split_address(cluster.address)
    try:
        return _listen(_interfaces(host), port) or _listen(network.EVERYWHERE, port)
    except OSError as error:
        raise RendezvousError(
            "The first worker must be able to listen at its address for the rendezvous. "
            f"Received: {cluster.address}: {error.strerror or error}. "
            f"Find the process with `ss -ltnp`, or {network.advise_port(cluster)}"
        ) from error


def _interfaces(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    interfaces = list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))
    # Many systems resolve their own name to 127.0.1.1, which other machines cannot reach.
    if not network.is_ip_address(host) and host != "localhost":
        if any(ipaddress.ip_address(each.split("%")[0]).is_loopback for _, each in interfaces):
            return []
    return interfaces


def _listen(interfaces, port) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for family, address in interfaces:
            try:
                listeners.append(network.open_socket(family, address, port))
                listeners[-1].listen(_BACKLOG)
            except OSError as error:
                # An address of another machine, or a kind of address that this one lacks.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def cut(writer: asyncio.StreamWriter) -> None:
    """Aborts a connection, so that its port does not stay in TIME_WAIT."""
    connection = writer.transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


LINE_S = 5.0
"""Seconds for a new connection to send its first message."""

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]
"""What is said on a connection besides the messages of the rendezvous."""

_GOODBYE_S = 2.0
_MAX_STRANGERS = 128
_MAX_REMARKS = 3


@dataclasses.dataclass
class _Client:
    index: int
    instance: str
    settings: dict
    left_s: float
    machine: str
    context: str
    writer: asyncio.StreamWriter


class Server:
    """The server of a rendezvous at this worker's address.

    Args:
        cluster: The cluster, seen from this worker.
        settings: The settings of this worker.
        token: The token.
        timeout_s: Seconds to wait for all.
        talk: Answers a client until it disconnects; None only waits for that.
        goodbye_s: Seconds that the clients have to disconnect after the outcome.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: dict,
        token: Token,
        timeout_s: float,
        talk: Talk | None = None,
        goodbye_s: float = _GOODBYE_S,
    ):
        self.cluster, self.settings = cluster, settings
        self.token, self.timeout_s = token, timeout_s
        self._talk, self._goodbye_s = talk or (lambda reader, _: reader.read(1)), goodbye_s
        self._changed = asyncio.Event()
        self._refused: set[int] = set()
        self._given_up: set[int] = set()
        self._clients: dict[str, _Client] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._remarks: dict[str, None] = {}
        self._twice: dict | None = None
        self._ended = False

    async def serve(self) -> dict:
        """Waits for all clients, sends them the outcome, and frees the port.

        Returns:
            The outcome: `settings` of those who came, by position, and `missing` with `remarks`,
            or `twice` with `machines`, where something is wrong.

        Raises:
            RendezvousError: If it cannot listen at this worker's address.
        """
        self._deadline = asyncio.get_running_loop().time() + self.timeout_s
        servers = []
        try:
            for listener in open_listeners(self.cluster):
                servers.append(
                    await asyncio.start_server(
                        self._receive,
                        sock=listener,
                        limit=messages.MAX_BYTES,
                        # It listens again, by default with a backlog of 100.
                        backlog=_BACKLOG,
                    )
                )
            await self._until(lambda: self._twice or not self._awaited(), lambda: self._deadline)
            outcome = self._outcome()
            # Who comes now comes for a later rendezvous, and tries again.
            self._ended = True
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

    def give_up(self, index: int) -> None:
        """Stops waiting for a worker once it has connected and been refused."""
        self._given_up.add(index)
        self._changed.set()

    def _missing(self) -> list[int]:
        there = {client.index for client in self._clients.values()} | {self.cluster.worker_index}
        return [index for index in range(self.cluster.num_workers) if index not in there]

    def _awaited(self) -> list[int]:
        hopeless = self._given_up & self._refused
        return [index for index in self._missing() if index not in hopeless]

    def _outcome(self) -> dict:
        settings = {client.index: client.settings for client in self._clients.values()}
        outcome = {"settings": {**settings, self.cluster.worker_index: self.settings}}
        if self._twice:
            return {**outcome, **self._twice}
        if self._missing():
            return {**outcome, "missing": self._missing(), "remarks": list(self._remarks)}
        return outcome

    async def _tell(self, outcome):
        for client in self._clients.values():
            line = messages.write(self.token.secret, "server", client.context, outcome)
            client.writer.write(line)
        limit = asyncio.get_running_loop().time() + self._goodbye_s
        # The client closes the connection, so that this port does not stay in TIME_WAIT.
        await self._until(lambda: not self._clients, lambda: limit)

    async def _receive(self, reader, writer):
        client = None
        self._connections.add(writer)
        try:
            if self._ended or len(self._connections) - len(self._clients) > _MAX_STRANGERS:
                return
            random = secrets.token_hex(16)
            writer.write(messages.write_greeting(random))
            line = await asyncio.wait_for(messages.read_line(reader), LINE_S)
            client = self._admit(line, random, writer)
            if client is None:
                await self._see_out(line, reader)
            else:
                self._changed.set()
                await self._talk(reader, writer)
        except (messages.MessageError, asyncio.TimeoutError, EOFError, OSError) as error:
            self._remark(f"{_machine(writer)} connected, but: {describe_fault(error)}")
        finally:
            if client is not None and self._clients.get(client.instance) is client:
                del self._clients[client.instance]
            self._connections.discard(writer)
            self._changed.set()
            cut(writer)

    def _admit(self, line, random, writer) -> _Client | None:
        """Admits a client; returns None after it has refused one."""
        try:
            content = messages.read(line, self.token.secret, "client", random)
        except messages.MessageError:
            self._refuse(line, writer)
            return None
        client = _read_client(content, random, writer, self.cluster.num_workers)
        others = [other for other in self._clients.values() if other.index == client.index]
        before = self._clients.get(client.instance)
        if before:
            cut(before.writer)
        elif others or client.index == self.cluster.worker_index:
            first = others[0].machine if others else "the worker at this address"
            self._twice = {"twice": client.index, "machines": [first, client.machine]}
        self._clients[client.instance] = client
        # The first timeout ends the rendezvous for all, so that all report the same workers.
        now = asyncio.get_running_loop().time()
        self._deadline = min(self._deadline, now + client.left_s)
        return client

    def _refuse(self, line, writer):
        """Sends the reason unsigned: a client without the token could not check a signature."""
        reason = {"token_is_given": self.token.is_given}
        remark = "another token"
        if not self.token.is_given:
            reason["cluster"] = self.settings["cluster"]
            with contextlib.suppress(messages.MessageError, AttributeError):
                spec = messages.unchecked(line).get("settings").get("cluster")
                if spec != self.settings["cluster"]:
                    remark = f"another cluster, {show(spec)}"
        self._remark(f"{_machine(writer)} connected with {remark}")
        writer.write(messages.write_refusal(reason))

    async def _see_out(self, line, reader):
        """Lets a client read why it was refused, and records the task that it claims."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), _GOODBYE_S)
        with contextlib.suppress(messages.MessageError):
            # Nobody has checked it: it only ends a wait that was given up already.
            claimed = messages.unchecked(line).get("index")
            self._refused |= {claimed} if type(claimed) is int else set()

    def _remark(self, text):
        if len(self._remarks) < _MAX_REMARKS:
            self._remarks[text] = None


def _read_client(content, random, writer, num_workers) -> _Client:
    index, instance = content.get("index"), content.get("instance")
    settings, left_s = content.get("settings"), content.get("left_s")
    is_index = type(index) is int and 0 <= index < num_workers
    is_time = type(left_s) in (int, float) and math.isfinite(left_s)
    if not (is_index and is_time and isinstance(instance, str) and isinstance(settings, dict)):
        raise messages.MessageError("a message of another version")
    machine, context = _machine(writer), random + instance
    return _Client(index, instance, settings, left_s, machine, context, writer)


def _machine(writer) -> str:
    peer = writer.get_extra_info("peername")
    return peer[0] if peer else "somebody"
