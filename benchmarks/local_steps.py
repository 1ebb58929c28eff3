"""Prints bytes, seconds and the loss reached with local steps, over a slow link.

`python -m benchmarks.local_steps [--mbit 100] [--units 512] [--steps 192] [--rounds 3]`

Two workers train with `synchronize_every` 1, 4 and 16, in turn in each round, from the same
weights, with as many examples. With root's rights they are in two network namespaces, whose link
is limited to a rate by `tc`; else they use loopback, which is not limited, and whose device counts
the bytes of other programs too. The loss is that of examples that were not trained on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import launched, network
from benchmarks.launched import spread
from benchmarks.network import Link

_WORKER = """
import json, sys, time
import keras, tfmulti
from benchmarks.launched import sent_bytes
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
class Clock(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.end = (time.perf_counter(), sent_bytes(device))
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


def predicted_bytes(weights: int, every: int, num_workers: int = _NUM_WORKERS) -> float:
    """Returns the bytes that all workers together send in a step, with Adam.

    An all-reduce sends each number twice to every worker but one: with 1 the gradients, else,
    after so many steps, the weights and their two slots.

    >>> predicted_bytes(400, 1), predicted_bytes(400, 4), predicted_bytes(400, 16)
    (800.0, 600.0, 150.0)
    """
    once = 2 * (num_workers - 1) * float(weights)
    return once if every == 1 else 3 * once / every


def measure(every: int, units: int, steps: int, link: Link | None) -> dict:
    """Trains on two workers of this machine.

    Args:
        every: The steps between two averages.
        units: The units of each of two hidden layers.
        steps: The steps of each of three epochs.
        link: The link between the workers; None for loopback.

    Returns:
        `seconds` of a step of the slower worker; `sent`, the bytes that all workers sent in a
        step; `loss` and `accuracy` of the examples held out; `weights`, their bytes.
    """
    job = [sys.executable, "-c", _WORKER, str(every), str(units), str(steps)]
    threads = ["--threads", "1"]
    if link is None:
        flags = ["--num_workers", str(_NUM_WORKERS), *threads]
        seen = launched.run_together([launched.launch(flags, [*job, "lo"])])
    else:
        with tempfile.TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts"
            hosts.write_text("".join(f"{address}\n" for address in link.hosts))
            flags = ["--hosts", str(hosts), *threads, "--host_index"]
            seen = launched.run_together(
                launched.launch([*flags, str(index)], [*job, link.device], prefix)
                for index, prefix in enumerate(link.prefixes)
            )
    # Both workers count all bytes of loopback, and each its own end of a link.
    count = max if link is None else sum
    found = {name: max(each[name] for each in seen) for name in seen[0]}
    return found | {"sent": count(each["sent"] for each in seen)}


def _print(rounds, where):
    weights = rounds[0][1]["weights"]
    title = f"Adam, {weights / 4e6:.1f}M weights, {_NUM_WORKERS} workers, {where}"
    columns = ("synchronize_every", "sent in a step, kB", "predicted", "step, ms", "times")
    table = Table(*columns, "loss", "accuracy", title=title)
    for every in EVERY:
        ratios = [run[every]["seconds"] / run[1]["seconds"] for run in rounds]
        table.add_row(
            str(every),
            f"{launched.median(rounds, every, 'sent') / 1e3:.0f}",
            f"{predicted_bytes(weights, every) / 1e3:.0f}",
            f"{launched.median(rounds, every, 'seconds') * 1e3:.1f}",
            spread(ratios),
            *(spread([run[every][name] for run in rounds], ".4f") for name in ("loss", "accuracy")),
        )
    Console().print(table)


def main() -> None:
    """Measures all in turn, and prints a table."""
    parser = launched.create_parser(__doc__, mbit=100.0, units=512, steps=192, rounds=3)
    given = parser.parse_args()
    with network.link(given.mbit) as link:
        where = "loopback, not limited" if link is None else f"a link of {given.mbit:g} Mbit/s"
        rounds = [
            {every: measure(every, given.units, given.steps, link) for every in EVERY}
            for _ in range(given.rounds)
        ]
    _print(rounds, where)


if __name__ == "__main__":
    main()
