"""Tries every fault and prints a table: `PYTHONPATH=tests python -m faults`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faults.scenarios import SCENARIOS
from faults.stock import SCENARIOS as stock_scenarios

MARK = "TFMULTI_FAULTS"


def count_left() -> int:
    """Processes that the faults have started and that still are there."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    left = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            left += int(path.name) != os.getpid() and mark in (path / "environ").read_bytes()
        except OSError:
            continue
    return left


def main() -> int:
    """Tries the faults whose names hold a word that is given; all without one."""
    words = sys.argv[1] if len(sys.argv) > 1 else ""
    columns = ("fault", "seconds", "tfmulti", "TensorFlow alone")
    table = Table(*columns, title="Faults put into two workers", show_lines=True)
    wrong = 0
    os.environ[MARK] = str(os.getpid())
    for name, scenario in SCENARIOS.items():
        if words not in name:
            continue
        stock = stock_scenarios.get(name, lambda folder: "–")
        with tempfile.TemporaryDirectory() as folder:
            alone = stock(Path(folder) / "alone") or "–"
            try:
                seen = scenario(Path(folder))
                row = ("–", "not tried: this machine does not allow it")
                row = row if seen is None else (f"{seen[0]:.1f}", seen[1])
            except Exception as error:
                wrong, row = wrong + 1, ("–", f"WRONG: {str(error)[-600:]}")
        table.add_row(name, *row, alone)
        print(name, *row, alone, sep=" | ", flush=True)
    Console(width=160).print(table)
    left = count_left()
    print(f"{len(table.rows)} faults, {wrong} ended wrong; processes left: {left}")
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
