"""Writes the short tables of README.md from CONFORMANCE.md and BENCHMARKS.md.

python docs/figures.py            # writes them
python docs/figures.py --check    # exit code 1 where README.md has others
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SETUPS = ("one_worker x1", "mirrored x2", "ring x2", "mpi x2", "ddp x2", "stock_mirrored x2")


def conformance_table(text: str) -> str:
    """Returns one row for each section of CONFORMANCE.md: guarantees, and how many are kept.

    Args:
        text: What CONFORMANCE.md holds. A bold cell is not kept; a dash was not tried.
    """
    lines = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, rows = section.splitlines()[0], _rows(section)
        header, body = rows[0], rows[1:]
        stock = [i for i, name in enumerate(header) if name.startswith("stock ")]
        ours = range(2, stock[0])
        kept = sum(all(not _is_bold(row[i]) for i in ours) for row in body)
        cells = [title, f"{kept} of {len(body)}"]
        for i in stock:
            tried = [row[i] for row in body if row[i] != "–"]
            count = sum(not _is_bold(cell) for cell in tried)
            cells.append(f"{count} of {len(tried)}" if tried else "–")
        if not lines:
            heads = ["guarantees kept, of those tried", "tfmulti", *(header[i] for i in stock)]
            lines += [f"| {' | '.join(heads)} |", "|---|---|---|---|"]
            names = "; ".join(header[i] for i in ours)
        lines.append(f"| {' | '.join(cells)} |")
    made = re.search(r"made this file: (.*?)\.$", text, re.MULTILINE)[1]
    total = re.search(r"^(\d+ of \d+) guarantees are kept\.$", text, re.MULTILINE)[1]
    told = f"{total} guarantees are kept on all of: {names} ({made})."
    return "\n".join([told, "", *lines])


def benchmark_table(text: str) -> str:
    """Returns the steps of some configurations of BENCHMARKS.md, with one step a call.

    Args:
        text: What BENCHMARKS.md holds.
    """
    workloads, cells = [], {name: [] for name in _SETUPS}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, kind = section.splitlines()[0].partition(": ")
        if kind != "steps on the CPU":
            continue
        workloads += [f"{title}: step ms", "efficiency"]
        for row in _rows(section)[1:]:
            name, calls, step, _, _, _, _, efficiency, _ = row
            if name in _SETUPS and calls == "1":
                cells[name] += [step, efficiency]
    processor = re.search(r"^- processor: (.*?)$", text, re.MULTILINE)[1]
    lines = [f"| configuration | {' | '.join(workloads)} |", "|---|" + "---:|" * len(workloads)]
    lines += [f"| {name} | {' | '.join(row)} |" for name, row in cells.items() if row]
    return "\n".join([f"Measured on {processor}.", "", *lines])


def _rows(section) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if set("".join(row)) - set("-: ")]


def _is_bold(cell):
    return cell.startswith("**")


def fill(readme: str, root: Path = ROOT) -> str:
    """Returns the README with the tables that the two files give."""
    tables = {
        "conformance": conformance_table((root / "CONFORMANCE.md").read_text()),
        "benchmarks": benchmark_table((root / "BENCHMARKS.md").read_text()),
    }
    for name, table in tables.items():
        begin, end = rf"<!-- {name}: begin[^\n]*-->\n", f"<!-- {name}: end -->"
        parts = re.split(rf"({begin}).*?({end})", readme, flags=re.DOTALL)
        if len(parts) != 4:
            raise ValueError(
                f"README.md must have one place for {name}. Received: {len(parts) // 3}."
            )
        readme = f"{parts[0]}{parts[1]}{table}\n\n{parts[2]}{parts[3]}"
    return readme


def main() -> int:
    """Writes or checks README.md; returns the exit code."""
    path = ROOT / "README.md"
    text = path.read_text()
    filled = fill(text)
    if "--check" in sys.argv:
        return int(text != filled)
    path.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
