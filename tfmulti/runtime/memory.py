"""Reads available memory, the peak memory of a process, and the limits of a container."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)B\s*", re.IGNORECASE)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `"4GB"`, `"4GiB"` or `"800 MB"`.

    Raises:
        ValueError: If it is not such a size.

    Example:
    >>> parse_size("1.5GB"), parse_size("1GiB")
    (1500000000, 1073741824)
    """
    found = _SIZE.fullmatch(text)
    size = 0
    if found:
        unit = found[2].upper()
        size = int(float(found[1]) * (_BINARY.get(unit) or _UNITS[unit]))
    if size < 1:
        raise ValueError(
            f"`memory_limit` must be a size with its unit. Received: memory_limit={text!r}. "
            "Use for example 800MB or 4GB."
        )
    return size


def show_size(size: float) -> str:
    """Returns a readable number of bytes.

    >>> show_size(1_234_000_000), show_size(56_700_000)
    ('1.23 GB', '57 MB')
    """
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def available(root: Path = Path("/")) -> int:
    """Returns the memory of this host in bytes, or the limit of its container if that is less.

    Args:
        root: The root of the file system.
    """
    total = int(_TOTAL.search((root / "proc/meminfo").read_text())[1]) << 10
    limit = read_limits(root).memory
    return total if limit is None else min(total, limit)


def peak_of(process: int | str = "self") -> int:
    """Returns the peak memory of a process in bytes; 0 if it has ended.

    Not `ru_maxrss`, which a process inherits from the one that started it.

    >>> peak_of() > 0, peak_of(0)
    (True, 0)
    """
    return _read_status(process, _PEAK)


def resident() -> int:
    """Returns the resident memory of this process in bytes.

    >>> 0 < resident() <= peak_of()
    True
    """
    return _read_status("self", _RESIDENT)


def _read_status(process, pattern) -> int:
    try:
        found = pattern.search(Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


# Without a limit, version 1 reports the largest multiple of a page below 2**63.
_NO_LIMIT = 2**60


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of this process; None for no limit.

    Attributes:
        cores: CPUs, such as 2.5.
        memory: Bytes.
    """

    cores: float | None = None
    memory: int | None = None


def read_limits(root: Path = Path("/")) -> Limits:
    """Returns the tightest limits of this process's control groups and all their parents.

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
    """Yields the controllers (none for version 2) and the path of each group of this process."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield controllers, path.lstrip("/")


def _upwards(mount, path) -> Iterator[Path]:
    """Yields the group's folder and all its parents that this process can see."""
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
