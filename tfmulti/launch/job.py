"""A job: starts all workers together, and restarts them after failures that may not recur."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfmulti.cluster import environment
from tfmulti.launch import logs, placement, servers
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.group import Group, signals_as_events
from tfmulti.launch.logs import Ended, Log, open_logs
from tfmulti.launch.pmi import ProcessManager

PEERS_GRACE_S = 5.0
"""Maximum seconds for the other workers to end after one has failed."""

CAUSE_S = 5.0
"""Seconds to wait for the cause where workers say that they have lost a peer."""

FIRST_DELAY_S = 1.0
"""Seconds until the first restart; each further one waits twice as long."""

_POLL_S = 0.05
_LONGEST_DELAY_S = 30.0
# Errors of the program or the user: a restart would not help.
_PERMANENT = (1, 2)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one start of all workers ended.

    Attributes:
        ended: The workers, in the order in which they ended.
        first: The one that failed first; None where none did, or after a signal.
        signalled: The signal that ended the launcher's work, or None.
    """

    ended: list[Ended]
    first: Ended | None
    signalled: int | None


class Job:
    """A command on several workers, with restarts.

    Args:
        config: The settings.
        command: The program and its arguments.
        print_fn: Function that takes a line of text for the user.
        variables: For each worker's index, variables to set besides the launcher's own.
        create_log: Function that creates the log of a worker, such as `logs.Log`.

    Attributes:
        outcome: How the last start of all workers ended; None before the first has ended.
    """

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        print_fn: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
        *,
        variables: Mapping[int, Mapping[str, str]] | None = None,
        create_log: Callable[..., Log] = Log,
    ):
        self.config, self.command, self.print_fn = config, command, print_fn
        self.outcome: Outcome | None = None
        self._variables, self._create_log = variables or {}, create_log
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._restarts = self._counted = 0
        self._has_progress = False

    def run(self) -> int:
        """Starts the workers, restarts them after failures, and prints what went wrong.

        Returns:
            0 where all workers are done, else the first failure's exit code, or 128 and the
            number of the signal that ended the launcher.

        Raises:
            ValueError: For a hosts file that cannot be used.
        """
        first_start = placement.tf_configs_here(self.config)
        self._names = names = {
            index: placement.task_name(config) for index, config in first_start.items()
        }
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
            if code == 0 and not kept:
                shutil.rmtree(folder, ignore_errors=True)
            elif not kept:
                self.print_fn(f"The logs of all workers are in {folder}")

    def _run_until_done(self, configs) -> int:
        while True:
            with tempfile.TemporaryDirectory(prefix="tfmulti_progress_") as progress:
                self.outcome = outcome = self._run_once(configs, Path(progress))
                self._has_progress |= any(Path(progress).iterdir())
            if outcome.signalled is not None:
                done = not any(each.returncode for each in outcome.ended)
                return 0 if done else 128 + outcome.signalled
            if outcome.first is None:
                return 0
            self._report_failure(outcome.first, outcome.ended)
            delay = self._delay_of_restart(outcome.first)
            if delay is None:
                return outcome.first.exit_code
            signalled = self._rest(delay)
            if signalled is not None:
                return 128 + signalled
            configs = placement.tf_configs_here(self.config)

    def _run_once(self, configs, progress) -> Outcome:
        token = os.environ.get(environment.TOKEN) if self.config.hosts else secrets.token_hex(32)
        common = {environment.RESTARTS: str(self._restarts), "PYTHONUNBUFFERED": "1"}
        # The worker's output must not be lost among the log lines of TensorFlow's services.
        common["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3")
        if token:
            common[environment.TOKEN] = token
        if self.config.start_timeout is not None:
            common[environment.START_TIMEOUT] = str(self.config.start_timeout)
        environments = {
            index: {
                **common,
                **placement.variables(self.config, local_index, len(configs)),
                **self._variables.get(index, {}),
                "TF_CONFIG": tf_config,
                environment.PROGRESS: str(progress / f"worker_{index}"),
            }
            for local_index, (index, tf_config) in enumerate(configs.items())
        }
        heading = f"--- restart {self._restarts} ---" if self._restarts else ""
        with contextlib.ExitStack() as stack:
            if self.config.mpi:
                manager = stack.enter_context(ProcessManager(len(configs)))
                for index, variables in environments.items():
                    variables |= manager.variables(index)
            group = Group(self.command, environments, self._logs, self._events, heading)
            stack.enter_context(group)
            if self.config.num_ps:
                return servers.watch(self, group)
            return self._watch(group)

    def _watch(self, group) -> Outcome:
        ended: list[Ended] = []
        first, signalled, failed_at, kill_at = None, None, None, None
        while len(ended) < len(group):
            event = self.next_event(_POLL_S)
            if isinstance(event, Ended):
                ended.append(event)
            elif event is not None:
                # A second signal means: do not wait.
                wait_s = self.config.grace if signalled is None else 0.0
                signalled = signalled or int(event)
                kill_at = time.monotonic() + wait_s
                group.send(signal.SIGTERM if event == signal.SIGHUP else event)
            now = time.monotonic()
            if kill_at is None and (found := logs.first_failure(ended)):
                failed_at = now if failed_at is None else failed_at
                waits = found.returncode == environment.PEER_LOST and now - failed_at < CAUSE_S
                if not waits:
                    first, kill_at = found, now + min(self.config.grace, PEERS_GRACE_S)
                    self._report_hanging(found, ended)
                    group.send(signal.SIGTERM)
            if kill_at is not None and now >= kill_at:
                group.kill()
        self.next_event(0.0)
        first = None if signalled else first or logs.first_failure(ended)
        return Outcome(ended, first, signalled)

    def next_event(self, wait_s):
        """Returns the next event, or None; shows new output of the workers while it waits."""
        try:
            return self._events.get(timeout=wait_s) if wait_s else None
        except queue.Empty:
            return None
        finally:
            for log in self._logs.values():
                log.show_new()

    @property
    def restarts(self) -> int:
        """Restarts so far, of all workers or of one."""
        return self._restarts

    @property
    def permanent(self) -> tuple[int, ...]:
        """Exit codes after which a worker is not restarted alone."""
        return _PERMANENT

    @property
    def cause_s(self) -> float:
        """Seconds to wait for the cause if tasks report that they have lost another."""
        return CAUSE_S

    def name_of(self, index: int) -> str:
        """Returns the name of a task."""
        return self._names[index]

    def outcome_of(self, ended, first, signalled) -> Outcome:
        """Returns the outcome of a start."""
        return Outcome(ended, first, signalled)

    def delay_of_one(self, ended: Ended) -> float | None:
        """Returns the seconds until one worker is restarted alone; None where it is not."""
        preempted = ended.exit_code == environment.PREEMPTED
        if not preempted:
            if self._counted >= self.config.max_restarts:
                return None
            self._counted += 1
        self._restarts += 1
        why = "preempted, not counted" if preempted else f"of {self.config.max_restarts}"
        count = self._restarts if preempted else self._counted
        name = self._names[ended.index]
        self.print_fn(
            f"{name} {ended.describe()}. Restart {count} ({why}) of {name} in {FIRST_DELAY_S:g} s; "
            "the others go on"
        )
        return FIRST_DELAY_S

    def _delay_of_restart(self, first) -> float | None:
        """Returns the seconds until the restart; None where there is none. Counts it."""
        preempted = first.exit_code == environment.PREEMPTED
        if not preempted:
            if first.returncode in _PERMANENT and not self._has_progress:
                if self.config.max_restarts:
                    self.print_fn("Not restarted: it failed before the first training step.")
                return None
            if self._counted >= self.config.max_restarts:
                return None
            self._counted += 1
        delay = min(FIRST_DELAY_S * 2.0**self._restarts, _LONGEST_DELAY_S)
        self._restarts += 1
        why = "preempted, not counted" if preempted else f"of {self.config.max_restarts}"
        count = self._restarts if preempted else self._counted
        self.print_fn(f"Restart {count} ({why}) of all workers in {delay:g} s")
        return delay

    def _rest(self, seconds) -> int | None:
        """Waits; returns the signal that was received, or None."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            event = self.next_event(left)
            if isinstance(event, int):
                return event
        return None

    def _report_hanging(self, first, ended):
        """Names the workers that still run if all others report a lost peer."""
        if first.returncode != environment.PEER_LOST:
            return
        running = sorted(set(self._logs) - {each.index for each in ended})
        if running:
            names = ", ".join(self._names[index] for index in running)
            self.print_fn(f"No worker has failed on its own; still running: {names}")

    def _report_failure(self, first, ended):
        if first.returncode == environment.PEER_LOST:
            for each in ended[: ended.index(first)]:
                name = self._names[each.index]
                self.print_fn(f"{name} ended early, with exit code {each.returncode}")
        log = self._logs[first.index]
        log.show_rest()
        name = self._names[first.index]
        self.print_fn(f"{name} {first.describe()} (log: {log.path})")
        if first.returncode == -signal.SIGKILL:
            self.print_fn("Unless somebody killed it, this host ran out of memory: see dmesg.")
        words = logs.log_tail(log.since_start())
        if words:
            self.print_fn("\n".join(f"[{name}] {line}" for line in words.splitlines()))
