"""Kills a worker in the middle of an epoch; the run goes on and ends as one that was not killed.

Two workers are started by `tfmulti.launch --max_restarts 1`, twice: once uninterrupted, and once
with SIGKILL for worker 1, as soon as a checkpoint within an epoch in the second half is on disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import ClassVar

from experiments import common
from tfmulti import checkpoint

METRICS = ()
COMPARISONS = (common.Comparison("Killed, and uninterrupted", setups=("as it is",)),)
# The lines of the launcher and the chief that tell the story.
TOLD = re.compile(
    r"exited early|worker \d.*(SIGKILL|lost)|Restart|[Rr]esum|[Gg]oing on|weights_sha"
)
POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class Settings(common.Settings):
    """The flags of this experiment."""

    unused: ClassVar = ("strategy", "logical_cpus", "learning_rate", "dtype_policy")

    dataset: str = common.flag("digits", "As for tfmulti.train.")
    epochs: int = common.flag(6, "Passes over the data.")
    checkpoint_steps: int = common.flag(5, "Steps from one checkpoint to the next.")
    model: str = common.flag("cnn", "As for tfmulti.train.")


@dataclasses.dataclass
class Run:
    """What came of one run: its result, its output, and when each epoch began, in seconds."""

    result: dict
    text: str
    epochs: list[tuple[float, int]]
    killed_s: float | None
    killed_step: int | None


def command(settings: Settings, folder: Path) -> list[str]:
    """Returns what a user would type."""
    launch = [
        "tfmulti.launch",
        "--num_workers=2",
        "--max_restarts=1",
        f"--log_dir={folder / 'logs'}",
    ]
    train = ["tfmulti.train", "--strategy=multi_worker", f"--workdir={folder / 'run'}"]
    for name in ("dataset", "model", "epochs", "global_batch_size", "checkpoint_steps", "seed"):
        train.append(f"--{name}={getattr(settings, name)}")
    return [sys.executable, "-m", *launch, "--", sys.executable, "-m", *train]


def find_worker(folder: Path, index: int) -> int | None:
    """Returns the process of a worker that trains into a folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
            variables = (path / "environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if words[1:3] != ["-m", "tfmulti.train"] or f"--workdir={folder / 'run'}" not in words:
            continue
        configs = [x.partition("=")[2] for x in variables if x.startswith("TF_CONFIG=")]
        if configs and json.loads(configs[0])["task"]["index"] == index:
            return int(path.name)
    return None


def step_within_epoch(folder: Path, steps_per_epoch: int, epochs: int) -> int | None:
    """Returns the step of a checkpoint on disk that lies in the second half, within an epoch."""
    for step in checkpoint.saved_in(folder / "run" / checkpoint.FOLDER):
        if step % steps_per_epoch and step > epochs * steps_per_epoch / 2:
            return step
    return None


def run(settings: Settings, folder: Path, kill_in: int = 0) -> Run:
    """Runs two workers to their end; kills one on the way in an epoch of so many steps.

    Raises:
        RuntimeError: Where the run fails, with what it said.
    """
    folder.mkdir(parents=True)
    log, began = folder / "launch.txt", time.monotonic()
    epochs, killed_s, killed_step = [], None, None
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    with open(log, "w") as file:
        process = subprocess.Popen(
            command(settings, folder), stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while process.poll() is None:
            seconds = time.monotonic() - began
            seen = re.findall(r"^\[worker 0\] Epoch (\d+)/", log.read_text(errors="replace"), re.M)
            epochs += [(seconds, int(number)) for number in seen[len(epochs) :]]
            if kill_in and killed_step is None:
                killed_step = step_within_epoch(folder, kill_in, settings.epochs)
                if killed_step is not None:
                    os.kill(find_worker(folder, 1), signal.SIGKILL)
                    killed_s = seconds
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    text = log.read_text(errors="replace")
    epochs.append((time.monotonic() - began, settings.epochs + 1))
    if process.returncode:
        raise RuntimeError(f"The run must end with 0. Received: {process.returncode}: {text}")
    result = json.loads((folder / "run" / "result.json").read_text())
    return Run(result, text, epochs, killed_s, killed_step)


def draw(whole: Run, killed: Run, path: Path) -> None:
    """Draws how far each run was at each second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, each, style in (("uninterrupted", whole, "--"), ("killed once", killed, "-")):
        seconds, epochs = zip(*each.epochs)
        axis.step(seconds, [n - 1 for n in epochs], style, where="post", label=name)
    axis.axvline(killed.killed_s, color="#d94801", lw=1)
    text = f" SIGKILL, worker 1\n (saved: step {killed.killed_step})"
    axis.annotate(text, (killed.killed_s, 0.3), color="#d94801", fontsize=9)
    axis.set_xlabel("seconds since the launcher was started")
    axis.set_ylabel("epochs done")
    axis.grid(True, alpha=0.3)
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def report(whole: Run, killed: Run) -> str:
    """Returns the table and the lines that tell the story, in Markdown."""
    lines = [
        "run | restarts | steps | loss | weights_sha256 | seconds",
        "---" + " | ---:" * 5,
    ]
    for name, each in (("uninterrupted", whole), ("killed once", killed)):
        found = each.result
        cells = [name, found["restarts"], found["steps"], f"{found['metrics']['loss']:.9f}"]
        cells += [f"{found['weights_sha256'][:16]}...", f"{each.epochs[-1][0]:.1f}"]
        lines.append(" | ".join(map(str, cells)))
    table = "".join(f"| {line} |\n" for line in lines)
    same = whole.result["weights_sha256"] == killed.result["weights_sha256"]
    verdict = "The weights are equal, bit for bit." if same else "The weights DIFFER."
    return f"{table}\n{verdict} What the killed run said of it:\n\n```text\n{story(killed)}```\n"


def story(killed: Run) -> str:
    """Returns the lines of the output that tell of the end, the restart and the resumption."""
    lines = [line for line in killed.text.splitlines() if TOLD.search(line)]
    # Folders are of no interest.
    return "".join(re.sub(r" \(log: .*?\)|, from /.*", "", line) + "\n" for line in lines)


def train(settings: Settings):
    """Runs both; returns what was measured, and no weights: their digests are compared."""
    folder = Path(settings.workdir or tempfile.mkdtemp())
    whole = run(settings, folder / "whole")
    killed = run(settings, folder / "killed", kill_in=whole.result["steps"] // settings.epochs)
    draw(whole, killed, folder / "recover.png")
    text = report(whole, killed)
    (folder / common.TABLE).write_text(text)
    print(text)
    return {
        "killed_at_step": killed.killed_step,
        "restarts": killed.result["restarts"],
        "same_weights": whole.result["weights_sha256"] == killed.result["weights_sha256"],
    }, []


if __name__ == "__main__":
    settings = common.parse(Settings)
    common.keep(settings, *train(settings))
