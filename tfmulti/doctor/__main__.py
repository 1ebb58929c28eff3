"""The command line: `python -m tfmulti.doctor`. Imports no TensorFlow: another process does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys

from tfmulti.doctor.examination import DoctorConfig
from tfmulti.doctor.report import FAILURE
from tfmulti.runtime import command_line

USAGE = "python -m tfmulti.doctor [flags]: is this host, and this cluster, ready to train?"


def main(argv: list[str] | None = None) -> int:
    """Checks this host, and shows the results.

    Returns:
        The exit code: 0, or 1 where something will make training fail, 2 for a wrong command
        line.
    """
    argv = sys.argv if argv is None else argv
    values = command_line.define_flags(DoctorConfig)
    code = command_line.parse(values, argv, USAGE)
    if code is not None:
        return code
    try:
        config = command_line.read_settings(DoctorConfig, values)
        found = _look(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return command_line.BAD_USAGE
    if config.json:
        written = {"checks": [dataclasses.asdict(check) for check in found.checks]}
        print(json.dumps(written, indent=2), flush=True)
    else:
        from rich.console import Console

        from tfmulti.doctor import report

        report.show(found.areas, Console())
        sys.stdout.flush()
    if found.met:
        from tfmulti.doctor import peers

        peers.leave_together(found.met, found.timeout_s)
    failed = any(check.status == FAILURE for check in found.checks)
    return command_line.ERROR if failed else 0


def _look(config):
    from rich.console import Console

    from tfmulti.doctor import examination

    console = Console(stderr=True)
    waits = contextlib.nullcontext()
    if console.is_terminal and not config.json:
        waits = console.status("Looking; TensorFlow's import takes some seconds ...")
    with waits:
        return examination.examine(config)


if __name__ == "__main__":
    sys.exit(main())
