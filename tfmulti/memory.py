"""How much memory there is, and how much a process takes: bytes, read from Linux."""

from __future__ import annotations

import re
from pathlib import Path

from tfmulti import cgroups

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_BINARY = {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)B\s*", re.IGNORECASE)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.MULTILINE)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `"4GB"`, `"4GiB"` or `"800 MB"`.

    Raises:
        ValueError: For what is no such size.

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
    """Returns bytes in words.

    >>> show_size(1_234_000_000), show_size(56_700_000)
    ('1.23 GB', '57 MB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def available(root: Path = Path("/")) -> int:
    """Returns the bytes that this host has, or that its container may take where that is less.

    Args:
        root: The root of the file system.
    """
    total = int(_TOTAL.search((root / "proc/meminfo").read_text())[1]) << 10
    limit = cgroups.read_limits(root).memory
    return total if limit is None else min(total, limit)


def peak_of(process: int | str = "self") -> int:
    """Returns the most bytes that a process has held at a time; 0 where it is gone.

    Not `ru_maxrss`, which a process inherits from the one that started it.

    >>> peak_of() > 0, peak_of(0)
    (True, 0)
    """
    try:
        found = _PEAK.search(Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0
