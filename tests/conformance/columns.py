"""The columns of the table: where every guarantee is tried."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
    """A place of the table.

    Attributes:
        name: Heading.
        kind: `"plain"` (Keras without a strategy), `"one_device"`, `"mirrored"` or
            `"multi_worker"`.
        devices: Logical CPUs of each process.
        workers: Processes.
        stock: Whether tfmulti has no part in it.
        communication: How workers add their gradients.
    """

    name: str
    kind: str
    devices: int = 1
    workers: int = 1
    stock: bool = False
    communication: str = "auto"

    @property
    def replicas(self) -> int:
        """Replicas in all."""
        return self.devices * self.workers


PLAIN = Column("plain Keras", "plain")
STOCK_PLAIN = Column("stock plain Keras", "plain", stock=True)
TFMULTI = (
    Column("one device", "one_device"),
    Column("mirrored 2", "mirrored", 2),
    Column("mirrored 3", "mirrored", 3),
    Column("mirrored 4", "mirrored", 4),
    Column("2 workers", "multi_worker", 1, 2),
    Column("2 workers, 2 devices each", "multi_worker", 2, 2),
    Column("2 workers, MPI", "multi_worker", 1, 2, communication="mpi"),
)
STOCK = (
    Column("stock mirrored 2", "mirrored", 2, stock=True),
    Column("stock 2 workers", "multi_worker", 1, 2, stock=True),
)
ALL = (PLAIN, STOCK_PLAIN, *TFMULTI, *STOCK)


def wanted(column: Column, guarantee) -> bool:
    """Whether a guarantee is tried in a column."""
    return column != STOCK[1] or guarantee.stock_workers
