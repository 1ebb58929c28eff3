"""Programs of workers that try cases, and print a line of JSON for what each has seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

AT_ONCE = 12
"""How many cases a run has: one that fails ends the others of its run."""

MPIEXEC = Path(sys.executable).parent / "mpiexec"
"""Exists where the extra `mpi` is installed."""


def main(run_case, verify="always") -> None:
    """Runs the program of a worker: its arguments are a folder, and names of cases.

    Args:
        run_case: A function of a strategy, the folder and a case's name.
        verify: Whether steps are verified, as in `create_strategy`.
    """
    import keras

    import tfmulti

    folder, names = Path(sys.argv[1]), sys.argv[2].split(",")
    strategy = tfmulti.create_strategy("multi_worker", verify=verify, on_difference="error")
    for name in names:
        keras.utils.clear_session(free_memory=False)
        strategy.verify = verify
        print(json.dumps({name: run_case(strategy, folder, name)}), flush=True)


def run(run_workers, program, folder, names, num_workers=2, **more) -> list[dict]:
    """Runs such a program on workers, and returns what each worker saw of each case.

    Args:
        run_workers: The fixture.
        program: The program.
        folder: Its folder for files.
        names: Those of the cases.
        num_workers: How many workers.
        **more: Options of `run_workers`.
    """
    # Another test of two workers may run beside this one, on as many cores.
    more.setdefault("timeout_s", 120 + 60 * min(len(names), AT_ONCE))
    seen = [{} for _ in range(num_workers)]
    for start in range(0, len(names), AT_ONCE):
        some = ",".join(names[start : start + AT_ONCE])
        outputs = run_workers(num_workers, [program, folder, some], **more)
        for found, output in zip(seen, outputs):
            for line in output.splitlines():
                if line.startswith("{"):
                    found.update(json.loads(line))
    return seen


def message_of(program) -> str:
    """Returns the message of the error that a function raises."""
    try:
        program()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"
