"""Texts that workers leave for one another once an epoch, and read without waiting.

They go over TensorFlow's coordination service, not with the steps: no step has a reduction more.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.strategies import collectives

# The answer is there at once; what is waited for is the network.
_FIRST_MS, _NEXT_MS = 2_000, 100
# A key can be used once in a process.
_numbers = itertools.count()


class KeyValueExchange:
    """The notes of one `fit`.

    All workers of this package's strategies wait for one another after each epoch
    (`agreement.agree_on_stopping`). What they left before is then there, or never comes: of a
    worker that leaves nothing none is asked again.

    Args:
        strategy: The strategy of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        several = collectives.num_workers(strategy) > 1
        self._shared = several and getattr(strategy, "repairs_keras", False)
        self.worker = "worker 0"
        self._tasks = [self.worker]
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            resolver = strategy.cluster_resolver
            self.worker = f"{resolver.task_type} {resolver.task_id}"
            jobs = resolver.cluster_spec().as_dict()
            numbers = {kind: range(len(jobs.get(kind, ()))) for kind in ("chief", "worker")}
            self._tasks = [f"{kind} {i}" for kind, own in numbers.items() for i in own]
        self._fit = next(_numbers)
        self._silent: set[str] = set()

    def leave(self, number: int, text: str) -> None:
        """Leaves a text for all; `number` is that of the epoch."""
        if self._shared:
            keras_compat.publish(self._key(number, self.worker), text)

    def read(self, number: int) -> tuple[dict[str, str], set[str]]:
        """Returns the other workers' texts, and who has left none for the first time.

        Call it when an epoch begins or `fit` ends, about the epoch before.
        """
        found, missing = {}, set()
        others = set(self._tasks) - {self.worker} - self._silent if self._shared else ()
        for task in sorted(others):
            # Not so long for each of many that have no notes.
            timeout_ms = _NEXT_MS if missing else _FIRST_MS
            text = keras_compat.read_if_published(self._key(number, task), timeout_ms)
            if text is None:
                missing.add(task)
            else:
                found[task] = text
        self._silent |= missing
        return found, missing

    def _key(self, number, task) -> str:
        return f"tfmulti/notes/{self._fit}/{number}/{task.replace(' ', '/')}"
