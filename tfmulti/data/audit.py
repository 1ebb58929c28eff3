"""Records which rows each replica received, to find lost and repeated examples."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading

import numpy as np
import tensorflow as tf

from tfmulti import topology
from tfmulti.sharding import ShardPlan
from tfmulti.step import iterators


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """The rows that the replicas received in one epoch.

    Attributes:
        epoch: Number of the epoch.
        num_rows: Rows of each replica.
        digests: SHA-256 over the row numbers of each replica, in order, cut to 12 digits.
        missing: Numbers of the rows that were received less often than planned, mostly never.
        duplicated: Numbers of the rows that were received more often than planned.
        steps: The steps of the epoch that were taken.
        is_whole: Whether the plan of these steps has each row of the split once.
    """

    epoch: int
    num_rows: tuple[int, ...]
    digests: tuple[str, ...]
    missing: tuple[int, ...]
    duplicated: tuple[int, ...]
    steps: range
    is_whole: bool

    def __str__(self):
        shards = ", ".join(
            f"replica {i}: {n} rows {d}"
            for i, (n, d) in enumerate(zip(self.num_rows, self.digests))
        )
        findings = [
            f"{len(rows)} {what} ({', '.join(map(str, rows[:8]))}{', ...' if rows[8:] else ''})"
            for what, rows in (("missing", self.missing), ("duplicated", self.duplicated))
            if rows
        ] or [self._as_planned()]
        if max(self.num_rows) - min(self.num_rows) > 1:
            largest, smallest = np.argmax(self.num_rows), np.argmin(self.num_rows)
            findings.append(f"unequal: replica {largest} has most rows, replica {smallest} least")
        return f"epoch {self.epoch}: {shards}; {'; '.join(findings)}"

    def _as_planned(self) -> str:
        if self.is_whole:
            return "each row once"
        if not self.steps:
            return "no step was taken"
        return f"each row as planned for steps {self.steps.start} to {self.steps.stop - 1}"


class ShardAudit:
    """Records the row numbers of each local replica for each epoch.

    Only sources that can be indexed have row numbers; a `tf.data.Dataset` has none.
    """

    def __init__(self, plan: ShardPlan, strategy: tf.distribute.Strategy):
        self._plan, self._strategy = plan, strategy
        self._lock = threading.Lock()
        self._rows: dict[int, dict[tuple[int, int], np.ndarray]] = {}

    def record(self, epoch: int, step: int, replica: int, rows: np.ndarray) -> None:
        """Records the rows of a replica batch; recording a step again replaces its rows."""
        with self._lock:
            self._rows.setdefault(epoch, {})[step, replica] = np.array(rows)

    def report(self, epoch: int, steps: range | None = None) -> ShardReport:
        """Compares the rows of all replicas. Every worker must call it: it is a collective.

        Args:
            epoch: Number of the epoch.
            steps: The steps of it that were taken, not only read ahead; by default all.
        """
        steps = range(self._plan.steps_per_epoch) if steps is None else steps
        with self._lock:
            # Those that were read ahead may be taken later.
            self._rows = {number: rows for number, rows in self._rows.items() if number >= epoch}
            read = self._rows.get(epoch, {})
            taken = {key: read.pop(key) for key in list(read) if key[0] in steps}
        local = [_rows_of(taken, index) for index in topology.local_batch_indices(self._strategy)]
        return compare(epoch, self._plan, self._gather(local), steps)

    def _gather(self, local):
        plan = self._plan
        if plan.num_replicas == 1:
            return local
        width = plan.steps_per_epoch * -(-plan.global_batch_size // plan.num_replicas)
        first = topology.first_local_replica(self._strategy)
        tables = [np.zeros([plan.num_replicas, width], np.int64) for _ in local]
        for index, (table, rows) in enumerate(zip(tables, local)):
            table[first + index, : len(rows)] = rows + 1
        tables = tuple(tf.constant(table) for table in tables)
        total = self._add_tables(iterators.to_replicas(self._strategy, tables))
        total = self._strategy.experimental_local_results(total)[0].numpy()
        return [row[row > 0] - 1 for row in total]

    @functools.cached_property
    def _add_tables(self):
        def add(table):
            # An argument has no device, and a reduction runs on the device of its value.
            return tf.distribute.get_replica_context().all_reduce("SUM", tf.identity(table))

        return tf.function(lambda tables: self._strategy.run(add, args=(tables,)))


def _rows_of(steps, replica) -> np.ndarray:
    mine = [rows for (_, number), rows in sorted(steps.items()) if number == replica]
    return np.concatenate(mine) if mine else np.zeros(0, np.int64)


def compare(
    epoch: int, plan: ShardPlan, rows: list[np.ndarray], steps: range | None = None
) -> ShardReport:
    """Returns which rows of steps of an epoch are missing or repeated, against the plan.

    Args:
        epoch: Number of the epoch.
        plan: The plan.
        rows: The rows of each replica.
        steps: The steps; by default all.

    >>> plan = ShardPlan(num_examples=4, global_batch_size=2, num_replicas=2)
    >>> print(compare(0, plan, [np.array([0, 1, 1]), np.array([3])]).missing)
    (2,)
    """
    steps = range(plan.steps_per_epoch) if steps is None else steps
    batches = [plan.batch(epoch, step) for step in steps]
    planned = _count([rows[:num_real] for rows, num_real in batches], plan)
    received = _count(rows, plan)
    return ShardReport(
        epoch,
        tuple(len(shard) for shard in rows),
        tuple(hashlib.sha256(shard.astype("<i8").tobytes()).hexdigest()[:12] for shard in rows),
        tuple(np.flatnonzero(received < planned).tolist()),
        tuple(np.flatnonzero(received > planned).tolist()),
        steps,
        bool((planned == 1).all()),
    )


def _count(rows, plan) -> np.ndarray:
    """Returns how often each row of the split is there."""
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *rows]), minlength=plan.num_examples)
