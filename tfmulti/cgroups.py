"""The limits of a container, or of a batch system: control groups of version 1 and 2.

See https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/admin-guide/cgroup-v1/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

# Version 1 writes the largest whole page below 2**63 where there is no limit.
_NO_LIMIT = 2**60


@dataclasses.dataclass(frozen=True)
class Limits:
    """What this process may use at most; None where nothing limits it.

    Attributes:
        cores: Processors, such as 2.5.
        memory: Bytes.
    """

    cores: float | None = None
    memory: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Returns the tightest limits of this process's groups and of all above them.

    Args:
        root: The root of the file system.
    """
    cores: list[float] = []
    memory: list[int] = []
    for controllers, path in _groups(root):
        names = controllers.split(",")
        if not controllers:
            for folder in _upwards(root / "sys/fs/cgroup", path):
                cores += _quota(_words(folder / "cpu.max"))
                memory += _bytes(_words(folder / "memory.max"))
        if "cpu" in names:
            for folder in _upwards(root / "sys/fs/cgroup/cpu", path):
                quota = _words(folder / "cpu.cfs_quota_us")
                cores += _quota(quota + _words(folder / "cpu.cfs_period_us"))
        if "memory" in names:
            for folder in _upwards(root / "sys/fs/cgroup/memory", path):
                memory += _bytes(_words(folder / "memory.limit_in_bytes"))
    return Limits(min(cores, default=None), min(memory, default=None))


def _groups(root) -> Iterator[tuple[str, str]]:
    """The controllers (none for version 2) and the path of each group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield controllers, path.lstrip("/")


def _upwards(mount, path) -> Iterator[Path]:
    """The group's folder and all above it, as far as this process sees them."""
    folder = mount / path
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def _words(path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _quota(words) -> list[float]:
    """Returns the cores of "quota period"; nothing for "max" or -1."""
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []


def _bytes(words) -> list[int]:
    if len(words) == 1 and words[0].isdecimal() and int(words[0]) < _NO_LIMIT:
        return [int(words[0])]
    return []
