"""What tfmulti is compared with, each in one file, as its own users write it.

A file has `KIND`, for a peer that trains, or `REDUCES`, for one that only all-reduces, made by
`peer`; and the function that `peer` takes, which is called in the peer's processes and imports the
peer there. Only the help of `--peers` and the tables that readers see, `docs/figures.py` and
`benchmarks/tables.py`, name a peer.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tfmulti.bench.setups import Kind
from tfmulti.runtime import processes

peer = functools.partial(
    Kind,
    launched=False,
    calls_of_several=False,
    is_peer=True,
    not_on=("own",),
)
"""Creates the `Kind` of another framework, which supports training steps only."""


def torch_environments(count: int) -> tuple[dict[str, str], ...]:
    """Returns the variables that `torchrun` sets, for each process of this machine."""
    [port] = processes.free_ports(1)
    return tuple(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(count),
        }
        for index in range(count)
    )


_FILES = [
    importlib.import_module(each.name) for each in pkgutil.iter_modules(__path__, f"{__name__}.")
]
TRAINED = tuple(file.KIND for file in _FILES if hasattr(file, "KIND"))
REDUCES = tuple(file.REDUCES for file in _FILES if hasattr(file, "REDUCES"))
