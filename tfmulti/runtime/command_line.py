"""Functions of all entry points: flags from settings, `--help`, exit codes, short errors."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from absl import flags, logging

from tfmulti.runtime.errors import place_of, short_message
from tfmulti.runtime.processes import end_process

ERROR = 1
BAD_USAGE = 2
INTERRUPTED = 130
_WRONG_VALUE = re.compile(r"flag --(\w+)=(.*?): ", re.DOTALL)
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "number or auto": "a whole number or auto",
}


def print_error(text: str) -> None:
    """Prints to standard error; nothing where the terminal, or the reader of the pipe, has gone."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # What is left in its buffer would make Python end with another exit code.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def define_flags(settings: type) -> flags.FlagValues:
    """Returns one flag for each field of a dataclass, made by `settings.setting`."""
    values = flags.FlagValues()
    for field in dataclasses.fields(settings):
        _define(values, field)
    return values


def read_settings(settings: type, values: flags.FlagValues):
    """Returns the dataclass with the values of its flags.

    Raises:
        ValueError: For an invalid value.
    """
    return settings(
        **{field.name: values[field.name].value for field in dataclasses.fields(settings)}
    )


def _define(values, field):
    text, choices = field.metadata["help"], field.metadata["choices"]
    default, kind, word = field.default, str(field.type), field.metadata["word"]
    if word:
        parser = _NumberOr(word)
        flags.DEFINE(parser, field.name, default, text, values, flags.ArgumentSerializer())
    elif choices:
        flags.DEFINE_enum(field.name, default, choices, text, flag_values=values)
    elif kind.startswith("bool"):
        flags.DEFINE_bool(field.name, default, text, flag_values=values)
    elif kind.startswith("int"):
        flags.DEFINE_integer(field.name, default, text, flag_values=values)
    elif kind.startswith("float"):
        flags.DEFINE_float(field.name, default, text, flag_values=values)
    else:
        flags.DEFINE_string(field.name, default, text, flag_values=values)


class _NumberOr(flags.ArgumentParser):
    """Takes a whole number, or one word."""

    def __init__(self, word: str):
        self.word = word

    def parse(self, argument):
        return argument if argument == self.word else int(argument)

    def flag_type(self):
        return f"number or {self.word}"


def parse(
    values: flags.FlagValues,
    argv: list[str],
    usage: str,
    advice: str = "Write --name=value or --name value.",
) -> int | None:
    """Parses a command line.

    Args:
        values: The flags.
        argv: The command line, the program's name first.
        usage: What the program is for, the first line of `--help`.
        advice: What to do about words that belong to no flag.

    Returns:
        None if the program should continue, else its exit code.
    """
    if any(argument in ("--help", "-h", "-help") for argument in argv[1:]):
        print(f"{usage}\n")
        for name in sorted(values):
            default = "none" if values[name].default is None else values[name].default
            print(f"  --{name}: {values[name].help}\n      default: {default}")
        return 0
    try:
        rest = values(argv)
    except flags.Error as error:
        print(f"error: {_explain(error, values)} See --help.", file=sys.stderr)
        return BAD_USAGE
    if len(rest) > 1:
        print(
            f"error: The command takes flags only. Received: {' '.join(rest[1:])}. {advice}",
            file=sys.stderr,
        )
        return BAD_USAGE
    return None


def _explain(error, values) -> str:
    """Describes what is wrong with a flag, in three parts."""
    if isinstance(error, flags.UnrecognizedFlagError):
        text = f"Unknown command line flag '{error.flagname}'."
        return text + _suggest(error.flagname, list(values), "--")
    wrong = _WRONG_VALUE.match(str(error))
    if wrong is None or wrong[1] not in values:
        return f"{str(error).rstrip('.')}."
    name, value = wrong[1], wrong[2]
    known = getattr(values[name].parser, "enum_values", None)
    kind = f"one of {', '.join(known)}" if known else _KINDS.get(values[name].flag_type())
    text = f"`{name}` must be {kind or 'something else'}. Received: --{name}={value}."
    return text + _suggest(value, known or [])


def _suggest(word, known, before="") -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {before}{close[0]}?" if close else ""


def read_command_line(settings: type, argv: list[str], usage: str, *, has_verbose: bool = False):
    """Returns the settings of a command line, as a dataclass whose fields are its flags.

    Args:
        settings: The dataclass. The flag `--traceback` is added.
        argv: See `parse`.
        usage: See `parse`.
        has_verbose: Whether to add the flag `--verbose` too.

    Returns:
        `(settings, values, None)`; `(None, values, exit code)` if the program should end.
    """
    values = define_flags(settings)
    flags.DEFINE_bool("traceback", False, "Show an error with all its frames.", flag_values=values)
    if has_verbose:
        text = "Show what TensorFlow and its libraries log."
        flags.DEFINE_bool("verbose", False, text, flag_values=values)
    code = parse(values, argv, usage)
    if code is None:
        try:
            return read_settings(settings, values), values, None
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            code = BAD_USAGE
    return None, values, code


def run(settings: type, usage: str, program: Callable, argv: list[str] | None) -> int:
    """Reads a command line, and runs a program whose child processes end with this one.

    Args:
        settings: The dataclass whose fields are the flags.
        usage: See `parse`.
        program: Function of the settings, and of whether to show tracebacks; returns the exit code.
        argv: The command line; None for this process's.

    Returns:
        The exit code: the program's, 1 for an error, 2 for a wrong command line, 130 for Ctrl-C.
    """
    argv = sys.argv if argv is None else argv
    config, values, code = read_command_line(settings, argv, usage)
    if code is not None:
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ERROR))
    try:
        return program(config, values.traceback)
    except Exception as error:
        show_error(error, values.traceback)
        return ERROR
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def import_tensorflow(environ=os.environ, *, verbose: bool = False) -> None:
    """Imports TensorFlow without its log lines, unless TF_CPP_MIN_LOG_LEVEL is below 3.

    TensorFlow 2.21 writes lines before it reads that variable, so standard error is buffered
    during the import, and shown if the import fails.

    Args:
        environ: The environment in which the variable is read and set.
        verbose: Whether to show all lines, as if the variable were 0.
    """
    if verbose:
        environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
        logging.set_verbosity(logging.INFO)
    # Errors too: TensorFlow logs them repeatedly, and the exception has the same text.
    if environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") != "3":
        import tensorflow  # noqa: F401

        return
    with _standard_error_kept_back():
        import keras  # noqa: F401
        import tensorflow as tf

        if not Path("/dev/nvidiactl").exists():
            tf.config.list_physical_devices()


def show_error(error: BaseException, with_traceback: bool, text: str | None = None) -> None:
    """Prints an error: its cause, then the line of the user's code that raised it.

    Args:
        error: The error.
        with_traceback: Whether to show all of its frames first.
        text: The text to print instead of the error's own.
    """
    if with_traceback:
        traceback.print_exception(error)
    print(f"error: {short_message(error) if text is None else text}", file=sys.stderr)
    place = place_of(error) if text is None else None
    if place is not None:
        print(f"  at {place}", file=sys.stderr)
    if not with_traceback and text is None:
        print("(--traceback shows where it came from)", file=sys.stderr)


def run_and_exit(main) -> NoReturn:
    """Exits with the result of `main`, or as its SystemExit says, by `end_process`."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # The first process of a container gets no signal that it does not handle, so that a pod
        # that is deleted before `fit` would wait for the end of its grace period.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    is_done = False
    try:
        code = main()
        is_done = code == 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            # As Python's own exit does.
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        code = INTERRUPTED
    end_process(code if isinstance(code, int) else ERROR, is_done=is_done)


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
