"""Tries every fault and prints a table: `PYTHONPATH=tests python -m faults`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faults.scenarios import SCENARIOS


def main() -> int:
    """Tries the faults whose names hold a word that is given; all without one."""
    words = sys.argv[1] if len(sys.argv) > 1 else ""
    table = Table("fault", "seconds", "what was seen", title="Faults, two workers", show_lines=True)
    wrong = 0
    for name, scenario in SCENARIOS.items():
        if words not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                seen = scenario(Path(folder))
                row = ("–", "not tried: this machine does not allow it")
                row = row if seen is None else (f"{seen[0]:.1f}", seen[1])
            except AssertionError as error:
                wrong, row = wrong + 1, ("–", f"WRONG: {str(error)[-600:]}")
        table.add_row(name, *row)
        print(name, *row, flush=True)
    Console(width=140).print(table)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
