"""The command line: `python -m tfmulti.bench`. Imports no TensorFlow: other processes do."""

from __future__ import annotations

import sys

from tfmulti.bench.setups import BenchConfig
from tfmulti.runtime import command_line
from tfmulti.runtime.console import create_console

USAGE = "python -m tfmulti.bench [flags]: measures steps, where their time goes, and all-reduces."


def main(argv: list[str] | None = None) -> int:
    """Measures, shows tables, and writes files.

    Returns:
        The exit code: 0 where something was measured, also where a configuration fails; 1 where
        nothing was; 2 for a wrong command line.
    """
    return command_line.run(BenchConfig, USAGE, _measure, argv)


def _measure(config, tracebacks) -> int:
    from tfmulti.bench import report, results, schedule

    console = create_console()
    print_fn = lambda line: console.print(line, style="dim")
    found = schedule.run_bench(config, print_fn)
    tables = report.create_tables(found, config)
    report.show(tables, console)
    print_fn(report.write_all(found, tables, config, "python -m tfmulti.bench"))
    return 0 if results.has_measured(found) else command_line.ERROR


if __name__ == "__main__":
    sys.exit(main())
