"""Two hosts on one machine: network namespaces with a link, which can be slow and can be cut."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

_BURST, _LATENCY = "64kb", "200ms"


class Link:
    """Two network namespaces with a link between them; it needs root's rights.

    Args:
        mbit: The rate of each direction, in millions of bits a second; None for no limit.

    Attributes:
        names: The names of the namespaces.
        hosts: Their addresses.
        prefixes: What to put before a command to run it in each.
    """

    device = "link0"
    """The name of the network device in both."""

    def __init__(self, mbit: float | None = None):
        self._mbit = mbit
        self.names = [f"tfm{os.getpid()}{side}" for side in "ab"]
        self.hosts = ["10.213.77.1", "10.213.77.2"]
        self.prefixes = [("ip", "netns", "exec", name) for name in self.names]

    def create(self) -> None:
        """Makes both; raises CalledProcessError or OSError where the machine forbids it."""
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ends = ["link", "add", self.device, "netns", first, "type", "veth"]
        ip(*ends, "peer", "name", self.device, "netns", second)
        for name, host in zip(self.names, self.hosts, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", self.device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", self.device, "up")
            if self._mbit is not None:
                shape = ["rate", f"{self._mbit}mbit", "burst", _BURST, "latency", _LATENCY]
                queue = ["qdisc", "add", "dev", self.device, "root", "tbf", *shape]
                _run("tc", "-n", name, *queue)

    def set(self, state: str) -> None:
        """Cuts the link (`down`), or restores it (`up`)."""
        ip("-n", self.names[1], "link", "set", self.device, state)

    def remove(self) -> None:
        """Removes both, with what joins them."""
        for name in self.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*arguments) -> None:
    """Runs the command of that name."""
    _run("ip", *arguments)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def link(mbit: float | None = None) -> Iterator[Link | None]:
    """Gives a link, or None where this machine allows no network namespaces."""
    made = Link(mbit)
    try:
        try:
            made.create()
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield made
    finally:
        made.remove()
