"""Runs real training steps at some batch sizes, in a separate process that may run out of memory.

`batch_size` starts it: `python -m tfmulti.train.batch_size_trial REQUEST`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable

import tensorflow as tf

from tfmulti import devices
from tfmulti.data import distribute_train
from tfmulti.data.datasets import load_dataset
from tfmulti.runtime import command_line, errors, memory, processes
from tfmulti.strategies import create_strategy
from tfmulti.train.config import TrainConfig
from tfmulti.train.models import compile_model, create_model, prepare_keras

STEPS = 3
MIN_STEPS_PER_EPOCH = 8


def try_sizes(
    config: TrainConfig,
    sizes: list[int],
    num_replicas: int,
    num_local: int,
    report: Callable[..., None],
) -> None:
    """Trains a few steps at each batch size, the smallest first, with one model.

    Args:
        config: The run.
        sizes: Examples of one replica, ascending.
        num_replicas: Replicas of the job, over which the examples of an epoch are split.
        num_local: Replicas of this worker; the trial has as many.
        report: Called with `begins`, a size, and then with `size`, `peak` (peak memory in bytes)
            and `cap`, the largest size with which an epoch has enough steps.
    """
    config = dataclasses.replace(config, steps_per_execution=1)
    cpus = 0 if num_local == 1 or devices.has_gpu() else num_local
    cpus = config.logical_cpus if config.has_stages_on_devices else cpus
    kind = "one_device" if num_local == 1 else "mirrored"
    strategy = create_strategy(kind, logical_cpus=cpus, verify="never")
    prepare_keras(config)
    split, _ = load_dataset(config.dataset)

    def take(size):
        return distribute_train(
            split,
            strategy,
            size * num_local,
            seed=config.seed,
            remainder=config.remainder,
            steps_per_epoch=STEPS,
        )

    train = take(1)
    cap = max(1, train.plan.num_examples // (num_replicas * MIN_STEPS_PER_EPOCH))
    with strategy.scope():
        model = create_model(config.model, split)
        compile_model(model, config, train)
    for size in sizes:
        size = min(size, cap)
        report(begins=size)
        model.fit(take(size), epochs=1, shuffle=False, verbose=0)
        report(size=size, peak=_peak(), cap=cap)
        if size == cap:
            return


def _peak() -> int:
    if not devices.has_gpu():
        return memory.peak_of()
    return max(tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in devices.list_gpus())


def main() -> int:
    """Runs the sizes of the command line, and reports the results through a pipe."""
    processes.end_with_parent()
    request = json.loads(sys.argv[1])
    with os.fdopen(request.pop("pipe"), "w") as pipe:

        def report(**message):
            print(json.dumps(message), file=pipe, flush=True)

        try:
            try_sizes(TrainConfig(**request.pop("config")), report=report, **request)
        except Exception as error:
            if errors.is_out_of_memory(error):
                report(no_memory=errors.cause_of(error))
            else:
                place = errors.place_of(error)
                report(error=errors.cause_of(error) + (f" (at {place})" if place else ""))
    return 0


if __name__ == "__main__":
    command_line.run_and_exit(main)
