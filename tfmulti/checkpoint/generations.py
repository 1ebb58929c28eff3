"""Generations of a checkpoint in a folder, with checksums that detect damaged files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfmulti import checkpoint
from tfmulti.runtime import files, processes

_MANIFEST, _VALUES = "manifest.json", "values"
_FORMAT = 1
_BLOCK = 1 << 24
FILES = (_MANIFEST, f"{_VALUES}.index", f"{_VALUES}.data-00000-of-00001")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the model."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One complete checkpoint on disk.

    Attributes:
        path: Its folder.
        state: The state other than tensors; JSON.
        tensors: Dtype and shape of each tensor, by name.
    """

    path: Path
    state: dict
    tensors: dict[str, list]


def write(
    folder: str | os.PathLike[str],
    number: int,
    tensors: dict[str, np.ndarray | tf.Tensor],
    state: dict,
    keep: int | None = 2,
) -> Path:
    """Writes a generation under a temporary name, and renames it when it is completely on disk.

    Args:
        folder: The folder of the generations.
        number: Number of the generation; larger is later.
        tensors: Values by name.
        state: The state other than tensors, as JSON.
        keep: How many of the latest generations to keep, this one among them; None for all.

    Returns:
        The folder of the new generation.

    Raises:
        CheckpointError: If it cannot be written; earlier generations are kept.
    """
    folder = Path(folder)
    final = folder / checkpoint.name_of(number)
    temporary = folder / f".{os.getpid()}.{final.name}"
    try:
        for left in checkpoint.unfinished_in(folder):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(temporary, tensors, state)
        _put_in_place(temporary, final)
        _sync(folder)
    except Exception as error:  # Among others MemoryError: in a thread it would be lost.
        shutil.rmtree(temporary, ignore_errors=True)
        why = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            "A checkpoint must be written completely. "
            f"Received: {type(error).__name__}: {why} in {folder}. "
            "Free disk space or give another folder; earlier checkpoints are kept."
        ) from error
    # A corrupt checkpoint may have a higher step than the one that the run has resumed from: it
    # does not count towards `keep`.
    earlier = [path for step, path in checkpoint.saved_in(folder).items() if step < number]
    for old in earlier[keep - 1 :] if keep is not None else []:
        shutil.rmtree(old, ignore_errors=True)
    return final


def _put_in_place(temporary, final):
    """Renames a generation; an earlier one of the same number is removed only afterwards."""
    before = checkpoint.put_aside(temporary)
    if final.exists():
        os.replace(final, before)
    try:
        os.replace(temporary, final)
    except OSError:
        if before.exists():
            os.replace(before, final)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _write_files(path, tensors, state):
    names = sorted(tensors)
    with tf.device("CPU:0"):
        # Elsewhere they would be copied to the first GPU.
        values = [tf.convert_to_tensor(tensors[name]) for name in names]
        tf.raw_ops.SaveV2(
            prefix=str(path / _VALUES),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=values,
        )
    manifest = {
        "format": _FORMAT,
        "state": state,
        "tensors": {n: [v.dtype.name, list(v.shape)] for n, v in zip(names, values)},
        "files": {file.name: _digest_file(file) for file in sorted(path.iterdir())},
    }
    text = _to_json({**manifest, "sha256": _digest(_canonical(manifest))}, indent=1)
    (path / _MANIFEST).write_text(text)
    for file in path.iterdir():
        _sync(file)
    _sync(path)


class Writer:
    """Writes snapshots in a thread, one at a time, and remembers whether the last one failed."""

    def __init__(self, print_fn: Callable[[str], None]):
        self._print_fn, self._thread, self._error = print_fn, None, None

    def write(self, folder: Path, number: int, tensors: dict, state: dict, keep: int) -> None:
        """Starts a write, after the previous one has ended."""
        self.finish()

        def work():
            try:
                write(folder, number, tensors, state, keep)
                self._error = None
            except CheckpointError as error:
                self._error = error
                self._print_fn(f"checkpoint of step {number} not written: {error}")

        self._thread = threading.Thread(target=work, name=f"{processes.OWN_THREADS}: checkpoint")
        self._thread.start()

    def finish(self) -> CheckpointError | None:
        """Waits for the current write; returns the error of the last one, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._error


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises CheckpointError for a folder in which no checkpoint can be written."""
    try:
        files.check_folder("folder", folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def latest_good(
    folder: str | os.PathLike[str], print_fn: Callable[[str], None] = print
) -> Generation | None:
    """Returns the latest intact generation, or None without any; reports damaged ones.

    Args:
        folder: The folder of the generations.
        print_fn: Function of one line of text for each generation that is skipped.

    Raises:
        CheckpointError: If none of them can be read, or the latest intact one has the format of
            another version of tfmulti.
    """
    why, paths = "", list(checkpoint.saved_in(folder).values())
    for path in paths:
        try:
            return _check(path)
        except (OSError, ValueError, KeyError) as error:
            why = f"{type(error).__name__}: {error}"
            goes_on = "; trying the one before it" if path != paths[-1] else ""
            print_fn(f"checkpoint {path} is damaged ({error}){goes_on}")
    if paths:
        # To begin anew would lose the run if its file system only did not answer for a moment.
        raise CheckpointError(
            "A run resumes if its folder has checkpoints, so one of them must be readable. "
            f"Received: {why} in {paths[-1]}. If the file system did not answer, start again; "
            "otherwise remove the checkpoints, or do not resume (`resume=False`, `--resume never`)."
        )
    return None


def remove_all(folder: str | os.PathLike[str]) -> None:
    """Removes all generations in a folder."""
    for path in (*checkpoint.unfinished_in(folder), *checkpoint.saved_in(folder).values()):
        shutil.rmtree(path, ignore_errors=True)


def load(generation: Generation, skip: Collection[str] = ()) -> dict[str, tf.Tensor]:
    """Reads the tensors of a generation.

    Args:
        generation: The result of `latest_good`.
        skip: Names of tensors that this worker does not need.

    Raises:
        CheckpointError: If the files have changed since they were checked.
    """
    names = sorted(generation.tensors.keys() - set(skip))
    try:
        with tf.device("CPU:0"):
            values = tf.raw_ops.RestoreV2(
                prefix=str(generation.path / _VALUES),
                tensor_names=names,
                shape_and_slices=[""] * len(names),
                dtypes=[tf.as_dtype(generation.tensors[name][0]) for name in names],
            )
    except tf.errors.OpError as error:
        raise CheckpointError(
            "A checkpoint must be readable. "
            f"Received: {str(error).splitlines()[0]} in {generation.path}. "
            "Remove that folder to resume from the checkpoint before it."
        ) from error
    return dict(zip(names, values))


def _check(path) -> Generation:
    manifest = json.loads((path / _MANIFEST).read_text())
    digest = manifest.pop("sha256")
    if digest != _digest(_canonical(manifest)):
        raise ValueError(f"{_MANIFEST} has changed")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(
            f"A checkpoint must be of format {_FORMAT}. "
            f"Received: format {manifest['format']} in {path}, of another version of tfmulti. "
            "Resume with that version, or start again in another folder."
        )
    for name, expected in manifest["files"].items():
        if _digest_file(path / name) != expected:
            raise ValueError(f"{name} has changed")
    return Generation(path, manifest["state"], manifest["tensors"])


def _to_json(manifest, **settings) -> str:
    return json.dumps(manifest, default=_plain_number, **settings)


def _plain_number(value):
    """Returns a number of NumPy's, such as a seed may be, as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no number")


def _canonical(manifest) -> bytes:
    return _to_json(manifest, sort_keys=True).encode()


def _digest(data) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_file(path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        # A checkpoint may be larger than the memory that training has left.
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
