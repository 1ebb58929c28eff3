"""What each worker gets of this machine: cores, threads, and how it keeps its memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfmulti.launch.config import LaunchConfig

CORES = "TFMULTI_CORES"
"""The cores that the guard pins its worker to, as `0,1`."""

# glibc then takes no memory by mmap, and gives none back: large gradients come from pages that
# are there already. It reads them when a process starts.
_KEEP = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def variables(config: LaunchConfig, place: int, num_here: int, cores=None) -> Mapping[str, str]:
    """Returns the environment variables of a worker that divide the machine.

    Args:
        config: The job.
        place: The worker's place among those of this machine, from 0.
        num_here: Workers on this machine.
        cores: The cores to divide; by default all that this process may use.

    Example:
    >>> config = LaunchConfig(num_workers=2, pin=True, allocator="default")
    >>> variables(config, 1, 2, cores=[0, 1, 2, 3])["TFMULTI_CORES"]
    '2,3'
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    mine = share_of(cores, place, num_here)
    chosen = {}
    if config.pin:
        chosen[CORES] = ",".join(str(core) for core in mine)
    threads = len(mine) if config.threads is None else config.threads
    if threads:
        given = os.environ
        chosen |= {name: str(threads) for name in _THREADS if name not in given}
    if config.allocator == "keep":
        chosen |= _KEEP
    return chosen


def share_of(cores: list[int], place: int, num_here: int) -> list[int]:
    """Returns a worker's cores; they differ by one at most, and are shared where there are few.

    >>> [share_of([0, 1, 2], place, 2) for place in range(2)], share_of([0], 1, 2)
    ([[0], [1, 2]], [0])
    """
    if len(cores) < num_here:
        return [cores[place % len(cores)]]
    begin, end = (len(cores) * each // num_here for each in (place, place + 1))
    return cores[begin:end]
