"""What the experiments share: flags, what a run leaves on disk, and a line on the hardware."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
from absl import flags
from keras import layers

import tfmulti

RESULT, WEIGHTS, TABLE = "result.json", "weights.npz", "results.md"
SETUPS = {
    "one device": ("--strategy=one_device",),
    "two logical CPUs": ("--strategy=mirrored", "--logical_cpus=2"),
    "two workers": ("--strategy=multi_worker",),
}
_STATUS = "/proc/self/status"
_POLL_S = 0.005
_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def flag(default, text: str, choices=None):
    """Returns a dataclass field that becomes a flag; its kind is that of its default."""
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `python -m experiments.compare` runs, for one table of a README.

    Attributes:
        title: What stands above the table.
        flags: Flags of the experiment.
        setups: Where it runs; the first is what the others are compared with.
    """

    title: str
    flags: tuple[str, ...] = ()
    setups: tuple[str, ...] = tuple(SETUPS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags that experiments have; each adds its own and sets its own defaults.

    Attributes:
        unused: Names of those that an experiment has no use for, and does not offer.
    """

    unused: ClassVar[tuple[str, ...]] = ()

    strategy: str = flag(
        "auto", "Where to train.", ("auto", "one_device", "mirrored", "multi_worker", "tpu")
    )
    logical_cpus: int = flag(0, "Split the CPU into this many; 0 leaves it whole.")
    dataset: str = flag("", "What to train on.")
    global_batch_size: int = flag(64, "Examples per step over all replicas.")
    epochs: int = flag(10, "Passes over the data.")
    learning_rate: float = flag(0.001, "Rate for the base batch size.")
    dtype_policy: str = flag(
        "float32", "Keras dtype policy: float32, mixed_bfloat16, mixed_float16, float64."
    )
    seed: int = flag(0, "Seed of data that is made, weights, order and randomness.")
    workdir: str = flag("", "Folder for what the run leaves; by default nothing is kept.")


@dataclasses.dataclass(frozen=True)
class DenseSettings(Settings):
    """The flags of experiments whose model does not fit into one worker's memory."""

    unused = ("logical_cpus", "dtype_policy", "dataset", "workdir")

    epochs: int = flag(2, "Passes over the data.")
    global_batch_size: int = flag(16, "Examples per step over all replicas.")
    layers: int = flag(12, "Hidden layers.")
    width: int = flag(2048, "Width of the hidden layers.")
    memory_mb: int = flag(0, "Megabytes that training may take; 0 for no limit.")


def parse(settings: type, argv: list[str] | None = None):
    """Returns the settings that a command line gives; ends with 2 where it cannot be read."""
    argv = sys.argv if argv is None else argv
    fields = [f for f in dataclasses.fields(settings) if f.name not in settings.unused]
    if {"--help", "-h"} & set(argv[1:]):
        for field in fields:
            default = "none" if field.default == "" else field.default
            print(f"  --{field.name}: {field.metadata['help']} Default: {default}")
        raise SystemExit(0)
    values = flags.FlagValues()
    for field in fields:
        text, choices = field.metadata["help"], field.metadata["choices"]
        if choices:
            flags.DEFINE_enum(field.name, field.default, choices, text, flag_values=values)
        else:
            _DEFINE[type(field.default)](field.name, field.default, text, flag_values=values)
    try:
        rest = values(argv)[1:]
    except flags.Error as error:
        rest = [f"{error}"]
    if rest:
        print(f"error: {' '.join(rest)}. See --help.", file=sys.stderr)
        raise SystemExit(2)
    return settings(**{field.name: values[field.name].value for field in fields})


def is_chief() -> bool:
    """Whether this worker is the one that shows and writes."""
    # Once the strategy is there, the port is taken: by this process.
    cluster = tfmulti.resolve_cluster(check_network=False)
    return cluster is None or cluster.is_chief


def verbose() -> int:
    """Keras's line an epoch on the chief, nothing elsewhere."""
    return 2 if is_chief() else 0


def last_metrics(history) -> dict[str, float]:
    """Returns the last value of each metric, and the examples per second."""
    left_out = {*tfmulti.callbacks.MEASURED} - {"examples_per_second"}
    last = {name: float(np.ravel(values[-1])[0]) for name, values in history.history.items()}
    return {name: value for name, value in last.items() if name not in left_out}


def keep(settings, metrics: dict, weights: list[np.ndarray]) -> None:
    """Prints what came of a run, and leaves it in the work folder, on the chief.

    Args:
        settings: The run's flags.
        metrics: What was measured, by name.
        weights: Arrays that another run of the same flags should end with. Read them on every
            worker: that can be a collective.
    """
    if not is_chief():
        return
    print(json.dumps(metrics, indent=2))
    if not settings.workdir:
        return
    folder = Path(settings.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / WEIGHTS, *weights)
    result = {"metrics": metrics, "flags": dataclasses.asdict(settings)}
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n")


def read_status(name: str) -> int:
    """Returns bytes that the kernel tells of this process, such as `VmRSS` or `VmHWM`."""
    with open(_STATUS) as status:
        [size] = [int(line.split()[1]) for line in status if line.startswith(f"{name}:")]
    return size * 1024


def limit_memory(settings: DenseSettings, advice: str) -> None:
    """Ends the process when it takes more memory than the settings allow, as a cgroup does.

    Args:
        settings: The run's flags.
        advice: What to do then.
    """
    if not settings.memory_mb:
        return
    begin = read_status("VmRSS")

    def watch():
        while read_status("VmRSS") - begin <= settings.memory_mb * 10**6:
            time.sleep(_POLL_S)
        print(
            "error: training must fit into memory. Received: a worker that needs more than "
            f"--memory_mb={settings.memory_mb}. {advice}",
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


def create_dense(settings: DenseSettings) -> keras.Model:
    """Returns dense layers of the same width."""
    keras.utils.set_random_seed(settings.seed)
    hidden = [layers.Dense(settings.width, activation="tanh") for _ in range(settings.layers)]
    return keras.Sequential([keras.Input((settings.width,)), *hidden, layers.Dense(1)])


def train_within_memory(
    settings: DenseSettings, create_model: Callable[..., keras.Model], advice: str
) -> dict[str, float]:
    """Trains, and returns the last loss and the megabytes that the worker took.

    Args:
        settings: The run's flags.
        create_model: Function of the settings and the strategy, that returns a compiled model.
        advice: What to do where memory does not suffice; the process ends with 1 then.
    """
    strategy = tfmulti.create_strategy(settings.strategy)
    run_a_small_step(strategy)
    begin = read_status("VmRSS")
    limit_memory(settings, advice)
    model = create_model(settings, strategy)
    random = np.random.default_rng(settings.seed)
    x = random.normal(size=(8 * settings.global_batch_size, settings.width)).astype("float32")
    data = tfmulti.distribute_train((x, x[:, :1]), strategy, settings.global_batch_size)
    history = model.fit(data, epochs=settings.epochs, verbose=verbose())
    taken = (read_status("VmHWM") - begin) / 1e6
    return {
        "loss": history.history["loss"][-1],
        "weights_mb": 4e-6 * model.count_params(),
        "taken_mb": taken,
    }


def hardware() -> str:
    """Returns one line on the processor, the GPUs and the versions of this machine."""
    import tensorflow as tf

    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    gpus = len(tf.config.list_physical_devices("GPU"))
    return (
        f"{model}, {os.cpu_count()} cores, {gpus or 'no'} GPUs; Python "
        f"{platform.python_version()}, TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )
