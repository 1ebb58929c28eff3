"""The command line: `python -m benchmarks`. Imports no TensorFlow: other processes do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import monitors, peers, projection, tables
from benchmarks.kinds import BenchmarksConfig
from benchmarks.socket_copy import SOCKET_COPY
from tfmulti.bench import report, results, schedule
from tfmulti.bench.setups import create_setup
from tfmulti.runtime import command_line, files
from tfmulti.runtime.console import create_console

USAGE = "python -m benchmarks [flags]: measures tfmulti beside its peers, in a clone of it."
_ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Measures, shows tables, and writes files; returns the exit code, as `tfmulti.bench` does."""
    return command_line.run(BenchmarksConfig, USAGE, _measure, argv)


def _measure(config, tracebacks) -> int:
    # The processes find this folder too, wherever they are started.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    console = create_console()
    print_fn = lambda line: console.print(line, style="dim")
    if config.monitors:
        return _measure_monitors(config, console, print_fn)
    found = run_benchmarks(config, print_fn)
    shown = tables.create_tables(found, config)
    report.show(shown, console)
    print_fn(report.write_all(found, shown, config, "python -m benchmarks"))
    print_fn(_draw(found, Path(config.workdir) / "bench.png"))
    return 0 if results.has_measured(found) else command_line.ERROR


def run_benchmarks(config: BenchmarksConfig, print_fn: Callable[[str], None]) -> dict:
    """Measures, and returns what `bench.json` holds.

    Args:
        config: The run.
        print_fn: Function that takes a line of text for the user.
    """
    more = [create_setup(SOCKET_COPY, 2, config)]
    if config.peers:
        more = [create_setup(kind, config.numbers[-1], config) for kind in peers.REDUCES] + more
    found = schedule.run_bench(config, print_fn, more)
    if found["allreduce"]:
        copy = found["allreduce"]["transports"].pop(SOCKET_COPY.name, None)
        found["allreduce"]["socket_copy"] = copy
    found["ratios"], found["missing"] = tables.compute_ratios(found)
    found["projection"] = None
    if config.project:
        found["projection"] = projection.project_result(found, config.project)
    return found


def _draw(found, path) -> str:
    try:
        from benchmarks import plot
    except ImportError as error:
        return f"no {path.name}: {error}; pip install '.[plot]'"
    files.write_atomically(path, lambda temporary: plot.draw(found, temporary))
    return f"wrote {path}"


def _measure_monitors(config, console, print_fn) -> int:
    found = monitors.measure(config, print_fn)
    report.show([monitors.create_table(found)], console)
    for key, ratio in found["ratios"].items():
        console.print(f"{key}: {'not measured' if ratio is None else f'{ratio:.4f}'}")
    path = Path(config.workdir) / "monitors.json"
    report.write_json(found, path)
    print_fn(f"wrote {path}")
    return 0 if found["rows"] else command_line.ERROR


if __name__ == "__main__":
    sys.exit(main())
