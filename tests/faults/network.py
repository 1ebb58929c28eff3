"""Two hosts on one machine: network namespaces that a cable joins, which can be pulled."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

PORT = 2222


class Cable:
    """Two network namespaces with a link between them.

    Attributes:
        configs: The TF_CONFIG of a worker in each.
        prefixes: What to put before a command to run it in each.
    """

    def __init__(self):
        self.names = [f"tfm{os.getpid()}{side}" for side in "ab"]
        hosts = [f"10.213.77.{1 + index}" for index in range(2)]
        self._hosts = hosts
        cluster = {"worker": [f"{host}:{PORT}" for host in hosts]}
        self.configs = [
            json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            for index in range(2)
        ]
        self.prefixes = [("ip", "netns", "exec", name) for name in self.names]

    def lay(self) -> None:
        """Makes both; raises CalledProcessError or OSError where the machine forbids it."""
        a, b = self.names
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, host in zip(self.names, self._hosts, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")

    def set(self, state: str) -> None:
        """Pulls the cable (`down`), or puts it back (`up`)."""
        ip("-n", self.names[1], "link", "set", self.names[1], state)

    def remove(self) -> None:
        """Removes both, with what joins them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*arguments) -> None:
    """Runs the command of that name."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


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


@contextlib.contextmanager
def cable():
    """Gives a cable, or None where this machine allows no network namespaces."""
    made = Cable()
    try:
        try:
            made.lay()
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield made
    finally:
        made.remove()
