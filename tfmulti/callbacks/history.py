"""The logs of every epoch, as a CSV file that is never half-written."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import keras

from tfmulti.runtime import files


class HistoryFile(keras.callbacks.Callback):
    """Writes one row per epoch to a CSV file, under a temporary name that is then renamed.

    Use it on the chief only. Columns are those of the first epoch, and new ones as they appear.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = Path(path)
        self._rows: list[dict] | None = None

    def on_train_begin(self, logs=None):
        """Starts anew."""
        self._rows = None

    def on_epoch_begin(self, epoch, logs=None):
        """Keeps the rows of earlier epochs if training resumes."""
        if self._rows is None:
            self._rows = [row for row in self._read() if int(row["epoch"]) < epoch]

    def _read(self) -> list[dict]:
        if not self._path.exists():
            return []
        with open(self._path, newline="") as file:
            return list(csv.DictReader(file))

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epoch's row."""
        self._rows.append({"epoch": epoch, **(logs or {})})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        files.write_atomically(self._path, lambda path: self._write(path, columns))

    def _write(self, path, columns):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)
