"""Runs local processes that end together, without hangs and without orphans; and ends this one."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

_Result = TypeVar("_Result")
DONE, FAILED, ENDED, TIMED_OUT = "done", "failed", "ended", "timed out"
_POLL_S = 0.05
_LISTENING_PORTS = range(15_000, 32_768)  # Linux gives outgoing connections those from 32768 on


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process that has ended.

    Attributes:
        returncode: Its exit code; negative where a signal ended it.
        stdout: Its standard output.
        stderr: Its standard error.
        how: `"done"` (exit code 0), `"failed"` (another exit code, before it was ended), `"ended"`
            (because another process failed), or `"timed out"`.
    """

    returncode: int
    stdout: str
    stderr: str
    how: str


@contextlib.contextmanager
def hold_ports(count: int, address: str = "127.0.0.1") -> Iterator[list[int]]:
    """Yields ports that nothing listened on, and holds them until the block ends.

    They lie below the ports that the system gives to outgoing connections, one of which could take
    a port between this choice and its use.

    >>> with hold_ports(2) as ports:
    ...     len(ports)
    2
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(_LISTENING_PORTS, len(_LISTENING_PORTS)):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server((address, port)))
                ports.append(port)
            if len(ports) == count:
                break
        yield ports


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing listens on; all are held until all are known.

    >>> len(set(free_ports(3)))
    3
    """
    with hold_ports(count) as ports:
        return ports


def tf_configs(num_workers: int, num_ps: int = 0) -> list[str]:
    """Returns the TF_CONFIG of each worker on this machine, as JSON.

    With parameter servers there is a chief before the workers, and the servers follow them.

    >>> [json.loads(config)["task"]["index"] for config in tf_configs(2)]
    [0, 1]
    >>> [json.loads(config)["task"]["type"] for config in tf_configs(2, num_ps=1)]
    ['chief', 'worker', 'worker', 'ps']
    """
    counts = {"worker": num_workers}
    if num_ps:
        counts = {"chief": 1, **counts, "ps": num_ps}
    ports = iter(free_ports(sum(counts.values())))
    cluster = {
        kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for kind, count in counts.items()
    }
    return [
        json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        for kind, count in counts.items()
        for index in range(count)
    ]


def run_together(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout_s: float = 600.0,
    grace_s: float = 5.0,
) -> list[Finished]:
    """Runs one command once for each environment, at the same time.

    If one process fails, or the timeout expires, it ends the others with all their children. It
    does the same if an exception ends this function.

    Args:
        command: The program and its arguments.
        environments: For each process, the variables to set besides those of this process.
        timeout_s: Seconds until all are ended.
        grace_s: Seconds to wait for the others to fail too after one has failed, and then between
            SIGTERM and SIGKILL.

    Returns:
        The finished processes, in order.

    Example:
    >>> import sys
    >>> [done] = run_together([sys.executable, "-c", "print(5)"], [{}])
    >>> done.how, done.stdout.strip()
    ('done', '5')
    """
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process must never wait for somebody to read what it writes.
        texts = [
            [stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in range(2)]
            for _ in environments
        ]
        started: list[subprocess.Popen] = []
        stack.callback(lambda: _end(started, grace_s=0.0))
        for env, (stdout, stderr) in zip(environments, texts):
            process = subprocess.Popen(
                list(command),
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            stack.callback(process.stdin.close)
            started.append(process)
        cause = _wait(started, timeout_s, grace_s)
        by_themselves = [process.poll() is not None for process in started]
        _end(started, grace_s)
        return [
            Finished(p.returncode, _read(out), _read(err), _how(p, alone, cause))
            for p, (out, err), alone in zip(started, texts, by_themselves)
        ]


def end_with_parent() -> None:
    """Ends this process when its parent has ended, for whatever reason.

    For programs that `run_together` starts: their standard input closes with their parent.
    """

    def watch():
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait(started, timeout_s, grace_s) -> str:
    """Waits until all are done, the grace after a failure is over, or the timeout expires."""
    limit, cause = time.monotonic() + timeout_s, TIMED_OUT
    while time.monotonic() < limit:
        codes = [process.poll() for process in started]
        if None not in codes:
            break
        if any(codes) and cause != ENDED:
            limit, cause = min(limit, time.monotonic() + grace_s), ENDED
        time.sleep(_POLL_S)
    return cause


def _end(started, grace_s):
    """Ends the processes that still run, and all their children."""
    limit = time.monotonic() + grace_s
    for process in started:
        _signal_group(process, signal.SIGTERM)
    while time.monotonic() < limit and any(process.poll() is None for process in started):
        time.sleep(_POLL_S)
    for process in started:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process, number):
    # The process group outlives its leader if that has started children.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _how(process, by_itself, cause) -> str:
    if by_itself:
        return DONE if process.returncode == 0 else FAILED
    return cause


def _read(file) -> str:
    file.seek(0)
    return file.read()


# The prefix of the names of this package's threads.
OWN_THREADS = "tfmulti"
_THREADS_S = 5.0
_is_ending = _is_done = False


def end_process(exit_code: int, *, is_done: bool = False) -> NoReturn:
    """Ends the process without Python's own shutdown.

    During Python's shutdown a thread of TensorFlow's data pipeline that calls Python blocks
    forever, and the destructor of the pipeline waits for it. This function runs the exit
    handlers, and waits for threads: for those of this package until they are done, for others
    some seconds.

    Args:
        exit_code: The exit code.
        is_done: Whether the program is done, as those of all workers are: its exit handlers may
            wait for theirs.
    """
    global _is_ending, _is_done
    _is_ending, _is_done = True, is_done
    wait_for_threads()
    atexit._run_exitfuncs()
    exit_at_once(exit_code)


def exit_at_once(exit_code: int) -> NoReturn:
    """Ends the process without exit handlers, whether or not its output can still be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            # On a full disk, or where no one reads the pipe any more.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(exit_code)


def is_ending() -> bool:
    """Whether `end_process` ends this process, whatever Python's own shutdown would wait for."""
    return _is_ending


def is_done() -> bool:
    """Whether `end_process` ends this process as one that is done."""
    return _is_done


def signal_name(number: int) -> str:
    """Returns the name of a signal; real-time signals have none.

    >>> signal_name(9), signal_name(35)
    ('SIGKILL', 'signal 35')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def in_thread(function: Callable[[], _Result], timeout_s: float | None = None) -> _Result:
    """Returns what a function returns; runs it in a thread that does not delay the exit.

    Raises:
        TimeoutError: If it has not returned in time.

    >>> in_thread(lambda: 5, 1.0)
    5
    """
    result: concurrent.futures.Future = concurrent.futures.Future()

    def run():
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    # An executor's thread would be waited for at exit.
    threading.Thread(target=run, daemon=True).start()
    if not concurrent.futures.wait([result], timeout_s).done:
        raise TimeoutError(f"no answer in {timeout_s:g} s")
    return result.result()


def ask_in_threads(
    function: Callable, items: Collection, timeout_s: float
) -> Iterator[tuple[object, object]]:
    """Calls a function with each item at the same time, and yields (item, result) as they come.

    It ends when the time is over. A call that hangs cannot be ended: nothing waits for its thread,
    not even the end of the process, which would wait for those of an executor.

    >>> sorted(ask_in_threads(len, ["a", "bcd"], timeout_s=60.0))
    [('a', 1), ('bcd', 3)]
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()
    for item in items:
        ask = lambda item=item: answers.put((item, function(item)))
        threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(queue.Empty):
        for _ in items:
            yield answers.get(timeout=max(0.0, deadline - time.monotonic()))


def wait_for_threads() -> None:
    """Waits for this package's threads until they are done, for others some seconds."""
    until = time.monotonic() + _THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            ours = thread.name.startswith(OWN_THREADS)
            thread.join(None if ours else max(0.0, until - time.monotonic()))


def end_process_at_exit(exit_code: int) -> None:
    """Makes the process end through `end_process` when Python exits."""

    def end():
        atexit.unregister(end)
        end_process(exit_code)

    atexit.register(end)
