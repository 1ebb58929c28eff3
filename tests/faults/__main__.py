"""Tries every fault and prints a table: `PYTHONPATH=tests python -m faults`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faults.scenarios import SCENARIOS
from faults.stock import SCENARIOS as stock_scenarios


def main() -> int:
    """Tries the faults whose names hold a word that is given; all without one."""
    words = sys.argv[1] if len(sys.argv) > 1 else ""
    columns = ("fault", "seconds", "tfmulti", "TensorFlow alone")
    table = Table(*columns, title="Faults put into two workers", show_lines=True)
    wrong = 0
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
            except AssertionError as error:
                wrong, row = wrong + 1, ("–", f"WRONG: {str(error)[-600:]}")
        table.add_row(name, *row, alone)
        print(name, *row, alone, sep=" | ", flush=True)
    Console(width=160).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
