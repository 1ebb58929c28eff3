"""Prints bytes, seconds and the loss reached with fewer reductions, over a slow link.

`python -m benchmarks.slow_link [--mbit 100] [--units 512] [--steps 192] [--rounds 3]`

Two workers reduce in every step, with `gradient_accumulation_steps` 4 and 16, and take local steps
with `synchronize_every` 4 and 16, in turn in each round, from the same weights, with as many
examples. With root's rights they are in two network namespaces, whose link
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
name, every, units, steps, device = (sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
strategy = tfmulti.create_strategy("multi_worker", verify="never")
keras.utils.set_random_seed(0)
train, test = tfmulti.load_dataset("digits")
with strategy.scope():
    layers = [keras.layers.Flatten()]
    layers += [keras.layers.Dense(units, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input(train[0].shape[1:]), *layers, keras.layers.Dense(10)])
    accumulates = name == "gradient_accumulation_steps"
    optimizer = keras.optimizers.Adam(
        1e-3, gradient_accumulation_steps=every if accumulates else None
    )
    every = 1 if accumulates else every
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

ACCUMULATION, LOCAL_STEPS = "gradient_accumulation_steps", "synchronize_every"
EACH_STEP = (LOCAL_STEPS, 1)
WAYS = (EACH_STEP, (ACCUMULATION, 4), (ACCUMULATION, 16), (LOCAL_STEPS, 4), (LOCAL_STEPS, 16))
_LABELS = {ACCUMULATION: "accumulation of {}", LOCAL_STEPS: "{} local steps"}
_NUM_WORKERS = 2


def predicted_bytes(weights: int, way: tuple[str, int], num_workers: int = _NUM_WORKERS) -> float:
    """Returns the bytes that all workers together send in a step, with Adam.

    An all-reduce sends each number twice to every worker but one: the gradients of a step or of an
    update, or, after some local steps, the weights and their two slots.

    >>> predicted_bytes(400, EACH_STEP), predicted_bytes(400, (ACCUMULATION, 4))
    (800.0, 200.0)
    >>> predicted_bytes(400, (LOCAL_STEPS, 4)), predicted_bytes(400, (LOCAL_STEPS, 16))
    (600.0, 150.0)
    """
    name, every = way
    numbers = 3 if name == LOCAL_STEPS and every > 1 else 1
    return 2 * (num_workers - 1) * numbers * float(weights) / every


def measure(way: tuple[str, int], units: int, steps: int, link: Link | None) -> dict:
    """Trains on two workers of this machine.

    Args:
        way: The name of the argument that says how often workers reduce, and its value.
        units: The units of each of two hidden layers.
        steps: The steps of each of three epochs.
        link: The link between the workers; None for loopback.

    Returns:
        `seconds` of a step of the slower worker; `sent`, the bytes that all workers sent in a
        step; `loss` and `accuracy` of the examples held out; `weights`, their bytes.
    """
    job = [sys.executable, "-c", _WORKER, *map(str, (*way, units, steps))]
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
    weights = rounds[0][EACH_STEP]["weights"]
    title = f"Adam, {weights / 4e6:.1f}M weights, {_NUM_WORKERS} workers, {where}"
    columns = ("reduces", "sent in a step, kB", "predicted", "step, ms", "times")
    table = Table(*columns, "loss", "accuracy", title=title)
    for way in WAYS:
        ratios = [run[way]["seconds"] / run[EACH_STEP]["seconds"] for run in rounds]
        table.add_row(
            _LABELS[way[0]].format(way[1]) if way != EACH_STEP else "in each step",
            f"{launched.median(rounds, way, 'sent') / 1e3:.0f}",
            f"{predicted_bytes(weights, way) / 1e3:.0f}",
            f"{launched.median(rounds, way, 'seconds') * 1e3:.1f}",
            spread(ratios),
            *(spread([run[way][name] for run in rounds], ".4f") for name in ("loss", "accuracy")),
        )
    Console().print(table)


def main() -> None:
    """Measures all in turn, and prints a table."""
    parser = launched.create_parser(__doc__, mbit=100.0, units=512, steps=192, rounds=3)
    given = parser.parse_args()
    with network.link(given.mbit) as link:
        where = "loopback, not limited" if link is None else f"a link of {given.mbit:g} Mbit/s"
        rounds = [
            {way: measure(way, given.units, given.steps, link) for way in WAYS}
            for _ in range(given.rounds)
        ]
    _print(rounds, where)


if __name__ == "__main__":
    main()
