"""The floor of an all-reduce: a plain copy through a TCP socket, one way.

Process 0 receives, process 1 sends, each on cores of its own. No TensorFlow, nothing between the
two but the kernel.
"""

from __future__ import annotations

import os
import socket
import time

from tfmulti.bench.report import FLOAT_BYTES
from tfmulti.bench.setups import Kind
from tfmulti.bench.worker import process_index
from tfmulti.runtime import processes

_CONNECT_S = 30.0
_PORT = "TFMULTI_BENCH_PORT"


def _environments(count):
    [port] = processes.free_ports(1)
    return [{_PORT: str(port)}] * count


SOCKET_COPY = Kind(
    "socket copy",
    "a copy of the same bytes through a TCP socket, one way",
    {"create": f"{__name__}:create", "tensorflow": False},
    is_distributed=True,
    environments=_environments,
    launched=False,
)


def create(task):
    """Connects the two processes; returns a function that copies, and measures."""
    index, port = process_index(), int(os.environ[_PORT])
    if index == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(_CONNECT_S)
            peer, _ = server.accept()
    else:
        peer = _connect(port)
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    copy = _receive if index == 0 else _send

    def measure(floats: int, times: int) -> dict[str, list[float]]:
        return {"seconds": copy(peer, floats * FLOAT_BYTES, times)}

    return measure


def _connect(port):
    limit = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)


def _receive(peer, size, times) -> list[float]:
    """Asks for `size` bytes, and takes the time until all are there."""
    place, seconds = memoryview(bytearray(size)), []
    for _ in range(times):
        began = time.perf_counter()
        peer.sendall(b"g")
        done = 0
        while done < size:
            done += peer.recv_into(place[done:])
        seconds.append(time.perf_counter() - began)
    return seconds


def _send(peer, size, times) -> list[float]:
    content = memoryview(bytes(size))
    for _ in range(times):
        peer.recv(1)
        peer.sendall(content)
    return []


def floor_seconds(size: int, found) -> float | None:
    """Returns the least time of a ring: S/B x 2(n-1)/n, with B of the largest copy's median.

    Args:
        size: Bytes to reduce.
        found: What was measured of the all-reduce, with the socket copy, or None of it.

    >>> copy = {str(2**24): {"median": 0.1}}
    >>> found = {"workers": 4, "floats": [1, 2**24], "socket_copy": copy}
    >>> round(floor_seconds(2**26, found), 3)
    0.15
    """
    if not found["socket_copy"]:
        return None
    largest, workers = found["floats"][-1], found["workers"]
    bytes_per_second = largest * FLOAT_BYTES / found["socket_copy"][str(largest)]["median"]
    return size / bytes_per_second * 2 * (workers - 1) / workers
