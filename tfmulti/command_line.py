"""What the entry points share: flags from settings, `--help`, exit codes, short errors."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from absl import flags

ERROR = 1
BAD_USAGE = 2
INTERRUPTED = 130
MESSAGE_LINES = 12
# How names of this package's threads begin.
OWN_THREADS = "tfmulti"
_THREADS_S = 5.0
_PYTHON_ERROR = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Interrupt): [^\n]+)")
_NODE = re.compile(r"\{\{[^}]*\}\} ?")


def define_flags(settings: type) -> flags.FlagValues:
    """Returns one flag for each field of a dataclass, made by `config.setting`."""
    values = flags.FlagValues()
    for field in dataclasses.fields(settings):
        _define(values, field)
    return values


def define_traceback(values: flags.FlagValues) -> None:
    """Adds `--traceback`."""
    text = "Show the whole traceback of an error."
    flags.DEFINE_bool("traceback", False, text, flag_values=values)


def read_settings(settings: type, values: flags.FlagValues):
    """Returns the dataclass with the values of its flags.

    Raises:
        ValueError: For a value that cannot be.
    """
    return settings(
        **{field.name: values[field.name].value for field in dataclasses.fields(settings)}
    )


def _define(values, field):
    text, choices = field.metadata["help"], field.metadata["choices"]
    default, kind = field.default, str(field.type)
    if choices:
        flags.DEFINE_enum(field.name, default, choices, text, flag_values=values)
    elif kind.startswith("bool"):
        flags.DEFINE_bool(field.name, default, text, flag_values=values)
    elif kind.startswith("int"):
        flags.DEFINE_integer(field.name, default, text, flag_values=values)
    elif kind.startswith("float"):
        flags.DEFINE_float(field.name, default, text, flag_values=values)
    else:
        flags.DEFINE_string(field.name, default, text, flag_values=values)


def parse(values: flags.FlagValues, argv: list[str], usage: str) -> int | None:
    """Parses a command line.

    Args:
        values: The flags.
        argv: The command line, the program's name first.
        usage: What the program is for, the first line of `--help`.

    Returns:
        None where the program should go on, else its exit code.
    """
    if any(argument in ("--help", "-h", "-help") for argument in argv[1:]):
        print(f"{usage}\n")
        for name in sorted(values):
            print(_describe(values[name]))
        return 0
    try:
        rest = values(argv)
    except flags.Error as error:
        print(f"error: {error} See --help.", file=sys.stderr)
        return BAD_USAGE
    if len(rest) > 1:
        print(
            "error: The command takes flags only. "
            f"Received: {' '.join(rest[1:])}. Write --name=value or --name value.",
            file=sys.stderr,
        )
        return BAD_USAGE
    return None


def _describe(flag) -> str:
    default = "none" if flag.default is None else flag.default
    return f"  --{flag.name}: {flag.help}\n      default: {default}"


def import_tensorflow(environ=os.environ) -> None:
    """Imports TensorFlow without its chatter, unless TF_CPP_MIN_LOG_LEVEL asks for it.

    TensorFlow 2.21 writes lines before it has read that variable, so standard error is kept
    back meanwhile; an error of the import brings it out again.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in environ:
        import tensorflow  # noqa: F401

        return
    environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with _standard_error_kept_back():
        import keras  # noqa: F401
        import tensorflow as tf

        if not Path("/dev/nvidiactl").exists():
            tf.config.list_physical_devices()


def run_and_leave(main) -> NoReturn:
    """Ends the process with what `main` returns, or with its SystemExit's number; see `leave`."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = INTERRUPTED
    leave(code if isinstance(code, int) else ERROR)


def leave(exit_code: int) -> NoReturn:
    """Ends the process, without Python taking itself apart first.

    A thread of TensorFlow's data pipeline that calls Python stops for ever when that has begun,
    and whoever destroys the pipeline waits for it. Exit functions are called, and threads waited
    for: those of this package until they are done, others for some seconds.
    """
    until = time.monotonic() + _THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            ours = thread.name.startswith(OWN_THREADS)
            thread.join(None if ours else max(0.0, until - time.monotonic()))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave_at_exit(exit_code: int) -> None:
    """Has the process end by `leave` when Python comes to its end."""

    def end():
        atexit.unregister(end)
        leave(exit_code)

    atexit.register(end)


@contextlib.contextmanager
def _standard_error_kept_back():
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(original, kept.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)


def cause_of(error: BaseException) -> str:
    r"""Returns the message of an error without framework frames, the kind first where it helps.

    An error of Python's within TensorFlow's graph is that error.

    >>> cause_of(RuntimeError("Graph execution error:\n{{node x}} ValueError: bad record\nTrace"))
    'ValueError: bad record'
    """
    within = _PYTHON_ERROR.search(str(error))
    if within and "{{" in str(error):
        return within[1]
    lines = _NODE.sub("", str(error)).strip().splitlines() or [repr(error)]
    text = "\n".join(lines[:MESSAGE_LINES])
    ours = type(error) in (ValueError, RuntimeError) or type(error).__module__ == "tfmulti"
    return text if ours else f"{type(error).__name__}: {text}"
