"""A model whose training does not fit into one worker's memory trains on two.

`--memory_mb` limits what the process may take beyond what it has once TensorFlow is there, as a
cgroup or a small machine does. One worker ends with an error; two that shard parameters train.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time

import keras
import numpy as np
from keras import layers

import tfmulti
from experiments import common

_STATUS = "/proc/self/status"
_LOOK_S = 0.005


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    unused = ("logical_cpus", "dtype_policy", "dataset", "workdir")

    epochs: int = common.flag(2, "Passes over the data.")
    global_batch_size: int = common.flag(16, "Examples per step over all replicas.")
    layers: int = common.flag(12, "Hidden layers.")
    width: int = common.flag(2048, "Width of the hidden layers.")
    memory_mb: int = common.flag(0, "Megabytes that training may take; 0 for no limit.")
    shard: str = common.flag("parameters", "What to shard.", ("none", "state", "parameters"))


def read_status(name: str) -> int:
    """Returns bytes that the kernel tells of this process, such as `VmRSS` or `VmHWM`."""
    with open(_STATUS) as status:
        [size] = [int(line.split()[1]) for line in status if line.startswith(f"{name}:")]
    return size * 1024


def limit_memory(settings: Settings) -> None:
    """Ends the process when it takes more memory than the settings allow, as a cgroup does."""
    if not settings.memory_mb:
        return
    begin = read_status("VmRSS")

    def watch():
        while read_status("VmRSS") - begin <= settings.memory_mb * 10**6:
            time.sleep(_LOOK_S)
        print(
            "error: training must fit into memory. Received: a worker that needs more than "
            f"--memory_mb={settings.memory_mb}, with --shard={settings.shard}. "
            "Use more workers with --shard=parameters, or a smaller model.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_a_small_step(strategy) -> None:
    """Makes TensorFlow's threads and MPI's buffers be there, which belong to no model."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = np.zeros((16, 8), "float32")
    model.fit(tfmulti.distribute_train((rows, rows[:, :1]), strategy, 16), verbose=0)


def create_model(settings: Settings, strategy) -> keras.Model:
    """Dense layers of the same width; each worker creates what it will hold."""
    keras.utils.set_random_seed(settings.seed)
    sharded = settings.shard == "parameters"
    context = tfmulti.sharded_parameters() if sharded else contextlib.nullcontext()
    with strategy.scope(), context:
        hidden = [layers.Dense(settings.width, activation="tanh") for _ in range(settings.layers)]
        model = keras.Sequential([keras.Input((settings.width,)), *hidden, layers.Dense(1)])
        shard = None if settings.shard == "none" else settings.shard
        optimizer = keras.optimizers.Adam(settings.learning_rate)
        model.compile(tfmulti.DistributedOptimizer(optimizer, shard=shard), "mse")
    return model


def train(settings: Settings) -> dict[str, float]:
    """Trains, and returns the last loss and the megabytes that the worker took."""
    strategy = tfmulti.create_strategy(settings.strategy)
    run_a_small_step(strategy)
    begin = read_status("VmRSS")
    limit_memory(settings)
    model = create_model(settings, strategy)
    random = np.random.default_rng(settings.seed)
    x = random.normal(size=(8 * settings.global_batch_size, settings.width)).astype("float32")
    data = tfmulti.distribute_train((x, x[:, :1]), strategy, settings.global_batch_size)
    history = model.fit(data, epochs=settings.epochs, verbose=common.verbose())
    taken = (read_status("VmHWM") - begin) / 1e6
    return {
        "loss": history.history["loss"][-1],
        "weights_mb": 4e-6 * model.count_params(),
        "taken_mb": taken,
    }


def main() -> None:
    """Runs the command line; the process ends with 1 where memory does not suffice."""
    metrics = train(common.parse(Settings))
    if common.is_chief():
        print(", ".join(f"{name}: {value:.4g}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
