"""The listener of one worker while the doctors of all workers connect to one another."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import struct
import threading
import time

from tfmulti.cluster import Cluster
from tfmulti.rendezvous import messages
from tfmulti.rendezvous.messages import Token
from tfmulti.rendezvous.server import open_listeners

VISITOR, LISTENER = "doctor", "doctor's host"
PING, LOAD, BYE = b"ping", b"load", b"bye"
GO, BUSY, DONE = b"go", b"busy", b"done"
MAX_LOAD_BYTES = 1 << 30
LINE_S = 5.0
"""Seconds for a new connection to send its first message."""


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


_LOOK_S = 0.1
_MARGIN_S = 5.0
_CHUNK = 1 << 20
_MAX_VISITORS = 4096


class Listener:
    """Listens at this worker's address, and answers visitors, until it is left.

    Args:
        round_: The round.
        notes: What visitors are told.

    Attributes:
        came: Positions in `cluster.tasks` of those that have come.
        left: Positions of those that are done.
        turned_away: Positions that visitors without the token have claimed; nobody has checked.
        twice: Position -> machines of those that say they are the same worker.
    """

    def __init__(self, round_: Round, notes: dict):
        self.round, self.notes = round_, notes
        self.came: set[int] = set()
        self.left: set[int] = set()
        self.turned_away: set[int] = set()
        self.twice: dict[int, set[str]] = {}
        self.changed = threading.Condition()
        self._seen: dict[int, tuple[str, str]] = {}
        self._ended = threading.Event()
        self._places = threading.Semaphore(_MAX_VISITORS)

    def __enter__(self) -> Listener:
        """Starts to listen.

        Raises:
            RendezvousError: If it cannot listen at this worker's address.
        """
        self._sockets = open_listeners(self.round.cluster)
        self._threads = [
            threading.Thread(target=self._accept, args=(each,), daemon=True)
            for each in self._sockets
        ]
        for each in self._sockets:
            each.settimeout(_LOOK_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        """Frees the port."""
        self._ended.set()
        # A socket is not closed while a thread waits for it.
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self, listener):
        while not self._ended.is_set():
            try:
                connection, address = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._places.acquire(blocking=False):
                arguments = (connection, address[0])
                threading.Thread(target=self._receive, args=arguments, daemon=True).start()
            else:
                connection.close()

    def _receive(self, connection, machine):
        faults = (OSError, EOFError, messages.MessageError, ValueError)
        try:
            with contextlib.suppress(*faults), connection:
                prepare(connection)
                with connection.makefile("rb") as reader:
                    index = self._admit(connection, reader, machine)
                    if index is not None:
                        connection.settimeout(self.round.left_s + _MARGIN_S)
                        self._answer(connection, reader, index)
        finally:
            self._places.release()

    def _admit(self, connection, reader, machine) -> int | None:
        """Returns the visitor's position; None after it has refused one."""
        connection.settimeout(LINE_S)
        random = secrets.token_hex(16)
        connection.sendall(messages.write_greeting(random))
        line = read_line(reader)
        try:
            said = messages.read(line, self.round.token.secret, VISITOR, random)
        except messages.MessageError:
            self._turn_away(connection, reader, line)
            return None
        index, instance = said.get("index"), said.get("instance")
        if type(index) is not int or not isinstance(instance, str):
            raise messages.MessageError("a message of another version")
        if said.get("round") != self.round.name:
            # It is in a later round than this worker, and will retry.
            raise messages.MessageError("another round")
        answer = {"notes": self.notes}
        context = random + instance
        connection.sendall(messages.write(self.round.token.secret, LISTENER, context, answer))
        self._remember(index, instance, machine)
        return index

    def _turn_away(self, connection, reader, line):
        """Sends the reason unsigned: a visitor without the token could not check a signature."""
        reason = {"token_is_given": self.round.token.is_given}
        if not self.round.token.is_given:
            spec = self.round.cluster.spec
            reason["cluster"] = {kind: list(each) for kind, each in spec.items()}
        connection.sendall(messages.write_refusal(reason))
        claimed = messages.unchecked(line).get("index")
        with contextlib.suppress(OSError):
            _wait_for_end(connection, reader)
        with self.changed:
            if type(claimed) is int:
                self.turned_away.add(claimed)
            self.changed.notify_all()

    def _remember(self, index, instance, machine):
        with self.changed:
            self.came.add(index)
            first, where = self._seen.setdefault(index, (instance, machine))
            if index == self.round.cluster.worker_index:
                self.twice[index] = {"this host", machine}
            elif first != instance:
                self.twice[index] = {where, machine}
            self.changed.notify_all()

    def _answer(self, connection, reader, index):
        while line := reader.readline(64):
            word, _, rest = line.strip().partition(b" ")
            if word == PING:
                connection.sendall(f"{time.time():.9f}\n".encode())
            elif word == LOAD:
                self._load(connection, reader, int(rest))
            elif word == BYE:
                with self.changed:
                    self.left.add(index)
                    self.changed.notify_all()
                connection.sendall(BYE + b"\n")
                _wait_for_end(connection, reader)
                return

    def _load(self, connection, reader, left):
        if not 0 < left <= MAX_LOAD_BYTES:
            raise messages.MessageError("a load of another size")
        if not self.round.loading.acquire(blocking=False):
            connection.sendall(BUSY + b"\n")
            return
        try:
            connection.sendall(GO + b"\n")
            chunk = memoryview(bytearray(_CHUNK))
            while left:
                count = reader.readinto(chunk[: min(left, _CHUNK)])
                if not count:
                    raise EOFError
                left -= count
            connection.sendall(DONE + b"\n")
        finally:
            self.round.loading.release()


def _wait_for_end(connection, reader):
    # Closing first would discard data that the other side has not read yet.
    connection.settimeout(LINE_S)
    reader.read(1)


def prepare(connection: socket.socket) -> None:
    """Sends small messages at once, and leaves no port in TIME_WAIT."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def read_line(reader) -> bytes:
    """Reads one line of a message.

    Raises:
        EOFError: If the other side has closed the connection.
        MessageError: Where it is too long.
    """
    line = reader.readline(messages.MAX_BYTES)
    if not line:
        raise EOFError
    if not line.endswith(b"\n"):
        raise messages.MessageError("a message that is too long")
    return line
