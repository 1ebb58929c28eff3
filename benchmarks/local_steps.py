"""Prints bytes, seconds and the loss reached with local steps, over a slow link.

`python -m benchmarks.local_steps [--mbit 100] [--units 512] [--steps 192] [--rounds 3]`

Two workers train with `synchronize_every` 1, 4 and 16, in turn in each round, from the same
weights, with as many examples. With root's rights they are in two network namespaces, whose link
is limited to a rate by `tc`; else they use loopback, which is not limited, and whose device counts
the bytes of other programs too. The loss is that of examples that were not trained on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

_WORKER = """
import json, sys, time
import keras, tfmulti
every, units, steps, device = (*map(int, sys.argv[1:4]), sys.argv[4])
strategy = tfmulti.create_strategy("multi_worker", verify="never")
keras.utils.set_random_seed(0)
train, test = tfmulti.load_dataset("digits")
with strategy.scope():
    layers = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(units, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input(train[0].shape[1:]), *layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(
        tfmulti.DistributedOptimizer(optimizer, synchronize_every=every),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
def sent():
    with open(f"/sys/class/net/{device}/statistics/tx_bytes") as count:
        return int(count.read())
class Clock(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.end = (time.perf_counter(), sent())
        if epoch == 0:
            self.begin = self.end
clock = Clock()
data = tfmulti.distribute_train(train, strategy, 64, steps_per_epoch=steps)
# The first epoch has the start of everything.
model.fit(data, epochs=3, verbose=0, callbacks=[clock])
held_out = tfmulti.distribute_eval(test, strategy, 64)
loss, accuracy = model.evaluate(held_out, verbose=0)
print(json.dumps({
    "seconds": (clock.end[0] - clock.begin[0]) / steps / 2,
    "sent": (clock.end[1] - clock.begin[1]) / steps / 2,
    "loss": loss, "accuracy": accuracy, "weights": 4 * model.count_params(),
}))
"""

EVERY = (1, 4, 16)
_NUM_WORKERS = 2
_ADDRESSES = ("10.213.78.1", "10.213.78.2")
_BURST, _LATENCY = "64kb", "200ms"


def predicted_bytes(weights: int, every: int, num_workers: int = _NUM_WORKERS) -> float:
    """Returns the bytes that all workers together send in a step, with Adam.

    An all-reduce sends each number twice to every worker but one: with 1 the gradients, else,
    after so many steps, the weights and their two slots.

    >>> predicted_bytes(400, 1), predicted_bytes(400, 4), predicted_bytes(400, 16)
    (800.0, 600.0, 150.0)
    """
    once = 2 * (num_workers - 1) * float(weights)
    return once if every == 1 else 3 * once / every


@contextlib.contextmanager
def limited_link(mbit: float) -> Iterator[list[str] | None]:
    """Gives the names of two network namespaces with a slow link, None where none can be made.

    Args:
        mbit: The rate of each direction, in millions of bits a second.
    """
    names = [f"tfmulti{os.getpid()}{side}" for side in "ab"]
    try:
        try:
            _lay(names, mbit)
        except (OSError, subprocess.CalledProcessError):
            yield None
            return
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _lay(names, mbit):
    for name in names:
        _call("ip", "netns", "add", name)
    first, second = names
    ends = ["link", "add", "link0", "netns", first, "type", "veth"]
    _call("ip", *ends, "peer", "name", "link0", "netns", second)
    for name, address in zip(names, _ADDRESSES):
        _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "link0")
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "link", "set", "link0", "up")
        shape = ["rate", f"{mbit}mbit", "burst", _BURST, "latency", _LATENCY]
        _call("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", *shape)


def _call(*command):
    subprocess.run(command, check=True, capture_output=True)


def measure(every: int, units: int, steps: int, names: list[str] | None) -> dict:
    """Trains on two workers of this machine.

    Args:
        every: The steps between two averages.
        units: The units of each of two hidden layers.
        steps: The steps of each of three epochs.
        names: The network namespaces of the workers; None for loopback.

    Returns:
        `seconds` of a step of the slower worker; `sent`, the bytes that all workers sent in a
        step; `loss` and `accuracy` of the examples held out; `weights`, their bytes.
    """
    job = [sys.executable, "-c", _WORKER, str(every), str(units), str(steps)]
    if names is None:
        command = [*_launch("--num_workers", str(_NUM_WORKERS)), *job, "lo"]
        texts = _outputs([command])
    else:
        with tempfile.TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts"
            hosts.write_text("".join(f"{address}\n" for address in _ADDRESSES))
            texts = _outputs(
                ["ip", "netns", "exec", name]
                + _launch("--hosts", str(hosts), "--host_index", str(index))
                + [*job, "link0"]
                for index, name in enumerate(names)
            )
    lines = [line.partition("] ")[2] for text in texts for line in text.splitlines()]
    seen = [json.loads(line) for line in lines if line.startswith("{")]
    # Both workers count all bytes of loopback, and each its own end of a link.
    count = max if names is None else sum
    found = {name: max(each[name] for each in seen) for name in seen[0]}
    return found | {"sent": count(each["sent"] for each in seen)}


def _launch(*flags) -> list[str]:
    launch = [sys.executable, "-m", "tfmulti.launch", *flags]
    return [*launch, "--all_output", "--threads", "1", "--"]


def _outputs(commands) -> list[str]:
    """Runs commands together, and returns what they print."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    running = [
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    texts = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return texts


def _spread(values, form) -> str:
    ends = dict.fromkeys(f"{end(values):{form}}" for end in (min, max))
    return " to ".join(ends)


def _print(rounds, where):
    weights = rounds[0][1]["weights"]
    title = f"Adam, {weights / 4e6:.1f}M weights, {_NUM_WORKERS} workers, {where}"
    columns = ("synchronize_every", "sent in a step, kB", "predicted", "step, ms", "times")
    table = Table(*columns, "loss", "accuracy", title=title)
    for every in EVERY:
        runs = [found[every] for found in rounds]
        ratios = [found[every]["seconds"] / found[1]["seconds"] for found in rounds]
        table.add_row(
            str(every),
            f"{statistics.median(run['sent'] for run in runs) / 1e3:.0f}",
            f"{predicted_bytes(weights, every) / 1e3:.0f}",
            f"{statistics.median(run['seconds'] for run in runs) * 1e3:.1f}",
            _spread(ratios, ".2f"),
            _spread([run["loss"] for run in runs], ".4f"),
            _spread([run["accuracy"] for run in runs], ".4f"),
        )
    Console().print(table)


def main() -> None:
    """Measures all in turn, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=100.0)
    for name, default in {"units": 512, "steps": 192, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with limited_link(given.mbit) as names:
        where = "loopback, not limited" if names is None else f"a link of {given.mbit:g} Mbit/s"
        rounds = [
            {every: measure(every, given.units, given.steps, names) for every in EVERY}
            for _ in range(given.rounds)
        ]
    _print(rounds, where)


if __name__ == "__main__":
    main()
