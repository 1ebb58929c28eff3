"""Stock callbacks under several workers: only the chief's files are kept.

The other workers write to a temporary folder instead of nothing, because reading state can be a
collective, which every worker must join.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import keras

from tfmulti import marks, topology
from tfmulti.step import sharded_state, slots
from tfmulti.strategies import coordination

# The attribute that holds the output path of each stock callback.
_PLACES = (
    (keras.callbacks.ModelCheckpoint, "filepath"),
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
)
# They read weights, or the optimizer's state, on all workers at the same time.
_READERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.EarlyStopping,
    keras.callbacks.TensorBoard,
)


def prepare_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Redirects the output of a callback to a temporary folder on every worker except the chief.

    Raises:
        ValueError: For `BackupAndRestore`, which would have to read the chief's files on every
            worker.
    """
    strategy = model.distribute_strategy
    if not getattr(strategy, "repairs_keras", False) or topology.num_workers(strategy) == 1:
        return
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        _refuse_backup(callback)
    if isinstance(callback, _READERS) and not hasattr(callback.on_epoch_end, "__wrapped__"):
        for method in ("on_train_batch_end", "on_epoch_end"):
            setattr(callback, method, _gathering(getattr(callback, method)))
    if topology.is_chief(strategy):
        return
    for kind, name in _PLACES:
        path = str(getattr(callback, name, None))
        if isinstance(callback, kind) and marks.PATH.get(callback) is None:
            marks.PATH.set(callback, path)
            setattr(callback, name, str(_temporary_folder() / Path(path).name))


class GatherState(keras.callbacks.Callback):
    """Gathers sharded state when `fit` ends, so that one worker alone can save the model."""

    def on_train_end(self, logs=None):
        """Gathers it; a collective."""
        sharded_state.gather_optimizer_state(self.model)


def callbacks_for(model: keras.Model) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that every `fit` of a model has beside the user's."""
    several = topology.num_workers(model.distribute_strategy) > 1
    return [*coordination.callbacks_for(model), *([GatherState()] if several else [])]


def _gathering(method):
    """Returns a callback's method, which may read sharded state: it runs on every worker."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with slots.gathering():
            return method(*args, **kwargs)

    return call


def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="tfmulti_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _refuse_backup(callback):
    raise ValueError(
        "`BackupAndRestore` supports one worker only: several workers that write to one folder "
        "corrupt it, and with one folder each they can resume at different epochs. "
        f"Received: BackupAndRestore({callback.backup_dir!r}) on several workers. "
        "Use tfmulti.callbacks.Checkpoint, or ModelCheckpoint, which only the chief writes, and "
        "load its file on every worker before `fit` with `initial_epoch`."
    )
