"""Measures the matrix: guarantees down, strategies across."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from pathlib import Path

from rich.progress import Progress

from conformance import columns, compare, guarantees, processes
from conformance.compare import Cell
from conformance.guarantee import Guarantee


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one guarantee.

    Attributes:
        section: Heading.
        guarantee: The guarantee.
        noise: How much one device differs from itself.
        cells: By name of the column.
        tree: The commit on which it was measured.
    """

    section: str
    guarantee: Guarantee
    noise: float
    cells: dict[str, Cell]
    tree: str = ""

    @property
    def kept(self) -> bool:
        """Whether tfmulti keeps the guarantee everywhere."""
        names = [column.name for column in columns.TFMULTI if column.name in self.cells]
        return all(self.cells[name].ok for name in names)


def measure(names, places, folder: Path, num_processes: int, orders: int = 3) -> list[Row]:
    """Tries guarantees in some columns, and on one device.

    Args:
        names: Names of guarantees.
        places: The columns.
        folder: Where processes may leave their files.
        num_processes: How many guarantees to try at a time.
        orders: In how many orders of the rows one device trains, to measure its noise.
    """
    plain = [columns.PLAIN] + [columns.STOCK_PLAIN] * any(place.stock for place in places)
    tasks = [
        (column, name)
        for name in names
        for column in (*plain, *places)
        if columns.wanted(column, guarantees.find(name))
    ]
    with Progress(transient=True) as progress:
        bar = progress.add_task("trying", total=len(tasks))
        runs = processes.run_all(
            tasks, folder, num_processes, lambda count: progress.advance(bar, count), orders
        )
    tree = commit()
    return [_row(name, places, runs, tree) for name in names]


@functools.cache
def commit() -> str:
    """Returns the short name of the commit that is tried; "" outside of a repository.

    It is asked for once: what is written meanwhile changes the files.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip()


def _row(name, places, runs, tree) -> Row:
    guarantee = guarantees.find(name)
    sections = [title for title, some in guarantees.SECTIONS.items() if guarantee in some]
    plain = runs[columns.PLAIN, name][0]
    noise = 0.0
    if not (isinstance(plain, str) or guarantee.judge or guarantee.ordered):
        apart = (compare.difference(other, plain[0])[0] for other in plain[1:])
        noise = max(apart, default=0.0)
    cells = {}
    for column in places:
        if (column, name) not in runs:
            continue
        reference = runs[columns.STOCK_PLAIN if column.stock else columns.PLAIN, name][0]
        reference = reference if isinstance(reference, str) else reference[0]
        found = [run if isinstance(run, str) else run[0] for run in runs[column, name]]
        cells[column.name] = compare.judge(guarantee, found, reference, noise, column.replicas > 1)
    return Row(sections[0] if sections else "Random sizes", guarantee, noise, cells, tree)
