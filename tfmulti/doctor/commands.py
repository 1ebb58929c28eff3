"""Other programs, asked with a deadline."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence

from tfmulti import processes

TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Output:
    """What a program answered.

    Attributes:
        text: Its standard output.
        errors: Its standard error.
        returncode: Its exit code; None where there is no such program, or it gave no answer.
        fault: Why there is no good answer; empty where there is one.
    """

    text: str = ""
    errors: str = ""
    returncode: int | None = None
    fault: str = ""


def run(
    command: Sequence[str], timeout_s: float = TIMEOUT_S, env: Mapping[str, str] | None = None
) -> Output:
    """Runs a program and waits for it; ends it, and what it started, when time is over.

    Args:
        command: The program and its arguments.
        timeout_s: Seconds that it has.
        env: Variables to set besides those of this process.

    Example:
    >>> import sys
    >>> run([sys.executable, "-c", "print(5)"]).text.strip()
    '5'
    >>> run(["no-such-program"]).fault
    'there is no program no-such-program'
    """
    if shutil.which(command[0]) is None:
        return Output(fault=f"there is no program {command[0]}")
    try:
        [done] = processes.run_together(command, [env or {}], timeout_s=timeout_s, grace_s=2.0)
    except OSError as error:
        return Output(fault=f"{command[0]} cannot be started: {error.strerror}")
    if done.how == processes.TIMED_OUT:
        fault = f"no answer in {timeout_s:g} s"
        return Output(done.stdout, done.stderr, None, fault)
    fault = ""
    if done.returncode:
        # nvidia-smi writes its errors to standard output.
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        fault = said[-1] if said else f"exit code {done.returncode}"
    return Output(done.stdout, done.stderr, done.returncode, fault)
