"""Sockets that listen at a worker's own address, and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import struct

from tfmulti.cluster import Cluster
from tfmulti.cluster.address import is_ip_address, split_address
from tfmulti.cluster.network import advise_port
from tfmulti.meeting.errors import MeetingError

_EVERYWHERE = ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))
_BACKLOG = 1024


def open_listeners(cluster: Cluster) -> list[socket.socket]:
    """Listens at the address of this worker.

    Only the interfaces of that address listen where this machine has them, else all: behind
    address translation the others know another address than this machine does.

    Raises:
        MeetingError: Where another process listens there, or the port is not permitted.
    """
    host, port = split_address(cluster.address)
    try:
        return _listen(_interfaces(host), port) or _listen(_EVERYWHERE, port)
    except OSError as error:
        raise MeetingError(
            "The first worker must be able to listen at its address, where the workers meet. "
            f"Received: {cluster.address}: {error.strerror or error}. "
            f"See who holds the port with `ss -ltnp`, or {advise_port(cluster)}"
        ) from error


def _interfaces(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    interfaces = list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))
    # Many systems give their own name the address 127.0.1.1, at which no other machine comes in.
    if not is_ip_address(host) and host != "localhost":
        if any(ipaddress.ip_address(each.split("%")[0]).is_loopback for _, each in interfaces):
            return []
    return interfaces


def _listen(interfaces, port) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    try:
        for family, address in interfaces:
            try:
                listeners.append(_listen_at(family, address, port))
            except OSError as error:
                # An address of another machine, or a kind of address that this one lacks.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_at(family, address, port) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def cut(writer: asyncio.StreamWriter) -> None:
    """Ends a connection at once, so that its port does not stay in TIME_WAIT."""
    connection = writer.transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
