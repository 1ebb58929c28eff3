"""What a configuration leaves behind: its weights after every step, its losses and metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np


@dataclasses.dataclass
class Summary:
    """What is known of a whole run.

    Attributes:
        data: Digests of the data in two passes over them.
        paths: Path of each of the model's variables.
        trainable: Whether each is trainable.
        steps: Numbers of the steps whose weights were kept; 0 is before the first.
        losses: The loss in the logs after each step, a running mean over the epoch.
        epochs: The logs of each epoch.
        unlike: For each step, the variables that differ between this process's replicas.
        rounding: Relative rounding of one operation of the model.
    """

    data: list[str]
    paths: list[str] = dataclasses.field(default_factory=list)
    trainable: list[bool] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    epochs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    unlike: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    rounding: float = 2**-23


class Record:
    """A run's folder: `summary.json`, and one file of weights for each step.

    One file a step, so that two runs are compared with two steps in memory.

    Args:
        folder: The folder; it is made when something is written.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def write_weights(self, step: int, weights: list[np.ndarray]) -> None:
        """Keeps the weights after a step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        np.savez(self._file(step), *weights)

    def read_weights(self, step: int) -> list[np.ndarray]:
        """Returns the weights after a step, in the model's order."""
        with np.load(self._file(step)) as file:
            return [file[f"arr_{number}"] for number in range(len(file.files))]

    def write_summary(self, summary: Summary) -> None:
        """Keeps the summary, when the run has ended well."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(summary))
        (self.folder / "summary.json").write_text(text)

    def read_summary(self) -> Summary:
        """Returns the summary."""
        values = json.loads((self.folder / "summary.json").read_text())
        for name in ("losses", "unlike"):
            values[name] = {int(step): value for step, value in values[name].items()}
        return Summary(**values)

    def _file(self, step) -> Path:
        return self.folder / f"step_{step:06d}.npz"
