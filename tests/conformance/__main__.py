"""Tries every guarantee everywhere: `PYTHONPATH=tests python -m conformance`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from conformance import guarantees, matrix, processes, table

# Rows that are measured, and written, together.
_TOGETHER = 12


def main() -> None:
    """Tries the guarantees, prints the table, and writes what is known to files after each few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the files go")
    parser.add_argument("--only", default="", help="guarantees with these words in their names")
    parser.add_argument("--column", default="", help='only this one, such as "mirrored 2"')
    parser.add_argument("--part", default="1/1", help="2/8 tries the second of eight parts")
    parser.add_argument("--missing", action="store_true", help="only what the files do not hold")
    parser.add_argument("--processes", type=int, default=processes.num_processes())
    arguments = parser.parse_args()
    started = time.monotonic()
    known = table.load(arguments.folder)
    part, parts = map(int, arguments.part.split("/"))
    names = [each.name for each in guarantees.ALL if arguments.only in each.name][part - 1 :: parts]
    if arguments.missing:
        names = [name for name in names if name not in known]
    places = [each for each in table.COLUMNS if arguments.column in ("", each.name)]
    rows = []
    for first in range(0, len(names), _TOGETHER):
        with tempfile.TemporaryDirectory() as folder:
            some = names[first : first + _TOGETHER]
            rows += matrix.measure(some, places, Path(folder), arguments.processes)
        if not arguments.column:
            known.update({row.guarantee.name: row for row in rows})
            table.write(known, arguments.folder)
    table.show(rows, time.monotonic() - started)
    broken = [row for row in rows if not row.kept]
    raise SystemExit(f"{len(broken)} guarantees are broken" if broken else 0)


if __name__ == "__main__":
    main()
