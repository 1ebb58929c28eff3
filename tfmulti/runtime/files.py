"""Files that are never half-written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Writes a file under a temporary name in the same folder, and renames it when it is whole.

    Args:
        path: The file.
        write: Function that writes to the path that it is given, which has the same suffix.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomically(f"{folder}/a.txt", lambda path: path.write_text("whole"))
        ...     print([file.name for file in Path(folder).iterdir()])
        ['a.txt']
    """
    path = Path(path)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
