"""Network namespaces of tests: two hosts whose link can be cut, or one without any link."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

from benchmarks.network import Link, ip

PORT = 2222


def configs_of(link: Link) -> list[str]:
    """Returns the TF_CONFIG of a worker at each end of a link."""
    cluster = {"worker": [f"{host}:{PORT}" for host in link.hosts]}
    return [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        for index in range(2)
    ]


@contextlib.contextmanager
def namespace():
    """Gives a namespace with nothing but a loopback, or None where the machine allows none."""
    name = f"tfm{os.getpid()}n"
    try:
        try:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which anybody listens where a process lives."""
    lines = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{pid}/net/{table}") as file:
            lines += [line.split() for line in file][1:]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"}
