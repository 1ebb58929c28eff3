"""Shortens errors: the cause first, and the line of the user's code that raised it."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

MESSAGE_LINES = 12
_PYTHON_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Interrupt): [^\n]+)")
_NODE = re.compile(r"\{\{[^}]*\}\} ?")
_IN_GRAPH = "Graph execution error:"
_AT_NODE = re.compile(r"\s*\[\[\{\{node ([^}]+)\}\}\]\](?: \[Op:\w+\])?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\w+)')
_IN_CALL = re.compile(
    r"Exception encountered when calling ([\w.<>]+)\(\)\.\n\n"
    r"(.*?)(?:\n\nArguments received by .*)?$",
    re.DOTALL,
)
_ARGUMENT = re.compile(r"^  • (\w+)=(.*)$", re.MULTILINE)
_NO_MEMORY = ("OOM when allocating", "out of memory", "OUT_OF_MEMORY", "CUDNN_STATUS_ALLOC_FAILED")
# A ResourceExhaustedError of these is one of disks, files or messages.
_NOT_MEMORY = ("No space left", "quota", "Too many open files", "larger than max")
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SAYS_NOTHING = ("None", "False", "True", "<class 'inspect._empty'>")
_SOURCE_LENGTH = 80
_LINE_LENGTH = 1000


def short_message(error: BaseException) -> str:
    r"""Returns the message of an error without framework frames, the kind first where it helps.

    For a Python error within a TensorFlow graph it is the Python error's message; for an error in a
    layer's `call`, the error's own message comes before Keras's.

    >>> short_message(RuntimeError("Graph execution error:\n{{node x}} ValueError: bad row\nTrace"))
    'ValueError: bad row'
    >>> short_message(ValueError("in user code:\n\n    File \"a.py\", line 3, in f\n\n    Not so."))
    'Not so.'
    """
    text = _COLOUR.sub("", str(error))
    if is_out_of_memory(error):
        return _describe_memory(text)
    within = _PYTHON_ERROR.search(text)
    if within and "{{" in text:
        return within[1]
    lines = _NODE.sub("", _reorder(text)).strip().splitlines() or [repr(error)]
    text = "\n".join(_cut(line) for line in lines[:MESSAGE_LINES])
    ours = type(error) in (ValueError, RuntimeError) or type(error).__module__ == "tfmulti"
    return text if ours else f"{type(error).__name__}: {text}"


def place_of(error: BaseException) -> str | None:
    """Returns the innermost line of the user's code that raised an error, or None.

    It skips frames of Python's library, of installed packages and of this one.

    >>> place_of(ValueError("never raised")) is None
    True
    """
    for cause in _with_causes(error):
        frames = [frame for frame in _frames(cause) if _is_users(frame[0])]
        if frames:
            path, line, function = frames[-1]
            source = linecache.getline(path, line).strip()[:_SOURCE_LENGTH]
            shown = path if (near := os.path.relpath(path)).startswith("..") else near
            return f"{shown}:{line}, in {function}" + (f": {source}" if source else "")
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or this host has run out of memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    if type(error).__name__ == "ResourceExhaustedError":
        return not any(words in str(error) for words in _NOT_MEMORY)
    is_of_tensorflow = (type(error).__module__ or "").startswith("tensorflow")
    return is_of_tensorflow and any(words in str(error) for words in _NO_MEMORY)


def _describe_memory(text) -> str:
    lines = [line for line in _NODE.sub("", text).splitlines() if line.strip()]
    named = [line for line in lines if any(words in line for words in _NO_MEMORY)]
    seen = (named or lines or ["MemoryError"])[0].strip()
    seen = seen.replace("/job:localhost/replica:0/task:0/device:", "").split(" [Op:")[0]
    return (
        "A training step must fit in the memory of its device. "
        f"Received: {seen.rstrip('.')}. Use fewer examples per step "
        "(--per_replica_batch_size auto finds how many fit), half precision "
        "(--dtype_policy mixed_bfloat16) or a smaller model."
    )


def _reorder(text) -> str:
    """Puts the cause before the location that Keras and autograph report."""
    if text.startswith(_IN_GRAPH):
        return _reorder_graph_error(text)
    if text.startswith("in user code:"):
        paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
        kept = [part for part in paragraphs if part and not _FRAME.match(part)][1:]
        text = "\n\n".join(kept) or text
    in_call = _IN_CALL.search(text)
    if in_call is None:
        return text
    arguments = _ARGUMENT.findall(text)
    received = [f"{name}={value}" for name, value in arguments if value not in _SAYS_NOTHING]
    heard = f", which received {', '.join(received)}" if received else ""
    cause = in_call[2].split("Error encountered:\n\n")[-1]
    return f"{_reorder(cause.strip())}\n  in {in_call[1]}(){heard}"


def _reorder_graph_error(text) -> str:
    """Keeps the operation's message; the frames show where the graph was built, not the cause."""
    at = _AT_NODE.search(text)
    lines = _AT_NODE.sub("", text.removeprefix(_IN_GRAPH)).splitlines()
    dropped = ("Detected at node", "Stack trace for op definition", 'File "')
    kept = [line for line in lines if line.strip() and not line.strip().startswith(dropped)]
    if not kept:
        return text
    return "\n".join(kept) + (f"\n  in the graph at {at[1]}" if at else "")


def _cut(line) -> str:
    return line if len(line) <= _LINE_LENGTH else line[:_LINE_LENGTH] + " ..."


def _with_causes(error) -> Iterator[BaseException]:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _frames(error) -> Iterator[tuple[str, int, str]]:
    """Yields the frames of the traceback, then those in the message, the innermost last."""
    for frame in traceback.extract_tb(error.__traceback__):
        yield frame.filename, frame.lineno or 0, frame.name
    for path, line, function in _FRAME.findall(str(error)):
        yield path, int(line), function


def _is_users(path) -> bool:
    if path.startswith("<") or "__autograph_generated" in path or not os.path.exists(path):
        return False
    folders = [sysconfig.get_path(name) for name in _LIBRARIES]
    folders.append(str(Path(__file__).parents[1]))
    within = any(path.startswith(folder + os.sep) for folder in folders if folder)
    return not within and not any(part in path for part in _INSTALLED)
