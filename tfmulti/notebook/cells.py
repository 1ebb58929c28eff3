"""The cells of a notebook: their names, their source, and the output under them."""

from __future__ import annotations

import codecs
import linecache
import os
import sys

from tfmulti.launch.logs import Log

_PIECE = 1 << 16


def sources() -> dict[str, list[str]]:
    """Returns the lines of all code that was typed into cells, by its pseudo file name.

    With them a worker can show the lines of an error, and TensorFlow can read functions.
    """
    typed = {}
    for name, entry in list(linecache.cache.items()):
        # An entry of another length is loaded lazily from a file.
        if len(entry) == 4 and not os.path.exists(name):
            typed[name] = entry[2]
    return typed


def add_sources(typed: dict[str, list[str]]) -> None:
    """Registers code that was typed in another process; see `sources`."""
    for name, lines in typed.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def names(typed: dict[str, list[str]]) -> dict[str, str]:
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

    def show_new(self) -> None:
        """Shows new output."""
        while self.shown and (piece := self._reader.read(_PIECE)):
            self._terminal.write(piece)
            self._terminal.flush()
