"""What workers ask of all, leave for one another, and tell the launcher."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.cluster import environment

NAMES = ("stop", "save")


class CoordinationRequests:
    """The requests of this worker, and those that have reached all workers.

    `ask` may be called from a signal handler.
    """

    def __init__(self, num_replicas: int):
        self._alone = num_replicas == 1
        self._asked, self._sent, self._agreed = (dict.fromkeys(NAMES, False) for _ in range(3))
        zeros = np.zeros(len(NAMES), "float32")
        with tf.init_scope(), tf.device("CPU:0"):
            self._wanted = tf.Variable(zeros, trainable=False, name="tfmulti_requests")
            self._heard = tf.Variable(zeros, trainable=False, name="tfmulti_requests")

    def reset(self) -> None:
        """Clears all requests; called when a `fit` begins, before any step."""
        self._asked, self._agreed = (dict.fromkeys(NAMES, False) for _ in range(2))
        self._heard.assign(np.zeros(len(NAMES), "float32"))

    def ask(self, name: str) -> None:
        """Requests an action, one of `NAMES`, of all workers."""
        self._asked[name] = True

    def send(self) -> None:
        """Adds the requests to the reduction of the next step; called before that step."""
        if self._alone or self._sent == self._asked:
            return
        self._sent = dict(self._asked)
        self._wanted.assign([float(asked) for asked in self._sent.values()])

    def receive(self) -> bool:
        """Reads the requests that the last step reduced; returns whether there is one."""
        if self._alone:
            self._agreed |= {name: True for name, asked in self._asked.items() if asked}
        else:
            heard = self._heard.numpy()
            if heard.any():
                self._agreed |= {name: True for name, h in zip(NAMES, heard) if h}
                self._heard.assign(np.zeros(len(NAMES), "float32"))
        return any(self._agreed.values())

    def agreed(self, name: str) -> bool:
        """Whether a request has reached all workers."""
        return self._agreed[name]

    def clear(self, name: str) -> None:
        """Clears a request that was fulfilled."""
        self._asked[name] = self._agreed[name] = False

    def part_of_step(self) -> tf.Tensor:
        """Returns this replica's term in the step's reduction, a float32 vector."""
        return tf.where(
            topology.is_first_local_replica(), self._wanted.read_value(), tf.zeros(len(NAMES))
        )

    def note(self, added: tf.Tensor) -> None:
        """Stores the reduced requests, within the step."""
        self._heard.assign(tf.maximum(self._heard, added))


def requests_of(strategy: tf.distribute.Strategy) -> CoordinationRequests:
    """Returns the requests of a strategy, or a new object if the strategy has none."""
    signals = getattr(strategy, "signals", None)
    return signals if signals is not None else CoordinationRequests(1)


class LauncherHeartbeat(keras.callbacks.Callback):
    """Creates a file after the first step: the launcher restarts no job that failed earlier.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path, self._made = Path(path), False

    def on_train_batch_end(self, batch, logs=None):
        """Creates the file after the first step."""
        if not self._made:
            self._path.touch()
            self._made = True


def callbacks_for(model: keras.Model) -> list[keras.callbacks.Callback]:
    """Returns the heartbeat callback in a list; the list is empty without a launcher."""
    path = os.environ.get(environment.PROGRESS)
    ours = getattr(model.distribute_strategy, "repairs_keras", False)
    return [LauncherHeartbeat(path)] if path and ours else []


# The value is published already, so the timeout only covers the network.
_FIRST_MS, _NEXT_MS = 2_000, 100
# A key can be used once in a process.
_numbers = itertools.count()


class KeyValueExchange:
    """The texts that workers publish during one `fit`.

    All workers wait for one another after each epoch (`collectives.agree_on_stopping`). A text
    that was published before is then available, or will never come: a worker that published
    nothing is not read again.

    Args:
        strategy: The strategy of this worker.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        several = topology.num_workers(strategy) > 1
        self._enabled = several and getattr(strategy, "repairs_keras", False)
        self.worker, self._tasks = topology.worker_name(strategy), topology.worker_names(strategy)
        self._fit = next(_numbers)
        self._silent: set[str] = set()

    def publish(self, number: int, text: str) -> None:
        """Publishes a text for all workers; `number` is the number of the epoch."""
        if self._enabled:
            keras_compat.publish(self._key(number, self.worker), text)

    def read(self, number: int) -> tuple[dict[str, str], set[str]]:
        """Returns the other workers' texts, and the workers found missing for the first time.

        Call it for the previous epoch, when an epoch begins or `fit` ends.
        """
        found, missing = {}, set()
        others = set(self._tasks) - {self.worker} - self._silent if self._enabled else ()
        for task in sorted(others):
            # A short timeout after the first: many workers may have published nothing.
            timeout_ms = _NEXT_MS if missing else _FIRST_MS
            text = keras_compat.read_if_published(self._key(number, task), timeout_ms)
            if text is None:
                missing.add(task)
            else:
                found[task] = text
        self._silent |= missing
        return found, missing

    def _key(self, number, task) -> str:
        return f"tfmulti/texts/{self._fit}/{number}/{task.replace(' ', '/')}"
