"""The command line: `python -m tfmulti.launch`. Imports no TensorFlow: the workers do."""

from __future__ import annotations

import sys
from functools import partial

from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.job import Job
from tfmulti.launch.logs import Log
from tfmulti.launch.terminal import Output
from tfmulti.runtime import command_line, errors

USAGE = "python -m tfmulti.launch [flags] -- COMMAND: runs a command on all workers of this host."
_EXAMPLE = "Write flags, `--` and the command: --num_workers 2 -- python train.py"


def main(argv: list[str] | None = None) -> int:
    """Runs a command on all workers of this machine.

    Returns:
        The exit code: 0 where all workers are done, 2 for a wrong command line, 143 after
        SIGTERM, 130 after Ctrl-C, else the exit code of the worker that failed first (128 and
        the number of the signal where one ended it).
    """
    argv = sys.argv if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    values = command_line.define_flags(LaunchConfig)
    code = command_line.parse(values, own, USAGE, _EXAMPLE)
    if code is not None:
        return code
    if not command:
        command_line.print_error(
            f"error: The command to run must follow after `--`. Received: no command. {_EXAMPLE}"
        )
        return command_line.BAD_USAGE
    try:
        return _run(command_line.read_settings(LaunchConfig, values), command)
    except ValueError as error:
        command_line.print_error(f"error: {error}")
        return command_line.BAD_USAGE
    except OSError as error:
        command_line.print_error(f"error: {errors.short_message(error)}")
        return command_line.ERROR


def _run(config, command) -> int:
    output = Output()
    create_log = partial(Log, terminal=output, has_room=output.has_room)
    try:
        return Job(
            config, command, output.print_error, create_log=create_log, drain=output.drain
        ).run()
    finally:
        output.drain()


if __name__ == "__main__":
    sys.exit(main())
