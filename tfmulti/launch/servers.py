"""Monitors a chief, its workers and its parameter servers; a failed worker is restarted alone.

A worker holds no state: the others continue, and it joins them again. A server holds a part of the
model, and the chief controls the run: if one of them fails, all are stopped, and the job may start
again from a checkpoint.
"""

from __future__ import annotations

import signal
import time

from tfmulti.cluster import environment
from tfmulti.launch import logs
from tfmulti.launch.logs import Ended

_CHIEF = 0
_GRACE_S = 5.0
_POLL_S = 0.05


def watch(job, group):
    """Watches until all tasks have ended.

    Args:
        job: The `Job`.
        group: Its processes: the chief, the workers, the servers.

    Returns:
        The `Outcome`.
    """
    return _Watch(job, group).run()


class _Watch:
    def __init__(self, job, group):
        self._job, self._group = job, group
        self._workers = range(1, 1 + job.config.num_workers)
        self._running = set(range(len(group)))
        self._ended: list[Ended] = []
        self._first = self._signalled = self._kill_at = self._failed_at = None
        self._due: dict[int, float] = {}

    def run(self):
        while self._running or self._due:
            event = self._job.next_event(_POLL_S)
            if isinstance(event, Ended):
                self._note(event)
            elif event is not None:
                self._pass_on(event)
            self._judge()
            self._start_due()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._group.kill()
        self._job.next_event(0.0)
        good = self._signalled or any(x.index == _CHIEF and not x.returncode for x in self._ended)
        first = None if good else self._first or logs.first_failure(self._ended)
        return self._job.outcome_of(self._ended, first, self._signalled)

    @property
    def _is_ending(self) -> bool:
        return self._kill_at is not None

    def _pass_on(self, number):
        # A second signal means: do not wait.
        wait_s = self._job.config.grace if self._signalled is None else 0.0
        self._signalled = self._signalled or int(number)
        self._kill_at = time.monotonic() + wait_s
        self._due.clear()
        self._group.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def _note(self, ended):
        self._running.discard(ended.index)
        if self._is_ending or not self._is_lost_worker(ended):
            self._ended.append(ended)
        elif (delay := self._job.delay_of_one(ended)) is not None:
            self._due[ended.index] = time.monotonic() + delay
        else:
            self._ended.append(ended)
            if left := [each for each in self._workers if each in self._running]:
                name, count = self._job.name_of(ended.index), len(left)
                self._job.print_fn(f"{name} {ended.describe()}; the job goes on with {count} left")

    def _is_lost_worker(self, ended) -> bool:
        """Whether it is a worker that was killed, not one that ended because of the others."""
        codes = (0, environment.PEER_LOST, *self._job.permanent)
        return ended.index in self._workers and ended.returncode not in codes

    def _judge(self):
        """Stops the others once the chief has ended, or a task that all need has failed."""
        if self._is_ending:
            return
        ended = {each.index: each for each in self._ended}
        now = time.monotonic()
        if _CHIEF in ended and not ended[_CHIEF].returncode:
            self._due.clear()
            self._kill_at = now + self._job.config.grace
            return
        lost = [each for each in self._ended if each.returncode and not self._may_continue(each)]
        found = logs.first_failure(lost)
        if found is None:
            return
        self._failed_at = self._failed_at or now
        if found.returncode == environment.PEER_LOST and now - self._failed_at < self._job.cause_s:
            return
        self._first, self._kill_at = found, now + min(self._job.config.grace, _GRACE_S)
        self._due.clear()
        self._group.send(signal.SIGTERM)

    def _may_continue(self, ended) -> bool:
        # A worker exits with 0 when the chief has reported the end of training.
        well = {each.index for each in self._ended if not each.returncode}
        going = self._running | set(self._due) | well
        return self._is_lost_worker(ended) and any(each in going for each in self._workers)

    def _start_due(self):
        for index in [each for each, when in self._due.items() if time.monotonic() >= when]:
            del self._due[index]
            number = self._job.restarts
            more = {environment.RESTARTS: str(number)}
            self._running.add(index)
            self._group.start_again(index, f"--- restart {number} ---", more)
