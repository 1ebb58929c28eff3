"""A job: starts all workers together, and restarts them after failures that may not recur.

With parameter servers a failed worker is restarted alone. A worker holds no state: the others
continue, and it joins them again. A server holds a part of the model, and the chief controls the
run: if one of them fails, all are stopped, and the job may start again from a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tfmulti.cluster import environment, gpus
from tfmulti.launch import logs
from tfmulti.launch.config import (
    LaunchConfig,
    gpus_of,
    task_name,
    tf_configs_here,
    variables_of,
)
from tfmulti.launch.group import Group, signals_as_events
from tfmulti.launch.logs import Log, WorkerExit, open_logs
from tfmulti.launch.pmi import ProcessManager, variables_of_others
from tfmulti.launch.restarts import PERMANENT, Restarts
from tfmulti.runtime import command_line

PEERS_GRACE_S = 5.0
"""Maximum seconds for the other workers to end after one has failed."""

CAUSE_WAIT_S = 5.0
"""Seconds to wait for the cause where workers say that they have lost a peer."""

SLOW_READER_S = 5.0
"""Maximum seconds to wait, before a failure is printed, for a reader of the failed one's output."""

_POLL_S = 0.05
# Signals within so many seconds are one request: systemd and logind send more than one.
_SAME_REQUEST_S = 1.0
# The index of the chief, where there are parameter servers.
_CHIEF = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of all workers ended.

    Attributes:
        ended: The workers, in the order in which they ended.
        first: The one that failed first; None where none did, or after a signal.
        signalled: The signal that ended the launcher's work, or None.
    """

    ended: list[WorkerExit]
    first: WorkerExit | None
    signalled: int | None


class Job:
    """A command on several workers, with restarts.

    Args:
        config: The settings.
        command: The program and its arguments.
        print_fn: Function that takes a line of text for the user.
        print_note: The same for what is no failure; by default `print_fn`.
        create_log: Function that creates the log of a worker, such as `logs.Log`.
        drain: Function that waits for the reader of what the logs have shown, and returns how many
            lines it has not read, as `terminal.Output.drain`.

    Attributes:
        outcome: How the last start of all workers ended; None before the first has ended.
        names: The names of the tasks, by index; empty before the first start.
    """

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        print_fn: Callable[[str], None] = command_line.print_error,
        *,
        print_note: Callable[[str], None] | None = None,
        create_log: Callable[..., Log] = Log,
        drain: Callable[[], int] = lambda: 0,
    ):
        self.config, self.command, self.print_fn = config, command, print_fn
        self._print_note = print_note or print_fn
        self.outcome: Outcome | None = None
        self._create_log, self._drain = create_log, drain
        self._logs: dict[int, Log] = {}
        self.names: dict[int, str] = {}
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._restarts = Restarts(config.max_restarts, print_fn)
        self._name = secrets.token_hex(8)

    @property
    def restarts(self) -> int:
        """Restarts so far, of all workers or of one."""
        return self._restarts.total

    def run(self) -> int:
        """Starts the workers, restarts them after failures, and prints what went wrong.

        Returns:
            0 where all workers are done, else the first failure's exit code, or 128 and the
            number of the signal that ended the launcher.

        Raises:
            ValueError: For a hosts file that cannot be used, or logs to which another job writes.
        """
        first_start = tf_configs_here(self.config)
        self.names = names = {index: task_name(config) for index, config in first_start.items()}
        self._gpus, note = gpus_of(names, gpus.list_visible())
        for each in filter(None, (gpus.list_fault(), note)):
            self._print_note(each)
        kept = self.config.log_dir is not None
        folder = Path(self.config.log_dir or tempfile.mkdtemp(prefix="tfmulti_launch_"))
        code = None
        try:
            with (
                signals_as_events(self._events),
                open_logs(folder, names, self.config.all_output, self._create_log) as self._logs,
            ):
                code = self._run_until_done(first_start)
            return code
        finally:
            left_out = self._drain() + sum(log.left_out for log in self._logs.values())
            if left_out:
                self.print_fn(f"Lines of output not shown, since nobody read them: {left_out:,}")
            if code == 0 and not kept and not left_out:
                shutil.rmtree(folder, ignore_errors=True)
            elif left_out or not kept:
                self.print_fn(f"The logs of all workers are in {folder}")

    def _run_until_done(self, configs) -> int:
        while True:
            with tempfile.TemporaryDirectory(prefix="tfmulti_progress_") as progress:
                self._progress = Path(progress)
                self.outcome = outcome = self._run_once(configs, self._progress)
                if outcome.signalled is not None:
                    done = not any(exited.returncode for exited in outcome.ended)
                    self._report_unclean(outcome)
                    return 0 if done else 128 + outcome.signalled
                if outcome.first is None:
                    return 0
                self._report_failure(outcome.first, outcome.ended)
                delay = self._restarts.delay_of_all(outcome.first, self._progress)
            if delay is None:
                return outcome.first.exit_code
            signalled = self._pause(delay)
            if signalled is not None:
                return 128 + signalled
            configs = self._configs_again(configs)

    def _configs_again(self, configs) -> dict[int, str]:
        """Returns the TF_CONFIGs of a restart: with new ports, or those of the hosts file again.

        The launchers of other hosts have read the file when they began, and so do not see a change.
        """
        if self.config.hosts is None:
            return tf_configs_here(self.config)
        try:
            has_changed = tf_configs_here(self.config) != configs
        except ValueError:
            has_changed = True
        if has_changed:
            self.print_fn(
                f"{self.config.hosts} has changed. The job continues with the hosts that it began "
                "with; to use the others, end the launchers of all hosts, and start them again."
            )
        return configs

    def _run_once(self, configs, progress) -> Outcome:
        token = os.environ.get(environment.TOKEN) if self.config.hosts else secrets.token_hex(32)
        common = dict.fromkeys(variables_of_others(os.environ))
        common |= {environment.RESTARTS: str(self.restarts), environment.JOB: self._name}
        common["PYTHONUNBUFFERED"] = "1"
        # The worker's output must not be lost among the log lines of TensorFlow's services.
        common["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3")
        if token:
            common[environment.TOKEN] = token
        if self.config.start_timeout is not None:
            common[environment.START_TIMEOUT] = str(self.config.start_timeout)
        environments = {
            index: {
                **common,
                **variables_of(self.config, local_index, len(configs)),
                **({gpus.VISIBLE: self._gpus[index]} if index in self._gpus else {}),
                "TF_CONFIG": tf_config,
                environment.PROGRESS: str(progress / f"worker_{index}"),
            }
            for local_index, (index, tf_config) in enumerate(configs.items())
        }
        heading = f"--- restart {self.restarts} ---" if self.restarts else ""
        with contextlib.ExitStack() as stack:
            if self.config.mpi:
                manager = stack.enter_context(ProcessManager(len(configs)))
                for index, variables in environments.items():
                    variables |= manager.variables(index)
            group = Group(self.command, environments, self._logs, self._events, heading)
            return _Watch(self, stack.enter_context(group), self._logs).run()

    def output_of(self, index: int) -> str:
        """Returns the output of a task since its last start, or the end of a long one."""
        return self._logs[index].since_start()

    def next_event(self, wait_s):
        """Returns the next event, or None; shows new output of the workers while it waits."""
        try:
            return self._events.get(timeout=wait_s) if wait_s else None
        except queue.Empty:
            return None
        finally:
            for log in self._logs.values():
                log.show_new()

    def restart_delay(self, ended: WorkerExit) -> float | None:
        """Returns the seconds until one worker is restarted alone; None where it is not."""
        return self._restarts.delay_of_one(ended, self.names[ended.index], self._progress)

    def _pause(self, seconds) -> int | None:
        """Waits; returns the signal that was received, or None."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            event = self.next_event(left)
            if isinstance(event, int):
                return event
        return None

    def _report_unclean(self, outcome):
        """Names the workers that a signal to the launcher did not end as it should."""
        clean = (0, environment.PREEMPTED, environment.PEER_LOST, 128 + outcome.signalled)
        for each in outcome.ended:
            if each.returncode not in (*clean, -outcome.signalled, -signal.SIGTERM):
                log = self._logs[each.index].path
                self.print_fn(f"{self.names[each.index]} {each.describe()} (log: {log})")

    def _report_failure(self, first, ended):
        if first.returncode == environment.PEER_LOST:
            for each in ended[: ended.index(first)]:
                name = self.names[each.index]
                self.print_fn(f"{name} exited early with code {each.returncode}")
        log = self._logs[first.index]
        log.show_rest(SLOW_READER_S)
        name = self.names[first.index]
        self.print_fn(f"{name} {first.describe()} (log: {log.path})")
        if first.returncode == -signal.SIGKILL:
            self.print_fn("Unless somebody killed it, this host ran out of memory: see dmesg.")
        words = logs.log_tail(log.since_start())
        if words:
            self.print_fn("\n".join(f"[{name}] {line}" for line in words.splitlines()))


class _Watch:
    """Watches one start until all tasks have ended; `run` returns the outcome."""

    def __init__(self, job: Job, group: Group, indices: Collection[int]):
        self._job, self._group, self._running = job, group, set(indices)
        # Those that may be restarted alone: without servers no worker can rejoin the others.
        self._workers = range(1, 1 + job.config.num_workers) if job.config.num_ps else range(0)
        self._ended: list[WorkerExit] = []
        self._first = self._signalled = self._kill_at = self._failed_at = None
        self._first_came: dict[int, float] = {}
        self._restart_at: dict[int, float] = {}

    def run(self) -> Outcome:
        while self._running or self._restart_at:
            event = self._job.next_event(_POLL_S)
            if isinstance(event, WorkerExit):
                self._on_exit(event)
            elif event is not None:
                self._pass_on(event)
            if self._kill_at is None:
                self._stop_if_needed()
            self._restart_due()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._group.kill()
        self._job.next_event(0.0)
        good = self._signalled or self._chief_is_done()
        first = None if good else self._first or logs.first_failure(self._ended)
        # A signal that came once the chief had ended well ended what was to end in any case.
        signalled = None if self._chief_is_done() else self._signalled
        return Outcome(self._ended, first, signalled)

    def _pass_on(self, signum):
        now = time.monotonic()
        first_came = self._first_came.setdefault(signum, now)
        if self._signalled is None:
            self._signalled = int(signum)
            self._kill_at = now + self._job.config.grace
            self._restart_at.clear()
            self._group.send(signal.SIGTERM if signum == signal.SIGHUP else signum)
        elif now - first_came >= _SAME_REQUEST_S:
            # The same signal once more means: do not wait.
            self._kill_at = now

    def _on_exit(self, ended):
        self._running.discard(ended.index)
        if self._kill_at is not None or not self._is_lost_worker(ended):
            self._ended.append(ended)
        elif (delay := self._job.restart_delay(ended)) is not None:
            self._restart_at[ended.index] = time.monotonic() + delay
        else:
            self._ended.append(ended)
            if left := [worker for worker in self._workers if worker in self._running]:
                name, count = self._job.names[ended.index], len(left)
                self._job.print_fn(
                    f"{name} {ended.describe()}; the job continues with the remaining {count}"
                )

    def _is_lost_worker(self, ended) -> bool:
        """Whether it is a worker that was killed, not one that ended because of the others."""
        codes = (0, environment.PEER_LOST, *PERMANENT)
        return ended.index in self._workers and ended.returncode not in codes

    def _chief_is_done(self) -> bool:
        """Whether a chief of parameter servers has ended well, and with it the job."""
        done = any(exited.index == _CHIEF and not exited.returncode for exited in self._ended)
        return bool(self._workers) and done

    def _stop_if_needed(self):
        """Stops the others once the chief has ended, or a task that all need has failed."""
        now, grace = time.monotonic(), self._job.config.grace
        if self._chief_is_done():
            self._restart_at.clear()
            self._kill_at = now + grace
            return
        lost = [
            exited for exited in self._ended if exited.returncode and not self._may_continue(exited)
        ]
        found = logs.first_failure(lost)
        if found is None:
            return
        self._failed_at = self._failed_at or now
        if found.returncode == environment.PEER_LOST and now - self._failed_at < CAUSE_WAIT_S:
            return
        self._first, self._kill_at = found, now + min(grace, PEERS_GRACE_S)
        self._restart_at.clear()
        if found.returncode == environment.PEER_LOST and self._running and not self._workers:
            names = ", ".join(self._job.names[index] for index in sorted(self._running))
            self._job.print_fn(f"No worker failed by itself; still running: {names}")
        self._group.send(signal.SIGTERM)

    def _may_continue(self, ended) -> bool:
        # A worker exits with 0 when the chief has reported the end of training.
        well = {exited.index for exited in self._ended if not exited.returncode}
        going = self._running | set(self._restart_at) | well
        return self._is_lost_worker(ended) and any(worker in going for worker in self._workers)

    def _restart_due(self):
        for index in [each for each, when in self._restart_at.items() if time.monotonic() >= when]:
            del self._restart_at[index]
            number = str(self._job.restarts)
            self._running.add(index)
            more = {environment.RESTARTS: number}
            self._group.start_again(index, f"--- restart {number} ---", more)
