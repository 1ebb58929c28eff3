"""Tries every guarantee everywhere: `PYTHONPATH=tests python -m conformance`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from conformance import guarantees, matrix, processes, table


def main() -> None:
    """Tries the guarantees, prints the table, and writes it to files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files go")
    parser.add_argument("--only", default="", help="guarantees with these words in their names")
    parser.add_argument("--column", default="", help='only this one, such as "mirrored 2"')
    parser.add_argument("--processes", type=int, default=processes.num_processes())
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        names = [guarantee.name for guarantee in guarantees.ALL if arguments.only in guarantee.name]
        places = [each for each in table.COLUMNS if arguments.column in ("", each.name)]
        rows = matrix.measure(names, places, Path(folder), arguments.processes)
    seconds = time.monotonic() - started
    table.show(rows, seconds)
    if not (arguments.only or arguments.column):
        table.write(rows, arguments.folder)
    broken = [row for row in rows if not row.kept]
    raise SystemExit(f"{len(broken)} guarantees are broken" if broken else 0)


if __name__ == "__main__":
    main()
