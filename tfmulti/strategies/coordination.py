"""What workers ask of all, leave for one another, and tell the launcher."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat
from tfmulti.cluster import environment
from tfmulti.strategies import collectives

NAMES = ("stop", "save")


class CoordinationRequests:
    """The wishes of this worker, and those that all have agreed on.

    `ask` may be called from a signal handler.
    """

    def __init__(self, num_replicas: int, num_local_replicas: int):
        self._alone = num_replicas == 1
        self._num_local_replicas = num_local_replicas
        self._asked, self._sent, self._agreed = (dict.fromkeys(NAMES, False) for _ in range(3))
        with tf.init_scope(), tf.device("CPU:0"):
            self._wanted = tf.Variable(np.zeros(len(NAMES), "float32"), trainable=False)
            self._heard = tf.Variable(np.zeros(len(NAMES), "float32"), trainable=False)

    def reset(self) -> None:
        """Forgets all wishes; called when a `fit` begins, before any step."""
        self._asked, self._agreed = (dict.fromkeys(NAMES, False) for _ in range(2))
        self._heard.assign(np.zeros(len(NAMES), "float32"))

    def ask(self, name: str) -> None:
        """Wants something of all workers."""
        self._asked[name] = True

    def send(self) -> None:
        """Makes the next step carry what was asked; called before it."""
        if self._alone or self._sent == self._asked:
            return
        self._sent = dict(self._asked)
        self._wanted.assign([float(asked) for asked in self._sent.values()])

    def receive(self) -> bool:
        """Looks at what the last step has brought; returns whether all shall save now."""
        if self._alone:
            self._agreed |= {name: True for name, asked in self._asked.items() if asked}
        else:
            heard = self._heard.numpy()
            if heard.any():
                self._agreed |= {name: True for name, h in zip(NAMES, heard) if h}
                self._heard.assign(np.zeros(len(NAMES), "float32"))
        return any(self._agreed.values())

    def agreed(self, name: str) -> bool:
        """Whether all workers have agreed on something."""
        return self._agreed[name]

    def clear(self, name: str) -> None:
        """Forgets a wish that was fulfilled."""
        self._asked[name] = self._agreed[name] = False

    def part_of_step(self) -> tf.Tensor:
        """What this replica adds to the step's reduction, a float32 vector."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.cast(replica, tf.int32) % self._num_local_replicas == 0
        return tf.where(first, self._wanted.read_value(), tf.zeros(len(NAMES)))

    def note(self, added: tf.Tensor) -> None:
        """Keeps, in the step, what all replicas have added."""
        self._heard.assign(tf.maximum(self._heard, added))


def requests_of(strategy: tf.distribute.Strategy) -> CoordinationRequests:
    """Returns the signals of a strategy, or new ones for a strategy that has none."""
    signals = getattr(strategy, "signals", None)
    return signals if signals is not None else CoordinationRequests(1, 1)


class LauncherHeartbeat(keras.callbacks.Callback):
    """Makes a file once a step is done: what fails before is not worth a restart.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path, self._made = Path(path), False

    def on_train_batch_end(self, batch, logs=None):
        """Makes the file after the first step."""
        if not self._made:
            self._path.touch()
            self._made = True


def callbacks_for(model: keras.Model) -> list[keras.callbacks.Callback]:
    """Returns the callback that a launcher waits for, in a list that is empty without one."""
    path = os.environ.get(environment.PROGRESS)
    ours = getattr(model.distribute_strategy, "repairs_keras", False)
    return [LauncherHeartbeat(path)] if path and ours else []


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
