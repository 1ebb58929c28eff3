"""The floor of an all-reduce: a plain copy through a TCP socket, one way.

`python -m tfmulti.bench.socket_copy PORT CORES`: process 0 receives, process 1 sends, each on cores
of its own (0 for any). No TensorFlow, nothing between the two but the kernel.
"""

from __future__ import annotations

import socket
import sys
import time

from tfmulti.bench import control
from tfmulti.bench.worker import pin, process_index

_CONNECT_S = 30.0


def main(argv: list[str]) -> int:
    """Copies as the driver orders. Returns the exit code."""
    index, (port, cores) = process_index(), (int(text) for text in argv[1:3])
    if cores:
        pin(index, cores)
    if index == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(_CONNECT_S)
            peer, _ = server.accept()
    else:
        peer = _connect(port)
    with peer:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        copy = _receive if index == 0 else _send

        def measure(size: int, times: int) -> dict[str, list[float]]:
            return {"seconds": copy(peer, size, times)}

        control.serve("socket copy", index, measure)
    return 0


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


if __name__ == "__main__":
    sys.exit(main(sys.argv))
