"""Checkpoints: the state of a training run, written atomically in several generations.

Values are written by TensorFlow's own bundle (`SaveV2`): it takes every dtype, has a checksum
for each tensor, writes without holding Python's lock, and loading runs no code. TensorFlow's
`Checkpoint` and Orbax, which use such files too, need the live variables while they write, and
determine the order in which a cluster reads them. Here the values are copied first, so that
training continues during the write.

Here are the names of what is on disk, without TensorFlow. `generations` writes and reads it;
`state` copies what a run holds, and puts it back.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = "checkpoints"
"""The folder of a run's checkpoints, within its `workdir`."""

_NAME = re.compile(r"step_(\d+)")


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a step.

    >>> name_of(12)
    'step_000000000012'
    """
    return f"step_{step:012d}"


def unfinished_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns what is left of checkpoints whose writer was killed, `.PID.step_N` each."""
    paths = Path(folder).glob(".*.*")
    return [path for path in paths if _NAME.fullmatch(path.name.rpartition(".")[2])]


def saved_in(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the checkpoints in a folder by their step, the latest first."""
    folder = Path(folder)
    paths = list(folder.iterdir()) if folder.is_dir() else []
    found = [(name, path) for path in paths if (name := _NAME.fullmatch(path.name))]
    return dict(sorted(((int(name[1]), path) for name, path in found), reverse=True))
