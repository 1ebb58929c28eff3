"""What is measured beside what users measure, and the settings of `python -m benchmarks`."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from benchmarks import peers
from tfmulti.bench import setups
from tfmulti.bench.setups import MPI, RING, BenchConfig, Kind
from tfmulti.settings import setting

_BY_HAND = functools.partial(
    Kind,
    replicas="one",
    launched=False,
    # Compared with one another alone, step by step; the time goes to further rounds.
    calls_of_several=False,
    long_order={"autotune": True},
)
_CREATE = {"create": "benchmarks.training:ByHand"}
PLAIN = _BY_HAND("plain", "plain Keras, no tfmulti, a tf.data pipeline by hand", _CREATE)
ONE_REPLICA = _BY_HAND(
    "one_replica",
    "mirrored on one device, DistributedOptimizer, the same pipeline by hand",
    {**_CREATE, "strategy": {"name": "mirrored", "devices": ["CPU:0"]}},
)


def _switched(kind, name, meaning, flag, **task) -> Kind:
    """Returns a kind with one of the launcher's switches set otherwise."""
    flags = (*kind.launch_flags, flag)
    changed = dataclasses.replace(kind, name=name, meaning=meaning, launch_flags=flags)
    return changed.changed(**task)


_KEPT = "with the C library's own way of keeping memory"
_ALL = "mpi, a thread for each core of the machine, not pinned"
SWITCHED = (
    _switched(MPI, "mpi_unpinned", "mpi, a thread each, not pinned", "--threads=1", pin=False),
    _switched(MPI, "mpi_all_threads", _ALL, "--threads=0", pin=False),
    _switched(MPI, "mpi_allocator_default", f"mpi, {_KEPT}", "--allocator=default"),
    _switched(RING, "ring_allocator_default", f"ring, {_KEPT}", "--allocator=default"),
)
WORKERS = tuple(kind.name for kind in (*setups.KINDS[2:], *SWITCHED))
"""The names of our kinds on several workers or replicas; the control is none."""
_KINDS = (PLAIN, ONE_REPLICA, *setups.KINDS, *SWITCHED, *peers.TRAINED)


@dataclasses.dataclass(frozen=True)
class BenchmarksConfig(BenchConfig):
    """One run; every setting is a flag of `python -m benchmarks`."""

    setups: str | None = setting(
        None,
        f"Only these of {', '.join(kind.name for kind in _KINDS)}; by default all but those that "
        "switch something of the launcher off.",
    )
    peers: bool = setting(
        True, "Measure the peers of benchmarks/README.md, such as PyTorch DDP, too."
    )
    project: int | None = setting(
        None, "Project the step to 2, 4, ... up to this number of workers.", at_least=2
    )
    monitors: bool = setting(
        False, "Measure what the monitors cost on the first workload, and nothing else."
    )
    workdir: str = setting(
        "runs/benchmarks", "Folder for bench.json, bench.csv, bench.png and BENCHMARKS.md."
    )

    KINDS: ClassVar[tuple[Kind, ...]] = _KINDS
    ONLY_NAMED: ClassVar[tuple[Kind, ...]] = SWITCHED

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of configurations to measure."""
        return tuple(kind for kind in super().kinds if self.peers or not kind.is_peer)
