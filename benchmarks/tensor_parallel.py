"""Prints memory, bytes sent and seconds of a step of wide layers, as copies, sharded and split.

`python -m benchmarks.tensor_parallel [--of attention] [--width 512] [--wide 8192] [--layers 4]`

Each of `--layers` blocks is a Dense of `--wide` columns and one that takes them back to `--width`;
with `--of attention` it is self-attention whose heads have `--wide` columns together. `--rows` are
those of a step on all workers; those of attention are the tokens of sequences of 16.
Bytes are those that workers hand to MPI in a step, counted where they do, beside the prediction.
Steps are compared in `--rounds` pairs of runs with copies, on the cores of this machine.
"""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from benchmarks.launched import create_parser, median, run_on_workers, spread
from benchmarks.pipeline import describe_ratios

_WORKER = """
import contextlib, json, sys
import keras, numpy as np, tfmulti
from benchmarks.launched import create_clock
from tfmulti.mpi import all_reduce
from tfmulti.runtime.memory import peak_of
task = json.loads(sys.argv[1])
width, rows, way = task["width"], task["rows"], task["way"]
is_attention, tokens, heads = task["of"] == "attention", 16, 8
strategy = tfmulti.create_strategy("multi_worker", verify="never")
sent = [0]
def counted(name, times):
    original = getattr(all_reduce.MpiAllReduce, name)
    def call(self, *arguments):
        # An all-reduce hands a worker's bytes over, and so many again to get the sum round.
        arrays = [each for each in arguments if isinstance(each, np.ndarray)]
        sent[0] += times(self, arguments) * sum(array.nbytes for array in arrays)
        return original(self, *arguments)
    setattr(all_reduce.MpiAllReduce, name, call)
others = task["num_workers"] - 1
is_own = lambda self, arguments: arguments[0] == self._communicator.rank
counted("_add", lambda self, _: 2 * others / (others + 1))
counted("_send_to", lambda self, _: 1)
counted("_reduce_to", lambda self, arguments: 0 if is_own(self, arguments) else 1)
counted("_receive_shaped", lambda self, arguments: others if is_own(self, arguments) else 0)
sharded = contextlib.nullcontext() if way == "copies" else tfmulti.sharded_parameters()
shape = (tokens, width) if is_attention else (width,)
with strategy.scope(), sharded:
    given = hidden = keras.Input(shape)
    for place in range(task["layers"]):
        if is_attention:
            attention = keras.layers.MultiHeadAttention(heads, task["wide"] // heads)
            hidden = attention(hidden, hidden)
        else:
            wide = keras.layers.Dense(task["wide"], activation="relu", name=f"wide_{place}")
            hidden = keras.layers.Dense(width, name=f"back_{place}")(wide(hidden))
    model = keras.Model(given, hidden)
    if way == "split":
        layout = {"wide_.*/kernel": "column", "back_.*/kernel": "row"}
        if is_attention:
            layout = {"(query|key|value)/kernel": "column", "attention_output/kernel": "row"}
        model = tfmulti.tensor_parallel(model, layout)
    shard = None if way == "copies" else "parameters"
    model.compile(tfmulti.DistributedOptimizer("adam", shard=shard), "mse")
examples = rows // tokens if is_attention else rows
x = np.zeros((10 * examples, *shape), "float32")
clock = create_clock(lambda: sent[0])
data = tfmulti.distribute_train((x, x), strategy, examples)
model.fit(data, epochs=1, verbose=0, callbacks=[clock])
seconds = sorted(clock.seconds)[4]
sent = sorted(after - before for before, after in zip(clock.before, clock.after))[5]
print(json.dumps({"bytes": peak_of(), "seconds": seconds, "sent": sent}))
"""
WAYS = ("copies", "sharded", "split")
MATRICES = {"dense": 2, "attention": 4}
"""By what is split, the matrices of a block."""


def predicted_bytes(
    way: str, of: str, width: int, wide: int, layers: int, rows: int, num_workers: int = 2
) -> float:
    """Returns the bytes that a worker sends in a step, in float32.

    With copies it sends each gradient about twice (an all-reduce). With sharded parameters it
    sends the weights that it owns twice to all others, and its gradients of theirs. With split
    layers it sends rows, in the forward and the backward pass: its inputs of a column-split to all
    others, and its summands of their outputs of the row-split behind it. Of the first layer, whose
    inputs need no gradient, it sends less.

    >>> sizes = {"of": "dense", "width": 10, "wide": 100, "layers": 1, "rows": 8}
    >>> predicted_bytes("copies", **sizes), predicted_bytes("split", **sizes)
    (8000.0, 640.0)
    """
    weights, others = 4 * layers * MATRICES[of] * width * wide, num_workers - 1
    if way == "copies":
        return 2.0 * weights * others / num_workers
    if way == "sharded":
        return 3.0 * weights * others / num_workers
    return 2.0 * 4 * layers * rows / num_workers * others * 2 * width


def measure(way: str, num_workers: int = 2, **sizes) -> dict:
    """Trains ten steps on several workers of this machine.

    Returns:
        `bytes`, the largest peak of a worker's resident memory as the kernel counts it; `seconds`
        of the step in the middle; `sent`, the bytes that a worker sends in a step.
    """
    task = json.dumps({"way": way, "num_workers": num_workers, **sizes})
    seen = run_on_workers(["-c", _WORKER, task], num_workers, ["--mpi"])
    return {name: max(each[name] for each in seen) for name in seen[0]}


def result_table(runs: list[dict], **sizes) -> Table:
    """Returns the table of rounds of runs.

    Args:
        runs: Of each round what `measure` returned, by way.
        **sizes: The flags.
    """
    weights = MATRICES[sizes["of"]] * sizes["layers"] * sizes["width"] * sizes["wide"]
    what = f"{sizes['of']}, Adam, {weights / 1e6:.0f}M weights, {sizes['rows']} rows"
    title = f"{what}, 2 workers, MPI"
    columns = ("layers", "peak of a worker, MB", "less, MB", "sent by a worker, MB", "predicted")
    table = Table(*columns, "step, s", title=title)
    for way in WAYS:
        less = [(run["copies"]["bytes"] - run[way]["bytes"]) / 1e6 for run in runs]
        table.add_row(
            way,
            f"{median(runs, way, 'bytes') / 1e6:.0f}",
            spread(less, ".0f"),
            f"{median(runs, way, 'sent') / 1e6:.2f}",
            f"{predicted_bytes(way, **sizes) / 1e6:.2f}",
            f"{median(runs, way, 'seconds'):.3f}",
        )
    return table


def main() -> None:
    """Measures all in turn, and prints a table and ratios."""
    parser = create_parser(__doc__, width=512, wide=8192, layers=4, rows=64, rounds=4)
    parser.add_argument("--of", choices=MATRICES, default="dense")
    sizes = vars(parser.parse_args())
    runs = []
    for number in range(sizes.pop("rounds")):
        # Each is the first as often as the last.
        ways = WAYS if number % 2 else tuple(reversed(WAYS))
        runs.append({way: measure(way, **sizes) for way in ways})
    Console(width=120).print(result_table(runs, **sizes))
    for way in WAYS[1:]:
        ratios = [run[way]["seconds"] / run["copies"]["seconds"] for run in runs]
        print(f"step of {way} layers over that of copies: {describe_ratios(ratios)}")


if __name__ == "__main__":
    main()
