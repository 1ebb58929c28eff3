"""Stock callbacks under several workers: the chief writes, the others' files are thrown away.

Every worker goes through the motions, because reading state can be a collective.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

import keras

from tfmulti.strategies import collectives

# What names the file or the folder that a stock callback writes.
_PLACES = (
    (keras.callbacks.ModelCheckpoint, "filepath"),
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
)


def prepare_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Sends what a callback writes to a temporary folder, on every worker but the chief.

    Raises:
        ValueError: For `BackupAndRestore`, which must also read what another worker wrote.
    """
    strategy = model.distribute_strategy
    if not getattr(strategy, "repairs_keras", False) or collectives.num_workers(strategy) == 1:
        return
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        _refuse_backup(callback)
    if collectives.is_chief(strategy):
        return
    for kind, name in _PLACES:
        place = getattr(callback, name, None)
        if isinstance(callback, kind) and not hasattr(callback, "tfmulti_place"):
            callback.tfmulti_place = place
            setattr(callback, name, str(_temporary_folder() / Path(str(place)).name))


def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tfmulti_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _refuse_backup(callback):
    raise ValueError(
        "`BackupAndRestore` is for one worker: workers that write to one folder damage it, and "
        "with a folder each they can resume at different epochs. "
        f"Received: BackupAndRestore({callback.backup_dir!r}) on several workers. "
        "Use ModelCheckpoint, which the chief alone writes, and load its file on every worker "
        "before `fit` with `initial_epoch`."
    )
