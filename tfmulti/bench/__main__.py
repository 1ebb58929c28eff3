"""The command line: `python -m tfmulti.bench`. Imports no TensorFlow: other processes do."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from tfmulti.bench.config import BenchConfig
from tfmulti.runtime import command_line
from tfmulti.runtime.console import create_console

USAGE = "python -m tfmulti.bench [flags]: measures steps, where their time goes, and all-reduces."


def main(argv: list[str] | None = None) -> int:
    """Measures, shows tables, and writes files.

    Returns:
        The exit code: 0 where something was measured, also where a configuration fails; 1 where
        nothing was; 2 for a wrong command line.
    """
    return run(BenchConfig, USAGE, _measure, argv)


def run(settings: type, usage: str, measure: Callable, argv: list[str] | None) -> int:
    """Reads a command line and measures; returns the exit code.

    Args:
        settings: The dataclass whose fields are the flags.
        usage: The first line of `--help`.
        measure: Function of the settings and a console; returns the exit code.
        argv: The command line, by default this process's.
    """
    argv = sys.argv if argv is None else argv
    more = (command_line.define_traceback,)
    config, values, code = command_line.read_command_line(settings, argv, usage, *more)
    if code is not None:
        return code
    # So that what was started is ended when this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(command_line.ERROR))
    try:
        return measure(config, create_console())
    except Exception as error:
        command_line.show_error(error, values.traceback)
        return command_line.ERROR


def _measure(config, console) -> int:
    from tfmulti.bench import report, results, schedule

    print_fn = lambda line: console.print(line, style="dim")
    found = schedule.run_bench(config, print_fn)
    tables = report.create_tables(found, config)
    report.show(tables, console)
    print_fn(report.write_all(found, tables, config, "python -m tfmulti.bench"))
    return 0 if results.has_measured(found) else command_line.ERROR


if __name__ == "__main__":
    sys.exit(main())
