"""The command line: `python -m tfmulti.parity`. Imports no TensorFlow: other processes do."""

from __future__ import annotations

import dataclasses
import json
import sys

from tfmulti.parity.config import ParityConfig
from tfmulti.runtime import command_line, files
from tfmulti.runtime.console import create_console

USAGE = "python -m tfmulti.parity [flags]: proves that many devices give one device's result."


def main(argv: list[str] | None = None) -> int:
    """Compares, and shows a table.

    Returns:
        The exit code: 0 where every configuration agrees with one device, 1 where one differs or
        fails, 2 for a wrong command line.
    """
    return command_line.run(ParityConfig, USAGE, _compare, argv)


def _compare(config, tracebacks) -> int:
    from tfmulti.parity import runner

    console = create_console()
    print_fn = lambda line: console.print(line, style="dim")
    result = runner.run_experiment(config, print_fn)
    runner.show(result, config, console, tracebacks)
    if config.json:
        written = {
            "config": dataclasses.asdict(config),
            "equal": result.is_equal,
            **dataclasses.asdict(result),
        }
        text = json.dumps(written, indent=2) + "\n"
        files.write_atomically(config.json, lambda path: path.write_text(text))
    return 0 if result.is_equal else command_line.ERROR


if __name__ == "__main__":
    sys.exit(main())
