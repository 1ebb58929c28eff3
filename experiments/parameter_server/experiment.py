"""A large embedding on parameter servers, with a slow worker: asynchronous against synchronous.

Trains the same model three times with two workers, of which one is stopped most of the time, as a
machine that others use is. Synchronous steps wait for it; asynchronous ones do not, and apply stale
gradients; bounded staleness is between. Draws the loss over seconds and over examples.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy as np

from experiments import common

METRICS = ()
COMPARISONS = (common.Comparison("With one slow worker", setups=("as it is",)),)
# What --max_staleness becomes; None for asynchronous.
MODES = {"asynchronous": None, "staleness at most 2": 2, "synchronous": 0}
STEPS = "steps.json"
_PERIOD_S = 0.4
_WINDOW = 25
_WORDS = 8


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    unused: ClassVar = ("strategy", "logical_cpus", "dataset", "dtype_policy")

    epochs: int = common.flag(3, "Passes over the data.")
    global_batch_size: int = common.flag(64, "Examples of a step.")
    learning_rate: float = common.flag(0.01, "Adam's learning rate.")
    examples: int = common.flag(6400, "Examples to make up.")
    rows: int = common.flag(50_000, "Rows of the embedding, of 16 columns.")
    slow: float = common.flag(0.75, "Part of the time in which worker 1 is stopped.")
    mode: str = common.flag("", "Train in this mode, as a task of a job.", ("", *MODES))


def make_examples(settings: Settings):
    """Makes up sets of words, some of them frequent, and a number that their hidden weights give.

    Returns:
        The words, int32 of shape `(examples, 8)`; the numbers, float32 of shape `(examples, 1)`.
    """
    random = np.random.default_rng(settings.seed)
    words = (random.zipf(1.3, (settings.examples, _WORDS)) - 1) % settings.rows
    hidden = random.normal(size=settings.rows)
    return words.astype("int32"), hidden[words].mean(1, keepdims=True).astype("float32")


def create_model(settings: Settings):
    """Returns the model: the mean of the words' vectors, and a layer."""
    import keras

    keras.utils.set_random_seed(settings.seed)
    model = keras.Sequential(
        [
            keras.Input((_WORDS,), dtype="int32"),
            keras.layers.Embedding(settings.rows, 16),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(settings.learning_rate), "mse")
    return model


def run_task(settings: Settings) -> None:
    """What each task of a job does: the chief trains, and notes each step."""
    import keras

    import tfmulti

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    folder = Path(settings.workdir)
    (folder / f"{task['type']}_{task['index']}.pid").write_text(str(os.getpid()))
    strategy = tfmulti.create_strategy("parameter_server")
    with strategy.scope():
        model = create_model(settings)
    steps = []

    class Note(keras.callbacks.Callback):
        """Notes when each step was applied, and the loss of its batch."""

        def on_epoch_begin(self, epoch, logs=None):
            """Begins the running mean anew."""
            self._sum = 0.0

        def on_train_batch_end(self, batch, logs=None):
            """Takes the batch's own loss from the running mean of batches of one size."""
            total = logs["loss"] * (batch + 1)
            steps.append((time.monotonic(), total - self._sum))
            self._sum = total

    history = tfmulti.train_async(
        model,
        make_examples(settings),
        batch_size=settings.global_batch_size,
        epochs=settings.epochs,
        max_staleness=MODES[settings.mode],
        callbacks=[Note()],
        seed=settings.seed,
        verbose=0,
    )
    begin = steps[0][0]
    found = {
        "seconds": [at - begin for at, _ in steps],
        "losses": [loss for _, loss in steps],
        "staleness": history.history["staleness_mean"],
        "staleness_p95": history.history["staleness_p95"],
        "workers": history.steps_by_worker,
    }
    (folder / STEPS).write_text(json.dumps(found))


class SlowWorker:
    """Stops a process again and again for a part of the time, as long as a context lasts."""

    def __init__(self, pid_file: Path, part: float):
        self._file, self._part, self._ended = pid_file, part, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _run(self):
        while not self._file.exists() or not self._file.read_text():
            if self._ended.wait(0.05):
                return
        pid = int(self._file.read_text())
        try:
            while not self._ended.wait(_PERIOD_S * (1 - self._part)):
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(_PERIOD_S * self._part)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def run_job(settings: Settings, mode: str, folder: Path) -> dict:
    """Runs a chief, two workers, one of them slow, and two servers; returns what the chief noted.

    Raises:
        RuntimeError: Where the job fails, with what it said.
    """
    folder.mkdir(parents=True)
    launch = ["tfmulti.launch", "--num_workers=2", "--num_ps=2", f"--log_dir={folder / 'logs'}"]
    command = [sys.executable, "-m", *launch, "--", sys.executable]
    command += ["-m", "experiments.parameter_server.experiment", f"--mode={mode}"]
    names = ("epochs", "global_batch_size", "learning_rate", "examples", "rows", "seed")
    command += [f"--{name}={getattr(settings, name)}" for name in names]
    with SlowWorker(folder / "worker_1.pid", settings.slow):
        done = subprocess.run(
            [*command, f"--workdir={folder}"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"The job must end with 0. Received: {done.returncode}: {done.stderr}")
    return json.loads((folder / STEPS).read_text())


def smooth(losses) -> np.ndarray:
    """Returns the mean of each loss and those before it, as many as a window has."""
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - _WINDOW, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw(runs: dict[str, dict], batch_size: int, path: Path) -> None:
    """Draws the loss over seconds, and over examples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, found in runs.items():
        losses = smooth(found["losses"])
        left.plot(found["seconds"], losses, label=name)
        right.plot(np.arange(1, len(losses) + 1) * batch_size, losses, label=name)
    left.set_xlabel("seconds of training")
    right.set_xlabel("examples")
    left.set_ylabel(f"loss, mean of {_WINDOW} steps")
    for axis in (left, right):
        axis.grid(True, alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=110)


def report(runs: dict[str, dict]) -> str:
    """Returns the table, in Markdown."""
    lines = [
        "run | seconds | last loss | staleness, mean | 95th percentile | steps of workers 0 and 1",
        "---" + " | ---:" * 5,
    ]
    for name, found in runs.items():
        workers = found["workers"]
        cells = [name, f"{found['seconds'][-1]:.1f}", f"{smooth(found['losses'])[-1]:.4f}"]
        cells += [f"{found['staleness'][-1]:.2f}", f"{found['staleness_p95'][-1]:.1f}"]
        cells.append(f"{workers.get('0', 0)}, {workers.get('1', 0)}")
        lines.append(" | ".join(cells))
    return "".join(f"| {line} |\n" for line in lines)


def train(settings: Settings):
    """Runs all modes; returns what was measured, and no weights: they differ by design."""
    folder = Path(settings.workdir or tempfile.mkdtemp())
    names = list(MODES)
    runs = {name: run_job(settings, name, folder / f"run_{i}") for i, name in enumerate(names)}
    draw(runs, settings.global_batch_size, folder / "parameter_server.png")
    text = report(runs)
    (folder / common.TABLE).write_text(text)
    print(text)
    last = {name: float(found["seconds"][-1]) for name, found in runs.items()}
    return {f"seconds, {name}": seconds for name, seconds in last.items()}, []


if __name__ == "__main__":
    settings = common.parse(Settings)
    if settings.mode:
        run_task(settings)
    else:
        common.keep(settings, *train(settings))
