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
        missing: Numbers of the rows that no replica received.
        duplicated: Numbers of the rows that were received more than once.
    """

    epoch: int
    num_rows: tuple[int, ...]
    digests: tuple[str, ...]
    missing: tuple[int, ...]
    duplicated: tuple[int, ...]

    def __str__(self):
        shards = ", ".join(
            f"replica {i}: {n} rows {d}"
            for i, (n, d) in enumerate(zip(self.num_rows, self.digests))
        )
        findings = [
            f"{len(rows)} {what} ({', '.join(map(str, rows[:8]))}{', ...' if rows[8:] else ''})"
            for what, rows in (("missing", self.missing), ("duplicated", self.duplicated))
            if rows
        ] or ["each row once"]
        if max(self.num_rows) - min(self.num_rows) > 1:
            largest, smallest = np.argmax(self.num_rows), np.argmin(self.num_rows)
            findings.append(f"unequal: replica {largest} has most rows, replica {smallest} least")
        return f"epoch {self.epoch}: {shards}; {'; '.join(findings)}"


class ShardAudit:
    """Records the row numbers of each local replica for each epoch.

    Only sources that can be indexed have row numbers; nothing is recorded for a
    `tf.data.Dataset`.
    """

    def __init__(self, plan: ShardPlan, strategy: tf.distribute.Strategy):
        self._plan, self._strategy = plan, strategy
        self._lock = threading.Lock()
        self._rows: dict[int, dict[tuple[int, int], np.ndarray]] = {}

    def record(self, epoch: int, step: int, replica: int, rows: np.ndarray) -> None:
        """Records the rows of a replica batch; recording a step again replaces its rows."""
        with self._lock:
            self._rows.setdefault(epoch, {})[step, replica] = np.array(rows)

    def report(self, epoch: int) -> ShardReport:
        """Compares the rows of all replicas. Every worker must call it: it is a collective."""
        with self._lock:
            steps = self._rows.pop(epoch, {})
        local = [_rows_of(steps, index) for index in topology.local_batch_indices(self._strategy)]
        return compare(epoch, self._plan, self._gather(local))

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


def compare(epoch: int, plan: ShardPlan, rows: list[np.ndarray]) -> ShardReport:
    """Returns which rows of one epoch are missing or repeated, given those of each replica.

    >>> plan = ShardPlan(num_examples=4, global_batch_size=2, num_replicas=2)
    >>> print(compare(0, plan, [np.array([0, 1, 1]), np.array([3])]).missing)
    (2,)
    """
    counts = np.bincount(np.concatenate(rows), minlength=plan.num_examples)
    return ShardReport(
        epoch,
        tuple(len(shard) for shard in rows),
        tuple(hashlib.sha256(shard.astype("<i8").tobytes()).hexdigest()[:12] for shard in rows),
        tuple(np.flatnonzero(counts == 0).tolist()),
        tuple(np.flatnonzero(counts > 1).tolist()),
    )
