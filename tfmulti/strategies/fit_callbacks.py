"""Prepares Keras's callbacks for several workers, and adds the callbacks of every `fit`.

Only the chief's files are kept. The other workers write to a temporary folder, instead of nothing,
because reading state can be a collective, which every worker must join.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import keras

from tfmulti import keras_compat, marks, topology
from tfmulti.cluster import environment
from tfmulti.step import local_steps, sharded_state, slots
from tfmulti.strategies import guarded, same_batches
from tfmulti.strategies.same_weights import SameOnAllWorkers
from tfmulti.strategies.spot_checks import VerifyAgain

# The attribute that holds the output path of each stock callback.
_PLACES = (
    (keras.callbacks.ModelCheckpoint, "filepath"),
    (keras.callbacks.CSVLogger, "filename"),
    (keras.callbacks.TensorBoard, "log_dir"),
)
# Callbacks that read weights, or the optimizer's state, on all workers at the same time.
_READERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.EarlyStopping,
    keras.callbacks.TensorBoard,
)


def prepare_callback(callback: keras.callbacks.Callback, model: keras.Model) -> None:
    """Redirects the output of a callback to a temporary folder on every worker except the chief.

    A `RemoteMonitor` there sends nothing.

    Raises:
        ValueError: For `BackupAndRestore` and `OrbaxCheckpoint`, which would have to read the
            chief's files on every worker.
    """
    strategy = model.distribute_strategy
    if not keras_compat.is_ours(strategy) or topology.num_workers(strategy) == 1:
        return
    # The oldest supported Keras has no `OrbaxCheckpoint`.
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        _refuse_backup("BackupAndRestore", callback.backup_dir)
    if isinstance(callback, orbax):
        _refuse_backup("OrbaxCheckpoint", callback.directory)
    if isinstance(callback, _READERS) and not hasattr(callback.on_epoch_end, "__wrapped__"):
        for method in ("on_train_batch_end", "on_epoch_end"):
            setattr(callback, method, _gathering(getattr(callback, method), strategy))
    if not topology.is_chief(strategy):
        _redirect(callback)
        _silence(callback)


def _silence(callback):
    """Keeps a `RemoteMonitor` from sending to its server what the chief sends."""
    of_keras = keras.callbacks.RemoteMonitor.on_epoch_end
    # One of the user's own may do more, which all workers must join.
    if getattr(type(callback), "on_epoch_end", None) is of_keras:
        callback.on_epoch_end = lambda epoch, logs=None: None


def _redirect(callback):
    """Gives a callback that writes files a temporary folder, always the same one."""
    for kind, name in _PLACES:
        if not isinstance(callback, kind):
            continue
        path, folder = Path(str(getattr(callback, name, None))), marks.FOLDER.get(callback)
        if folder is None:
            folder = _temporary_folder()
            marks.FOLDER.set(callback, folder)
            if kind is keras.callbacks.ModelCheckpoint:
                for method in ("on_train_batch_end", "on_epoch_end"):
                    setattr(callback, method, _removing_files(getattr(callback, method), folder))
        if path.parent != folder:
            marks.PATH.set(callback, getattr(callback, name))
            setattr(callback, name, str(folder / path.name))


def _put_back(callback):
    """Gives a callback that `_redirect` has changed the path that the user gave it."""
    for kind, name in _PLACES:
        folder = marks.FOLDER.get(callback) if isinstance(callback, kind) else None
        if folder is not None and Path(getattr(callback, name)).parent == folder:
            setattr(callback, name, marks.PATH.get(callback))


class OwnPaths(keras.callbacks.Callback):
    """Puts back the paths of callbacks when a call ends: a program may load what was written."""

    def __init__(self):
        super().__init__()
        self._callbacks, self._in_training = [], False

    def set_callbacks(self, callbacks):
        """Takes the list of all callbacks of the call."""
        self._callbacks = callbacks

    def on_train_begin(self, logs=None):
        """Notes that evaluations within `fit` do not end the call."""
        self._in_training = True

    def on_train_end(self, logs=None):
        """Puts back the paths."""
        for callback in self._callbacks:
            _put_back(callback)

    def on_test_end(self, logs=None):
        """Puts back the paths, unless this is a validation."""
        if not self._in_training:
            self.on_train_end()

    def on_predict_end(self, logs=None):
        """Does the same."""
        self.on_test_end()


class GatherState(keras.callbacks.Callback):
    """Gathers sharded state when `fit` ends, so that a single worker can save the model."""

    def on_train_end(self, logs=None):
        """Gathers the state; a collective."""
        sharded_state.gather_optimizer_state(self.model)


class ReleaseGuard(keras.callbacks.Callback):
    """Ends a check of gradients that a `fit` has left behind which ended with an error."""

    def on_train_begin(self, logs=None):
        """Ends it; a callback of this `fit` may begin another."""
        guarded.release(self.model)


class FirstStepFile(keras.callbacks.Callback):
    """Creates a file after the first step; the launcher does not restart a job without it.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path, self._exists = Path(path), False

    def on_train_batch_end(self, batch, logs=None):
        """Creates the file after the first step."""
        if not self._exists:
            self._path.touch()
            self._exists = True


_batches = itertools.count()


def before_batch(model: keras.Model, name: str, given: dict) -> None:
    """Looks at the batch, and creates the file of the first step before the second one.

    Args:
        model: The model.
        name: `"train_on_batch"` or `"test_on_batch"`.
        given: The arguments of the call.
    """
    path = os.environ.get(environment.PROGRESS)
    if name == "train_on_batch" and path and next(_batches) == 1:
        Path(path).touch()
    # Between two averages workers need not make their calls together.
    if local_steps.steps_of(model) == 1:
        same_batches.compare_parts(model, name, given)


def callbacks_for(model: keras.Model) -> tuple[list[keras.callbacks.Callback], ...]:
    """Returns the callbacks that every `fit` of a model runs before the user's, and after them."""
    strategy, path = model.distribute_strategy, os.environ.get(environment.PROGRESS)
    first_step = [FirstStepFile(path)] if path and keras_compat.is_ours(strategy) else []
    # Before the user's, of which one may save the model when training ends.
    gathers = [GatherState()] if topology.num_workers(strategy) > 1 else []
    # After the user's, of which one may change the step when an epoch begins.
    again = [VerifyAgain()] if keras_compat.is_ours(strategy) else []
    same = [SameOnAllWorkers(), OwnPaths()] if topology.num_workers(strategy) > 1 else []
    return [ReleaseGuard(), *first_step, *gathers], [*same, *again]


def _gathering(method, strategy):
    """Wraps a callback's method, which runs on every worker, so that it can read sharded state."""
    doing = f"{type(method.__self__).__name__}.{method.__name__}, which reads state of all workers"

    @functools.wraps(method)
    def call(*args, **kwargs):
        with slots.collective_reads(lambda: strategy.reach_together(doing)):
            return method(*args, **kwargs)

    return call


def _removing_files(method, folder):
    """Wraps a callback's method so that the files it writes, which nobody reads, are removed."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return result

    return call


def _temporary_folder() -> Path:
    # The launcher removes the folder of an attempt, also if the workers were killed.
    path = os.environ.get(environment.PROGRESS)
    folder = tempfile.mkdtemp(prefix="tfmulti_", dir=Path(path).parent if path else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _refuse_backup(name, folder):
    raise ValueError(
        f"`{name}` supports one worker only: several workers that write to one folder "
        "corrupt it, and with one folder each they can resume at different epochs. "
        f"Received: {name}({folder!r}) on several workers. "
        "Use tfmulti.callbacks.Checkpoint, or ModelCheckpoint, which only the chief writes, and "
        "load its file on every worker before `fit` with `initial_epoch`."
    )
