"""Measures every technique beyond data parallelism in one run, and writes what came of it.

`python -m benchmarks.techniques [--only state,memory] [--write_markdown TECHNIQUES.md]`

Each section is a benchmark of its own, which compares a technique with plain copies of the model,
round by round. They run one after the other, so that none disturbs another.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfmulti.bench import report, results
from tfmulti.runtime import files

_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Section:
    """One benchmark.

    Attributes:
        title: The heading.
        arguments: The module in this folder, and its flags.
    """

    title: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """What a user types to run it alone."""
        return shlex.join(["python", "-m", *self.arguments])


SECTIONS = {
    "memory": Section("Checkpointed activations", ("benchmarks.memory",)),
    "state": Section("Sharded state and parameters, MPI", ("benchmarks.sharded_state",)),
    "larger": Section(
        "Sharded state and parameters of a larger model",
        ("benchmarks.sharded_state", "--layers=29", "--rounds=2"),
    ),
    "four": Section(
        "Sharded state and parameters, four workers",
        ("benchmarks.sharded_state", "--num_workers=4", "--rounds=2"),
    ),
    "larger_four": Section(
        "Sharded state and parameters of a larger model, four workers",
        ("benchmarks.sharded_state", "--layers=29", "--num_workers=4", "--rounds=1"),
    ),
    "ring": Section(
        "Sharded state and parameters, TensorFlow's ring",
        ("benchmarks.sharded_state", "--communication=ring"),
    ),
    "ahead": Section("Weights gathered ahead", ("benchmarks.gathering_ahead",)),
    "pipeline": Section("Pipeline", ("benchmarks.pipeline",)),
    "tensor": Section("Tensor parallelism", ("benchmarks.tensor_parallel",)),
    "attention": Section(
        "Tensor parallelism, attention", ("benchmarks.tensor_parallel", "--of=attention")
    ),
    "link": Section("Local steps on a slow link", ("benchmarks.slow_link",)),
    "embedding": Section("A table on parameter servers", ("benchmarks.large_embedding",)),
}


def run(names: Sequence[str]) -> Iterator[tuple[Section, str]]:
    """Runs sections, and yields each with what it printed, as it ends.

    Raises:
        subprocess.CalledProcessError: If one fails.
    """
    for name in names:
        section = SECTIONS[name]
        command = [sys.executable, "-m", *section.arguments]
        done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True)
        yield section, done.stdout


def create_markdown(found: Sequence[tuple[Section, str]], machine: Mapping, seconds: float) -> str:
    """Returns the page: the machine, and for each section its command and what it printed."""
    lines = ["# Techniques", "", "Written by `python -m benchmarks.techniques`.", ""]
    lines += report.describe_machine(machine, seconds)
    for section, text in found:
        lines += ["", f"## {section.title}", "", f"`{section.command}`", ""]
        lines += ["```text", *(line.rstrip() for line in text.strip("\n").splitlines()), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by default all")
    parser.add_argument("--write_markdown", type=Path, default=Path("runs/TECHNIQUES.md"))
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(
            f"`--only` must be some of {', '.join(SECTIONS)}, with commas between. "
            f"Received: {', '.join(unknown)}. Use for example --only memory,state."
        )
    machine, began, found = results.describe_machine(), time.monotonic(), []
    for section, text in run(names):
        print(f"{section.title}: {section.command}\n\n{text}", flush=True)
        found.append((section, text))
    page = create_markdown(found, machine, time.monotonic() - began)
    given.write_markdown.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(given.write_markdown, lambda path: path.write_text(page))
    print(f"wrote {given.write_markdown}")


if __name__ == "__main__":
    main()
