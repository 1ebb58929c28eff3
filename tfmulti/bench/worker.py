"""One process of a configuration of ours: `python -m tfmulti.bench.worker TASK`, TASK being JSON.

It takes its cores before TensorFlow is imported, so that TensorFlow sees no others.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from tfmulti.bench import control
from tfmulti.bench.config import BenchConfig
from tfmulti.bench.setups import CONTROL, INDEX, MULTI_WORKER
from tfmulti.runtime import command_line


def main(argv: list[str]) -> int:
    """Builds a task's configuration and executes the driver's orders; returns the exit code."""
    task = json.loads(argv[1])
    config = BenchConfig(**task["config"])
    index = process_index()
    kind = task["kind"]
    is_one_of_several = kind in (*MULTI_WORKER, CONTROL)
    cores = config.cores_each * (1 if is_one_of_several else task["replicas"])
    if config.pin:
        pin(index if is_one_of_several else 0, cores)
    try:
        command_line.import_tensorflow()
        from tfmulti.bench import training

        if config.pin:
            training.use_threads(cores)
        if task.get("allreduce"):
            from tfmulti.bench import training as training_lib

            control.serve("allreduce", index, training_lib.create(kind))
        else:
            trained = training.Trained(config, task)
            control.serve(kind, index, trained.train, **trained.facts)
    except Exception as error:
        traceback.print_exc()
        print(f"error: {command_line.cause_of(error)}", file=sys.stderr, flush=True)
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


def pin(index: int, count: int) -> None:
    """Pins this process to `count` cores, the `index`-th such group of those it may use."""
    cores: Sequence[int] = sorted(os.sched_getaffinity(0))
    # A launcher may have pinned it already.
    if len(cores) > count:
        os.sched_setaffinity(0, cores[index * count : (index + 1) * count])


if __name__ == "__main__":
    command_line.run_and_exit(lambda: main(sys.argv))
