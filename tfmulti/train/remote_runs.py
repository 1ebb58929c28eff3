"""The chief's part of training with parameter servers: sends steps to workers, and updates.

The staleness of a step is the number of other steps' updates between its read of the weights and
the application of its gradient.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfmulti.parallel import answers as answers_lib
from tfmulti.parallel.answers import Answer
from tfmulti.parallel.remote_step import RemoteStep
from tfmulti.sharding import replica_slice
from tfmulti.step.rows import num_rows, some_rows
from tfmulti.strategies.coordination import CoordinationRequests
from tfmulti.strategies.parameter_server import (
    ServerLost,
    WorkersLost,
    find_lost_server,
    is_lost_worker,
)
from tfmulti.strategies.task_monitor import TaskMonitor

_POLL_S = 0.5
_MOST_RETRIES = 100
# How long to wait for the steps under way when training fails.
_FORGET_S, _LOOK_S = 5.0, 0.02


class SettledRequests(CoordinationRequests):
    """Requests that are granted between steps only, when no step is under way.

    Only then is what was trained on a beginning of the order of examples, from which training can
    resume.
    """

    def __init__(self):
        super().__init__(num_replicas=1)
        self.is_settled: Callable[[], bool] = lambda: True

    @property
    def is_asked(self) -> bool:
        """Whether there is a request; then no further step should begin."""
        return any(self._asked.values())

    def receive(self) -> bool:
        """Grants the requests if no step is under way."""
        return super().receive() if self.is_settled() else False


class StalenessBound:
    """The steps under way, and which of them may be applied without making another too stale.

    At most `bound` other updates may be made between the begin of a step and its application. The
    oldest step may always be applied. A younger one may be applied if afterwards all older ones can
    still be applied in time, the oldest first. With at most `bound + 1` steps under way this is
    always possible, so nobody waits forever. (Limiting the number of steps under way is not enough:
    while a slow worker computes one step, a fast one can make any number of updates.)

    Args:
        bound: The largest allowed staleness; None for no bound.

    Example:
        >>> steps = StalenessBound(1)
        >>> steps.begin("slow"), steps.begin("fast")
        (None, None)
        >>> steps.may_apply("fast")
        True
        >>> steps.apply("fast")
        1
        >>> steps.begin("next")
        >>> steps.may_apply("next"), steps.may_apply("slow")
        (False, True)
    """

    def __init__(self, bound: int | None):
        self.bound = bound
        self.updates = 0
        self._began: dict[object, int] = {}

    def __len__(self):
        return len(self._began)

    @property
    def limit(self) -> int | None:
        """The largest number of steps under way; None for any."""
        return None if self.bound is None else self.bound + 1

    def begin(self, step) -> None:
        """Records a step, which may read the weights from now on."""
        self._began[step] = self.updates

    def may_apply(self, step) -> bool:
        """Whether a step may be applied now."""
        if self.bound is None:
            return True
        for place, (other, began) in enumerate(self._began.items()):
            if other == step:
                return True
            if began + self.bound < self.updates + 1 + place:
                return False
        raise KeyError(step)

    def apply(self, step) -> int:
        """Records that a step has been applied; returns the number of updates so far."""
        del self._began[step]
        self.updates += 1
        return self.updates


def summarize_staleness(staleness: list[int]) -> dict[str, float]:
    """Returns the mean, 95th percentile and maximum staleness, by their names in the history.

    Example:
        >>> summarize_staleness([0, 1, 1, 2])["staleness_mean"]
        1.0
    """
    values = np.asarray(staleness or [0])
    return {
        "staleness_mean": float(values.mean()),
        "staleness_p95": float(np.percentile(values, 95)),
        "staleness_max": float(values.max()),
    }


class RemoteRuns:
    """The steps of one training that workers compute, and their application.

    Args:
        strategy: The strategy.
        step: The model's steps.
        max_staleness: The largest staleness; None for none, 0 for synchronous steps.
        tell: Function of one line of text.

    Attributes:
        staleness: The staleness of each step of this epoch.
        steps_by_worker: Steps, or parts of steps, that each worker has computed.
        metrics: The metrics' states over the steps of this epoch.
        logs: What else the last step has logged.
    """

    def __init__(self, strategy, step: RemoteStep, max_staleness: int | None, tell):
        self._strategy, self._step, self._tell = strategy, step, tell
        self._bound = StalenessBound(max_staleness)
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._held: dict[int, Answer] = {}
        self._processes: dict[int, int] = {}
        self._monitor = TaskMonitor(
            strategy.cluster, strategy.start_timeout_s, strategy.heartbeat_timeout_s
        )
        self._sent: dict[int, tuple] = {}
        self._retries = 0
        self.staleness: list[int] = []
        self.steps_by_worker: collections.Counter = collections.Counter()
        self.metrics: list[np.ndarray] = []
        self.logs: dict[str, float] = {}
        most = strategy.num_workers + 1
        self._limit = most if self._bound.limit is None else min(most, self._bound.limit)

    def __enter__(self):
        self._monitor.start()
        tf.get_logger().addFilter(_leave_out)
        return self

    def __exit__(self, kind, error, traceback):
        self._monitor.stop()
        lost = find_lost_server(error, self._strategy.cluster)
        is_lost = lost is not None or isinstance(error, (ServerLost, WorkersLost))
        if self._sent and isinstance(error, Exception) and not is_lost:
            self._forget_steps()
        tf.get_logger().removeFilter(_leave_out)
        if lost is not None:
            # TensorFlow's error has pages, and says less; a callback may have met it, too.
            raise lost from None

    def _forget_steps(self):
        """Has TensorFlow forget the steps under way, and the error of the one that has failed.

        The coordinator keeps it, and raises it at the next step that it is sent: the first one of
        another training. It waits without limit for a worker that is lost meanwhile.
        """
        is_over = threading.Event()

        def forget():
            with contextlib.suppress(Exception):
                while not self._strategy.coordinator.done() and not is_over.wait(_LOOK_S):
                    pass

        thread = threading.Thread(target=forget, daemon=True, name="tfmulti forget steps")
        thread.start()
        thread.join(_FORGET_S)
        is_over.set()

    @property
    def under_way(self) -> int:
        """Steps that were sent out and are not yet applied."""
        return len(self._bound)

    def train(
        self,
        batches: Iterable,
        first_step: int,
        may_go_on: Callable[[int], bool],
        around: Callable[[], contextlib.AbstractContextManager],
    ) -> None:
        """Trains on batches, each once, and returns when all are applied.

        Args:
            batches: The batches of this epoch.
            first_step: The number of the first one since training began.
            may_go_on: Function of a number of steps sent out, of which all but those under way
                are applied, that tells whether a further one may begin now.
            around: Returns a context for each step: of its application, or if all workers compute
                it together, of the whole step.
        """
        train = self._train_together if self._bound.bound == 0 else self._train_apart
        for sent, batch in enumerate(batches):
            train(batch, first_step + sent, around)
            if not may_go_on(sent + 1):
                self._finish(around)
                if not may_go_on(sent + 1):
                    break
        self._finish(around)

    def evaluate(self, batches: Iterable) -> tuple[list[np.ndarray], dict[str, float]]:
        """Evaluates batches with the present weights.

        Returns:
            The metrics' states, and what else the last step has logged.
        """
        states, logs, last, waiting = self._step.first_metrics, {}, -1, 0

        def take_one():
            nonlocal states, logs, last
            number, (more, others) = self._next_answer()
            states = self._add(states, more)
            if number > last:
                last, logs = number, others

        for number, batch in enumerate(batches):
            if waiting == self._strategy.num_workers + 1:
                take_one()
                waiting -= 1
            self._send(number, self._step.schedule_test, batch, number)
            waiting += 1
        for _ in range(waiting):
            take_one()
        return states, {name: answers_lib.plain(value) for name, value in logs.items()}

    def _train_apart(self, batch, number, around):
        """Sends a whole batch to one worker, once there is room."""
        while self.under_way >= self._limit:
            self._take_one(around)
        self._bound.begin(number)
        self._send(number, self._step.schedule, batch, number)

    def _train_together(self, batch, number, around):
        """Sends each worker its part of a batch, and applies the sum of their gradients."""
        rows, workers = int(num_rows(batch)), self._strategy.num_workers
        ranges = [replica_slice(rows, workers, part) for part in range(workers)]
        ranges = [(start, stop) for start, stop in ranges if stop > start]
        # A callback may change variables, with which this step computes then.
        with around():
            self._bound.begin(number)
            for part, (start, stop) in enumerate(ranges):
                own, share = some_rows(batch, start, stop), (stop - start) / rows
                self._send(part, self._step.schedule, own, number, part, share)
            answers = dict(self._next_answer() for _ in ranges)
            self._apply(number, [answers[part] for part in range(len(ranges))])

    def _finish(self, around):
        while self.under_way:
            self._take_one(around)

    def _take_one(self, around):
        """Waits until a step can be applied, and applies all that can."""
        applied = False
        while not applied:
            number, answer = self._next_answer()
            self._held[number] = answer
            while ready := [each for each in self._held if self._bound.may_apply(each)]:
                with around():
                    self._apply(ready[0], [self._held.pop(ready[0])])
                applied = True

    def _apply(self, number, answers):
        self.staleness += [self._bound.updates - min(a.updates for a in answers)]
        if len(answers) == 1:
            gradients, changes = answers[0].gradients, answers[0].changes
        else:
            gradients, changes = answers_lib.add_gradients(answers)
        self._step.apply(gradients, changes)
        self._bound.apply(number)
        self.logs = answers_lib.mean_logs(answers)
        for answer in answers:
            self.metrics = self._add(self.metrics, answer.metrics)
            self._note(answer)

    def _note(self, answer):
        self.steps_by_worker[answer.worker] += 1
        known = self._processes.setdefault(answer.worker, answer.process)
        if known != answer.process:
            self._processes[answer.worker] = answer.process
            self._tell(f"worker {answer.worker} is back, in a new process, and computes steps")

    def _add(self, states, more):
        pairs = zip(states, more, self._step.first_metrics)
        return [np.asarray(state + (new - first)) for state, new, first in pairs]

    def _send(self, number, schedule, *arguments):
        wait = schedule(self._strategy.coordinator, *arguments)
        self._sent[number] = (schedule, *arguments)

        def work():
            try:
                self._answers.put((number, wait(), None))
            except BaseException as error:
                self._answers.put((number, None, error))

        threading.Thread(target=work, daemon=True, name="tfmulti step").start()

    def _next_answer(self) -> tuple[int, Answer]:
        while True:
            for line in self._monitor.news():
                self._tell(line)
            self._monitor.check()
            try:
                number, answer, error = self._answers.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if error is None:
                del self._sent[number]
                self._retries = 0
                return number, answer
            self._retries += 1
            if not is_lost_worker(error) or self._retries > _MOST_RETRIES:
                raise error
            # The coordinator sends a step again until it is computed, but a worker can be lost
            # between that and the sending of its answer.
            self._send(number, *self._sent[number])


def _leave_out(record: logging.LogRecord) -> bool:
    """Leaves out what TensorFlow's coordinator logs of a lost worker: the monitor tells it."""
    return record.module != "cluster_coordinator"
