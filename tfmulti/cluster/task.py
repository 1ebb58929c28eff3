"""Cluster: all tasks and their addresses, and which of them this process is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

#: The task types that train together, in the order in which workers are counted.
TRAINING_TYPES = ("chief", "worker")
#: The task type that keeps variables for the others, and trains nothing itself.
SERVER_TYPE = "ps"


@dataclass(frozen=True)
class Cluster:
    """All tasks of a job and their addresses, seen from one of them.

    `resolve_cluster` and the `from_*` functions create and check it; created directly it is not
    checked. It is immutable; it can be compared, hashed, copied and pickled.

    Attributes:
        spec: task type -> the addresses of its tasks, by index.
        task_type: the type of this task, `"chief"` or `"worker"`; or `"ps"`, a parameter server.
        task_index: the index of this task among those of its type.
        source: `"TF_CONFIG"`, or the scheduler's name. It does not count in a comparison.
        visible_gpus: the CUDA_VISIBLE_DEVICES with which this task has GPUs of its own, if several
            tasks of a host see the same ones; None leaves it.
        names_come_late: whether hosts' names resolve only once their tasks have started.

    Example:
        >>> cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 1)
        >>> cluster.num_workers, cluster.worker_index, cluster.is_chief, cluster.address
        (2, 1, False, '10.0.0.2:2222')
    """

    # A mapping has no hash of its own; equal clusters still hash alike without it.
    spec: Mapping[str, tuple[str, ...]] = field(hash=False)
    task_type: str
    task_index: int
    source: str = field(default="TF_CONFIG", compare=False)
    visible_gpus: str | None = field(default=None, compare=False)
    names_come_late: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Copies the spec, so that it cannot be changed from outside."""
        spec = {task_type: tuple(addresses) for task_type, addresses in self.spec.items()}
        object.__setattr__(self, "spec", MappingProxyType(spec))

    def __reduce__(self) -> tuple:
        """Pickles and copies a plain dict, since a read-only view allows neither."""
        late = self.names_come_late
        mine = (self.task_type, self.task_index, self.source, self.visible_gpus, late)
        return Cluster, (dict(self.spec), *mine)

    @property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        """The (type, index) of every task that trains: the chief first, then the workers."""
        return tuple(
            (task_type, index)
            for task_type in TRAINING_TYPES
            for index in range(len(self.spec.get(task_type, ())))
        )

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers keep the variables."""
        return bool(self.spec.get(SERVER_TYPE))

    @property
    def num_workers(self) -> int:
        """The number of tasks that train; an evaluator does not count."""
        return len(self.tasks)

    @property
    def worker_index(self) -> int:
        """The position of this task in `tasks`, from 0 to `num_workers - 1`."""
        return self.tasks.index((self.task_type, self.task_index))

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes: the chief, or worker 0 where the cluster names none."""
        return self.tasks[:1] == ((self.task_type, self.task_index),)

    @property
    def address(self) -> str:
        """The `host:port` of this task."""
        return self.spec[self.task_type][self.task_index]

    def name_of(self, task_type: str, index: int) -> str:
        """Returns the name of a task, with its address where that is known.

        Example:
            >>> Cluster({"worker": ["a:1", "b:1"]}, "worker", 0).name_of("worker", 1)
            'worker 1 at b:1'
        """
        addresses = self.spec.get(task_type, ())
        where = f" at {addresses[index]}" if index < len(addresses) else ""
        return f"{task_type} {index}{where}"

    def with_servers(self) -> Cluster:
        """Returns the cluster with its parameter servers among its tasks, after the workers.

        Example:
            >>> spec = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
            >>> cluster = Cluster(spec, "ps", 0)
            >>> cluster.num_workers, cluster.with_servers().worker_index
            (2, 2)
        """
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return _WithServers(**fields)

    def to_json(self) -> str:
        """Returns the text of an equivalent `TF_CONFIG`.

        Example:
            >>> Cluster({"worker": ["a:1"]}, "worker", 0).to_json()
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        """
        return json.dumps(
            {
                "cluster": {key: list(addresses) for key, addresses in self.spec.items()},
                "task": {"type": self.task_type, "index": self.task_index},
            }
        )

    def describe(self) -> str:
        """Returns a readable line with the numbers that `TF_CONFIG` uses.

        Example:
            >>> Cluster({"worker": ["a:1", "b:1"]}, "worker", 0).describe()
            'worker 0 of 2 (a:1)'
            >>> Cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 0).describe()
            'worker 0 of 2 (b:1), in a cluster of 3'
        """
        alike = len(self.spec[self.task_type])
        line = f"{self.task_type} {self.task_index} of {alike} ({self.address})"
        return line if alike == self.num_workers else f"{line}, in a cluster of {self.num_workers}"


class _WithServers(Cluster):
    """A cluster whose servers count as tasks that meet: to examine them, not to train."""

    @property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        """The (type, index) of every task: the chief, the workers, the servers."""
        servers = self.spec.get(SERVER_TYPE, ())
        return super().tasks + tuple((SERVER_TYPE, index) for index in range(len(servers)))
