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

FINISHED = ".finished"
"""In a run's `workdir`: which jobs have finished it. A job that is started again does nothing."""

_NAME = re.compile(r"step_(\d+)")
# A complete checkpoint that another of the same step replaces.
_PUT_ASIDE = ".before"


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a step.

    >>> name_of(12)
    'step_000000000012'
    """
    return f"step_{step:012d}"


def put_aside(unfinished: Path) -> Path:
    """Returns the name of an earlier checkpoint while one of the same step takes its place.

    >>> put_aside(Path(".7.step_000000000012")).name
    '.before.7.step_000000000012'
    """
    return unfinished.with_name(f"{_PUT_ASIDE}{unfinished.name}")


def unfinished_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Returns what is left of checkpoints whose writer was killed, `.PID.step_N` each."""
    paths, saved = Path(folder).glob(".*.*"), saved_in(folder).values()
    left = [path for path in paths if _NAME.fullmatch(path.name.rpartition(".")[2])]
    return [path for path in left if path not in saved]


def saved_in(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns the checkpoints in a folder by their step, the latest first.

    One that was put aside counts if none has taken its place, because the writer was killed.
    """
    folder, found = Path(folder), {}
    # Those that were put aside come first: a name of its own replaces them.
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        start, _, name = path.name.rpartition(".")
        step = _NAME.fullmatch(name)
        if step and (not start or start.startswith(_PUT_ASIDE)):
            found[int(step[1])] = path
    return dict(sorted(found.items(), reverse=True))
