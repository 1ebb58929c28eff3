"""Runs guarantees in processes of their own, so that none can harm or stop another."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from conformance import worker
from conformance.compare import WAITS
from tfmulti.launch.pmi import ProcessManager
from tfmulti.runtime import processes

# Of one guarantee, in one place. A run of several seconds that takes this long waits for ever.
TIMEOUT_S = 100
# After one worker's error the others mostly wait for it.
GRACE_S = 5
# Guarantees that one process tries, so that TensorFlow starts fewer times.
CHUNK = 12


def create_server():
    """Returns a context whose processes start with TensorFlow imported, and not yet used."""
    # The server finds this package as this process does.
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conformance.worker"])
    return context


def run_all(
    tasks, folder: Path, num_groups: int, report=lambda count: None, orders: int = 1
) -> dict:
    """Runs tasks, each a column and the name of a guarantee.

    Args:
        tasks: The tasks.
        folder: Where processes leave their files.
        num_groups: How many groups of processes to have at a time.
        report: Is told how many tasks are done, now and then.
        orders: In how many orders of the rows plain Keras trains.

    Returns:
        By task, for each worker its arrays by order, or the text of what happened.
    """
    context = create_server()
    found = {}
    with concurrent.futures.ThreadPoolExecutor(num_groups) as pool:
        futures = [pool.submit(run, context, *chunk, folder, orders) for chunk in chunks(tasks)]
        for future in concurrent.futures.as_completed(futures):
            found |= future.result()
            report(len(future.result()))
    return found


def chunks(tasks) -> list[tuple]:
    """Returns columns with the guarantees that one process tries there, one after the other.

    Stock TensorFlow's collectives have room for one model in a process.
    """
    made = {}
    for column, name in tasks:
        made.setdefault(column, [[]])
        if len(made[column][-1]) == (1 if column.stock else CHUNK):
            made[column].append([])
        made[column][-1].append(name)
    return [(column, names) for column, lists in made.items() for names in lists]


def run(context, column, names: list[str], folder: Path, orders: int = 1) -> dict:
    """Tries guarantees in one column; after trouble in new processes."""
    found = {}
    while rest := [name for name in names if (column, name) not in found]:
        place = Path(tempfile.mkdtemp(dir=folder))
        found |= run_until_trouble(context, column, rest, place, orders)
    return found


def run_until_trouble(context, column, names, folder: Path, orders: int = 1) -> dict:
    """Tries guarantees in order, up to one that ends or stops the processes."""
    several = column.workers > 1
    configs = processes.tf_configs(column.workers) if several else [None]
    with ProcessManager(column.workers) as manager:
        started = []
        for index, config in enumerate(configs):
            environ = {"TF_CONFIG": config} if several else {}
            environ |= manager.variables(index) if column.communication == "mpi" else {}
            arguments = (column, names, index, environ, str(folder), orders)
            started.append(context.Process(target=worker.main, args=arguments))
            started[-1].start()
        ending = wait(started, folder)
    found = {}
    for number, name in enumerate(names):
        left = [read(folder / f"{number}_{index}") for index in range(column.workers)]
        found[column, name] = [ending if value is None else value for value in left]
        failed = column.workers > 1 and any(isinstance(value, str) for value in left)
        if failed or any(value is None for value in left):
            break
    return found


def wait(started, folder: Path) -> str:
    """Waits for processes, ends those that come no further, and tells how it ended."""
    deadline, seen, failed = time.monotonic() + TIMEOUT_S, 0, False
    while any(process.is_alive() for process in started) and time.monotonic() < deadline:
        time.sleep(0.05)
        if not failed and any(process.exitcode for process in started):
            failed, deadline = True, time.monotonic() + GRACE_S
        if not failed and len(os.listdir(folder)) > seen:
            deadline, seen = time.monotonic() + TIMEOUT_S, len(os.listdir(folder))
    waits = any(process.is_alive() for process in started)
    for process in started:
        process.kill()
        process.join()
    if waits:
        return WAITS if failed else "hangs"
    return "ends the process"


def read(path: Path):
    """Returns what a worker left: its arrays by order, or the text of its error; or None."""
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
            arrays = dict(file)
        orders = {name.split("/")[0] for name in arrays}
        return [
            {name[2:]: value for name, value in arrays.items() if name.startswith(f"{order}/")}
            for order in sorted(orders)
        ]
    with contextlib.suppress(FileNotFoundError):
        return path.with_suffix(".txt").read_text()
    return None


def num_processes() -> int:
    """Returns how many guarantees to try at a time."""
    return max(1, len(os.sched_getaffinity(0)))
