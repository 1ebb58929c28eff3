"""The worker of `notebook_launch`: calls the function, and writes its result."""

from __future__ import annotations

import json
import linecache
import os
import shutil
import site
import sys
import sysconfig
import traceback
from pathlib import Path

from tfmulti.cluster import resolve_cluster
from tfmulti.notebook import serialization
from tfmulti.runtime import command_line, errors

SETTINGS = "settings.json"
ERROR = "error.json"
# Set the import path before any import: the notebook's folders come first.
PROGRAM = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/settings.json'))['path']; "
    "from tfmulti.notebook import worker; worker.main(sys.argv[1])"
)


def folder_of(folder: Path, index: int) -> Path:
    """Returns the folder for the output of a worker."""
    return folder / f"worker_{index}"


def main(folder: str) -> None:
    """Runs one worker; ends the process.

    Args:
        folder: Where the notebook has written the call and the settings.
    """
    command_line.run_and_exit(lambda: _run(Path(folder)))


def _run(folder) -> int:
    cluster = resolve_cluster(check_network=False)
    own = folder_of(folder, cluster.worker_index)
    own.mkdir()
    settings = json.loads((folder / SETTINGS).read_text())
    for name, lines in settings["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    try:
        if serialization.names_tensorflow(folder):
            # Before the function does. It is quiet even where the notebook has set the variable.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
            command_line.import_tensorflow({})
        function, args, kwargs = serialization.load_call(folder)
        # Every worker writes its model, since reading it can be a collective.
        serialization.save_result(own, function(*args, **kwargs))
    except KeyboardInterrupt:
        return command_line.INTERRUPTED
    except BaseException as error:
        return _fail(error, cluster, own, settings)
    if not cluster.is_chief:
        shutil.rmtree(own)
    return 0


def _fail(error, cluster, own, settings) -> int:
    """Writes the error for the notebook, reports it to the others; returns the exit code."""
    ending = None
    if "tensorflow" in sys.modules:
        from tfmulti.strategies.multi_worker import end_worker

        ending = end_worker(error, cluster)
    if settings["whole_traceback"]:
        traceback.print_exception(error)
    what = {
        "cause": cause_of(error) if ending is None else ending.text,
        "where": where(error, settings["names"]),
    }
    (own / ERROR).write_text(json.dumps(what))
    return command_line.ERROR if ending is None else ending.exit_code


def cause_of(error: BaseException) -> str:
    """Returns the kind of an error and its message, without framework frames.

    >>> cause_of(ValueError("bad record"))
    'ValueError: bad record'
    """
    text, kind = errors.short_message(error), type(error).__name__
    plain = type(error) in (ValueError, RuntimeError)
    return f"{kind}: {text}" if plain and "{{" not in str(error) else text


def where(error: BaseException, names: dict[str, str]) -> str:
    """Returns the lines of the user's own code that led to an error.

    Args:
        error: The error.
        names: The names to show for files.
    """
    frames = traceback.extract_tb(error.__traceback__)
    parts = []
    for frame in frames:
        if not _is_installed(frame.filename):
            place = names.get(frame.filename, f'File "{frame.filename}"')
            parts.append(f"  {place}, line {frame.lineno}, in {frame.name}\n")
            parts.append(f"    {frame.line}\n" if frame.line else "")
    return "".join(parts)


def _is_installed(filename) -> bool:
    own = str(Path(__file__).parents[1])
    paths = sysconfig.get_paths()
    installed = [paths["stdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return filename.startswith(("<frozen", own, *installed))
