"""The command line: `python -m tfmulti.bench`. Imports no TensorFlow: other processes do."""

from __future__ import annotations

import signal
import sys

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
    argv = sys.argv if argv is None else argv
    more = (command_line.define_traceback,)
    config, values, code = command_line.read_command_line(BenchConfig, argv, USAGE, *more)
    if code is not None:
        return code
    # So that what was started is ended when this process is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(command_line.ERROR))
    try:
        return _measure(config)
    except Exception as error:
        command_line.show_error(error, values.traceback)
        return command_line.ERROR


def _measure(config) -> int:
    from tfmulti.bench import record, results, run, tables

    console = create_console()
    if config.monitors:
        return _measure_monitors(config, console)
    found = run.run_bench(config, print_fn=lambda line: console.print(line, style="dim"))
    tables.show(found, console)
    for line in record.write_all(found, config):
        console.print(line, style="dim")
    rows = [row for workload in found["workloads"].values() for row in workload["rows"]]
    ran = any(row["status"] == results.OK for row in rows)
    return 0 if ran else command_line.ERROR


def _measure_monitors(config, console) -> int:
    from tfmulti.bench import monitors, tables

    found = monitors.measure(config, print_fn=lambda line: console.print(line, style="dim"))
    tables.show_table(monitors.create_table(found), console)
    for key, ratio in found["ratios"].items():
        console.print(f"{key}: {'not measured' if ratio is None else f'{ratio:.4f}'}")
    console.print(f"wrote {monitors.write(found, config)}", style="dim")
    return 0 if found["rows"] else command_line.ERROR


if __name__ == "__main__":
    sys.exit(main())
