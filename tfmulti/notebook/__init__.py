"""Several workers from a cell of a notebook: `tfmulti.notebook_launch`.

The workers are separate processes, started by `tfmulti.launch`, so that it does not matter what
TensorFlow has done in the notebook's kernel. The function is sent to them in a file, and its result
returns in another. What is here runs in the notebook, and `worker` in the workers; `serialization`
transfers functions, histories and models between them.
"""

from __future__ import annotations

import codecs
import inspect
import json
import linecache
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tfmulti.launch import logs
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.job import Job
from tfmulti.launch.logs import Log
from tfmulti.notebook import serialization, worker
from tfmulti.settings import check_whole_number

GRACE_S = 5.0
"""Seconds for the workers to end after the cell was interrupted."""

_MESSAGE_LENGTH = 600
_PIECE = 1 << 16
_SETTINGS = (
    "all_output",
    "allocator",
    "grace",
    "log_dir",
    "mpi",
    "pin",
    "start_timeout",
    "threads",
)


def notebook_launch(
    function: Callable,
    num_workers: int,
    *,
    args: Sequence = (),
    kwargs: Mapping[str, object] | None = None,
    **settings,
) -> object:
    """Calls a function on several new workers of this host; returns what the chief's returned.

    The workers are separate processes, whatever TensorFlow has done in this one. The function
    does what a script would: it calls `create_strategy("auto")`, which finds the cluster, and
    then creates its data and its model. It may use everything that the notebook defines, except
    objects of this process's TensorFlow: it creates models, optimizers, layers, metrics, tensors
    and datasets itself.

    The chief's output appears immediately. When the cell is interrupted, or this process ends, the
    workers end too. Each worker gets its part of the GPUs; with fewer GPUs than workers all train
    on the CPU.

    Args:
        function: What every worker calls. It returns, on every worker,
            a `keras.Model` (with its optimizer, loss and metrics), the `History` that `fit`
            returns (without its model), numbers and arrays, or a tuple, list or dict of these.
        num_workers: Number of workers.
        args: Arguments of the function.
        kwargs: Keyword arguments of the function.
        **settings: As the flags of `python -m tfmulti.launch`: `all_output`, `allocator`, `grace`
            (by default 5 seconds), `log_dir` (then the logs are kept, with whole tracebacks),
            `mpi`, `pin`, `start_timeout`, `threads`.

    Raises:
        ValueError: For an invalid setting, or a function that cannot be sent to another process.
        RuntimeError: Where a worker has failed; the message begins with the worker's own error.
        KeyboardInterrupt: Where the cell was interrupted; the workers have ended.

    Example:
        def train(epochs):
            strategy = tfmulti.create_strategy("auto")
            ...  # Data, model and fit, as in a script.
            return history, model

        history, model = tfmulti.notebook_launch(train, 2, args=(10,))
    """
    config = _read_settings(function, num_workers, settings)
    args, kwargs = _check_arguments(function, args, kwargs)
    folder = Path(tempfile.mkdtemp(prefix="tfmulti_notebook_"))
    keeps = False
    try:
        _write_call(folder, function, (args, kwargs), config)
        job = _create_job(folder, config)
        code = job.run()
        if code == 0:
            keeps = True  # Until the model has been loaded: training it took longer than a copy.
            result = _load_result(folder)
            keeps = False
            return result
        signalled = job.outcome.signalled
        if signalled is None:
            raise RuntimeError(_explain(folder, job, function))
    finally:
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
    signal.raise_signal(signalled)
    raise KeyboardInterrupt


def _read_settings(function, num_workers, settings) -> LaunchConfig:
    if not callable(function):
        raise ValueError(
            f"`function` must be a function for every worker to call. Received: "
            f"function={function!r}. Pass the function itself, without parentheses."
        )
    unknown = sorted(set(settings) - set(_SETTINGS))
    if unknown:
        raise ValueError(
            f"Keyword arguments of notebook_launch must be among {', '.join(_SETTINGS)}. Received: "
            f"{', '.join(unknown)}. Pass the function's own arguments through args=(...) or "
            "kwargs={...}."
        )
    check_whole_number("num_workers", num_workers, "Use for example 2.")
    return LaunchConfig(num_workers=num_workers, **{"grace": GRACE_S, **settings})


def _check_arguments(function, args, kwargs) -> tuple[tuple, dict]:
    """Returns the function's arguments, of which workers would only tell once they have started."""
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"`args` must be a tuple of the function's arguments. Received: args={args!r}. "
            "One argument needs a comma: args=(10,)."
        )
    args, kwargs = tuple(args), dict(kwargs or {})
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some functions that are written in C have none.
        return args, kwargs
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            "`args` and `kwargs` must be the arguments of the function. "
            f"Received: {len(args)} in `args`, and {sorted(kwargs)} in `kwargs`: {error}. "
            f"Its parameters are {signature}."
        ) from error
    return args, kwargs


def _write_call(folder, function, arguments, config):
    try:
        serialization.save_call(folder, function, *arguments)
    except serialization.SerializationError as error:
        raise ValueError(
            f"`function` must use only objects that can be serialized. Received: {_name(function)} "
            f"with {error}. Create datasets, models and other TensorFlow objects inside the "
            "function; pass NumPy arrays."
        ) from error
    typed = _sources_of_cells()
    settings = {
        "path": sys.path,
        "sources": typed,
        "names": _names_of_cells(typed),
        "whole_traceback": config.log_dir is not None,
    }
    (folder / worker.SETTINGS).write_text(json.dumps(settings))


def _sources_of_cells() -> dict[str, list[str]]:
    """Returns the lines of all code that was typed into cells, by its pseudo file name.

    With them a worker can show the lines of an error, and TensorFlow can read functions.
    """
    typed = {}
    for name, entry in list(linecache.cache.items()):
        # An entry of another length is loaded lazily from a file.
        if len(entry) == 4 and not os.path.exists(name):
            typed[name] = entry[2]
    return typed


def _names_of_cells(typed: dict[str, list[str]]) -> dict[str, str]:
    """Returns the notebook's names of its cells, such as `Cell In[3]`, by their file names."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    compiler = getattr(get_shell(), "compile", None)
    name_of = getattr(compiler, "format_code_name", lambda name: None)
    found = {name: name_of(name) for name in typed}
    return {name: " ".join(label) for name, label in found.items() if label}


class CellTerminal:
    """Python's standard output as a file of bytes; a notebook's takes text only."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Writes text, except an incomplete character at its end."""
        sys.stdout.write(self._decoder.decode(data))

    def flush(self) -> None:
        """Sends it to the cell."""
        sys.stdout.flush()


class CellLog(Log):
    """The log file of a worker, shown as output of the cell.

    It is shown unchanged, without the worker's name, since Keras's progress bar overwrites lines.
    """

    def _show_piece(self) -> bool:
        piece = self._reader.read(_PIECE)
        self._terminal.write(piece)
        self._terminal.flush()
        return bool(piece)


def _create_job(folder, config) -> Job:
    kind = Log if config.all_output else CellLog
    if config.log_dir is None:
        # This folder is kept until the error has been explained.
        values = {**vars(config), "log_dir": str(folder / "logs")}
        config = LaunchConfig(**values)
    return Job(
        config,
        [sys.executable, "-c", worker.PROGRAM, str(folder)],
        # The raised error has that text.
        print_fn=lambda line: None,
        print_note=print,
        create_log=partial(kind, terminal=CellTerminal()),
    )


def _load_result(folder):
    own = worker.folder_of(folder, 0)
    try:
        return serialization.load_result(own)
    except Exception as error:
        # Keras begins with the configuration of the whole model, at each level.
        text = re.split(r"(?:Exception|Error) encountered[\w ]*: ", str(error))[-1]
        raise RuntimeError(
            "`function` must return what this process can load. "
            f"Received: {type(error).__name__}: {text[:_MESSAGE_LENGTH]} "
            "Give custom classes a get_config, and a constructor with **kwargs, as keras.saving "
            f"requires. The result is kept in {own}"
        ) from None


def _explain(folder, job, function) -> str:
    """Describes why a worker has failed: its error first, then the line of the user's code."""
    first, num_workers = job.outcome.first, job.config.num_workers
    who = f"worker {first.index} of {num_workers}"
    path = worker.folder_of(folder, first.index) / worker.ERROR
    try:
        what = json.loads(path.read_text())
    except (OSError, ValueError):
        words = logs.log_tail(job.output_of(first.index))
        return f"{who} {first.describe()}.\n{words}".strip()
    return f"{what['cause']}\nOn {who}, in {_name(function)}:\n{what['where']}".rstrip(" :\n")


def _name(function) -> str:
    return getattr(function, "__qualname__", repr(function))
