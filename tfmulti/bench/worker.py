"""One process of a configuration: `python -m tfmulti.bench.worker TASK`, TASK being JSON.

It takes its cores before TensorFlow or PyTorch is imported, so that they see no others.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from tfmulti.runtime import command_line, errors, memory

PIPES = "TFMULTI_BENCH_PIPES"
"""The folder of a job's pipes."""
INDEX = "TFMULTI_BENCH_INDEX"
"""Which process of its job a process is; TF_CONFIG tells the workers of a launcher."""


def main(argv: list[str]) -> int:
    """Creates what a task names and executes the driver's orders; returns the exit code."""
    task = json.loads(argv[1])
    index = process_index()
    cores = sorted(os.sched_getaffinity(0))
    count = task["cores"]
    # A launcher may have pinned it already.
    if task["pin"] and len(cores) > count:
        os.sched_setaffinity(0, cores[index * count : (index + 1) * count])
    try:
        if task["tensorflow"]:
            command_line.import_tensorflow()
            if task["pin"]:
                import tensorflow as tf

                tf.config.threading.set_intra_op_parallelism_threads(count)
        measure = pkgutil.resolve_name(task["create"])(task)
        serve(index, measure, **getattr(measure, "facts", {}))
    except Exception as error:
        traceback.print_exc()
        print(f"error: {errors.short_message(error)}", file=sys.stderr, flush=True)
        return command_line.ERROR
    return 0


def process_index(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of this process in its job.

    >>> process_index({"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'})
    1
    """
    if INDEX in environ:
        return int(environ[INDEX])
    config = json.loads(environ.get("TF_CONFIG") or "{}")
    return int(config.get("task", {}).get("index", 0))


def serve(index: int, measure: Callable[..., Mapping], **facts) -> None:
    """Executes the driver's orders until the driver is done or has gone.

    Args:
        index: The number of this process in its job, from 0.
        measure: Function that does an order. `measure(steps=30)` does 30 steps and returns a dict;
            `"ends"` has the time of `time.perf_counter()` at the end of each step (or of each
            call, where one call does several steps).
        **facts: What the driver should know, such as `gradient_bytes=67_000_000`.
    """
    folder = Path(os.environ[PIPES])
    with (
        open(folder / f"orders_{index}") as orders,
        open(folder / f"answers_{index}", "w", buffering=1) as answers,
    ):
        answers.write(json.dumps({"pid": os.getpid(), **facts}) + "\n")
        for line in orders:
            order = json.loads(line)
            if order is None:
                return
            answer = {**measure(**order), "ended": time.perf_counter()}
            answers.write(json.dumps({**answer, "peak_bytes": memory.peak_of()}) + "\n")


if __name__ == "__main__":
    command_line.run_and_exit(lambda: main(sys.argv))
