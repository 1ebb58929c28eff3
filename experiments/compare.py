"""Runs an experiment on one device, on two logical CPUs and on two workers, and compares.

`python -m experiments.compare NAME [--write_readme] [-- FLAGS OF THE EXPERIMENT]`
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from experiments import common

HERE = Path(__file__).parent
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def run(name: str, setup: str, flags, folder: Path) -> dict:
    """Runs an experiment as a user would; returns its metrics and weights.

    Raises:
        RuntimeError: Where it fails, with what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        f"experiments.{name}.experiment",
        *common.SETUPS.get(setup, ()),
        *flags,
    ]
    if setup == "two workers":
        launch = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2"]
        command = [*launch, f"--log_dir={folder / 'logs'}", "--", *command]
    done = subprocess.run(
        [*command, f"--workdir={folder}"], cwd=HERE.parent, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"`{name}` fails on {setup}. Received: {done.stdout}\n{done.stderr}")
    result = json.loads((folder / common.RESULT).read_text())["metrics"]
    with np.load(folder / common.WEIGHTS) as weights:
        return {"metrics": result, "weights": [weights[key] for key in weights.files]}


def differences(found: dict, reference: dict) -> tuple[float, float]:
    """Returns the largest difference of weights and of metrics between two runs.

    >>> differences({"metrics": {"loss": 1.5}, "weights": [np.zeros(2)]},
    ...             {"metrics": {"loss": 1.0}, "weights": [np.ones(2)]})
    (1.0, 0.5)
    """
    pairs = zip(found["weights"], reference["weights"], strict=True)
    weights = max((float(np.abs(a - b).max(initial=0.0)) for a, b in pairs), default=0.0)
    both = {k for k in reference["metrics"] if k != "examples_per_second"}
    metrics = max(abs(found["metrics"][k] - reference["metrics"][k]) for k in both)
    return weights, metrics


def table(found: dict[str, dict], metrics) -> str:
    """Returns a table in Markdown: a line for each configuration, the first being the reference."""
    names = ["where", *metrics, "weights off by", "metrics off by"]
    lines = [" | ".join(names), " | ".join(["---"] + ["---:"] * (len(names) - 1))]
    reference = next(iter(found.values()))
    for where, result in found.items():
        cells = [f"{result['metrics'][name]:.4f}" for name in metrics]
        off = ("-", "-") if result is reference else differences(result, reference)
        cells += [each if each == "-" else f"{each:.1g}" for each in off]
        lines.append(" | ".join([where, *cells]))
    return "".join(f"| {line} |\n" for line in lines)


def write_between_marks(path: Path, text: str) -> None:
    """Replaces what stands between the two marks of a README."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def compare(name: str, extra, folder: Path) -> str:
    """Runs every comparison of an experiment, into folders of its own; returns Markdown."""
    experiment = importlib.import_module(f"experiments.{name}.experiment")
    parts = [f"{common.hardware()}.\n"]
    for number, comparison in enumerate(experiment.COMPARISONS):
        flags, found = [*comparison.flags, *extra], {}
        for setup in comparison.setups:
            place = folder / str(number) / setup.replace(" ", "_")
            found[setup] = run(name, setup, flags, place)
            print(f"{comparison.title}, {setup}: {found[setup]['metrics']}", flush=True)
        parts.append(f"{comparison.title}{f' (`{chr(32).join(flags)}`)' if flags else ''}:\n")
        own = folder / str(number) / comparison.setups[0].replace(" ", "_") / common.TABLE
        # An experiment that is about something else than devices writes its own table.
        if own.exists() and len(found) == 1:
            parts.append(own.read_text())
        else:
            parts.append(table(found, experiment.METRICS))
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    """Compares, prints the tables, and writes them where asked. Returns the exit code."""
    at = argv.index("--") if "--" in argv else len(argv)
    names = [word for word in argv[:at] if word != "--write_readme"]
    if len(names) != 1 or not (HERE / names[0] / "experiment.py").exists():
        print(__doc__, file=sys.stderr)
        return 2
    home = HERE / names[0]
    with tempfile.TemporaryDirectory() as folder:
        text = compare(names[0], argv[at + 1 :], Path(folder))
        print(text)
        if "--write_readme" in argv[:at]:
            write_between_marks(home / "README.md", text)
            for picture in Path(folder, "0").glob(f"*/{names[0]}.png"):
                shutil.copy(picture, home)
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
