"""A small process that runs each worker, so that no child process is ever left behind.

It is a separate program that imports no other module of this package: it starts in milliseconds,
and survives if the launcher is killed. When the launcher exits, the kernel closes the file
descriptor `lifeline`; the launcher can also close it. Then the supervisor kills the worker and all
its descendants, in any session. When the worker exits, it kills the remaining descendants, unless
the worker is a shell that a forwarded signal has ended: then its programs have time to end too.
It forwards SIGTERM to the worker, SIGHUP as SIGTERM, and SIGINT, like a terminal, to all of its
process group; other signals that the launcher shall pass on must be added to `_FORWARDED`, or they
end the supervisor, and with it the worker.
"""

import os
import resource
import select
import signal
import sys
import time

# Each signal, and what the worker gets for it.
_FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
_HANDLED = (*_FORWARDED, signal.SIGCHLD)
# systemd signals each process of a job, logind with two signals, and the launcher sends one more:
# within so many seconds they are one request. A worker may take a second one as "end at once".
_SAME_REQUEST_S = 2.0
# Seconds to kill what a worker leaves: less than the launcher waits for a supervisor.
_KILL_S = 8.0
# Python ignores these two signals; a program that it executes would inherit that.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
# The variable with the cores to which it pins its worker, such as "0,1".
CORES = "TFMULTI_CORES"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_FOUND = 127


def main(lifeline: int, command: list[str]) -> int:
    """Runs a command until it ends or `lifeline` closes, and ends as it did.

    Args:
        lifeline: A file descriptor whose other end the launcher holds.
        command: The program and its arguments.

    Returns:
        The exit code; if a signal ended the worker, the same signal ends this process.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    for number in _HANDLED:
        # Under `nohup` SIGHUP is ignored, and stays so.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    worker = _start(command, lifeline)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    status = _wait(worker, lifeline, woken)
    _kill_all(worker)
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _start(command, lifeline) -> int:
    supervisor_pid = os.getpid()
    worker = os.fork()
    if worker:
        return worker
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (*_HANDLED, *_IGNORED):
            signal.signal(number, signal.SIG_DFL)
        # It gets SIGTERM instead, and time to save.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(lifeline)
        cores = os.environ.get(CORES)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        if os.getppid() == supervisor_pid:
            os.execvp(command[0], command)
    except OSError as error:
        message = f"error: The command must be a program that can be run. Received: {command[0]}: "
        os.write(2, f"{message}{error.strerror}. Correct the path.\n".encode())
    finally:
        os._exit(_NOT_FOUND)


def _wait(worker, lifeline, woken) -> int:
    forwarded = {}
    while True:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            os.kill(worker, signal.SIGKILL)
            return os.waitpid(worker, 0)[1]
        for number in map(_FORWARDED.get, os.read(woken, 4096)):
            now = time.monotonic()
            if number and now - forwarded.get(number, -_SAME_REQUEST_S) >= _SAME_REQUEST_S:
                forwarded[number] = now
                # Before the worker has made its own session, it is alone.
                has_group = os.getpgid(worker) == worker
                _send(-worker if number == signal.SIGINT and has_group else worker, number)
        while True:
            # Orphans of the worker are children of this process, which must reap them.
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == worker:
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) in forwarded:
                    _end_orphans(os.WTERMSIG(status), lifeline, woken)
                return status
            if not child:
                break


def _end_orphans(number, lifeline, woken):
    """Passes on the signal that has ended the worker, and waits until `lifeline` closes at most.

    A shell without `exec` dies at once, while the program that it has started would save. Told are
    only processes whose parent the signal has ended: one that saves may need its children.
    """
    told, is_new = set(), True
    while True:
        for child in set(_children()) - told if is_new else ():
            told.add(child)
            # All of the group have got SIGINT, but a shell's background programs ignore it.
            if number == signal.SIGTERM or _ignores(child, number):
                _send(child, signal.SIGTERM)
        if not told:
            return
        child, status = os.waitpid(-1, os.WNOHANG)
        is_new = child in told and os.WIFSIGNALED(status)
        told.discard(child)
        if not child:
            if lifeline in select.select([lifeline, woken], [], [])[0]:
                return
            os.read(woken, 4096)


def _kill_all(worker):
    """Kills all descendants; when one dies, its children become children of this process.

    One that may not be killed, as of another user, or cannot be now, as in a read of a file system
    that has gone, is left, and named.
    """
    _send(-worker, signal.SIGKILL)
    limit = time.monotonic() + _KILL_S
    while True:
        for child in _children():
            _send(child, signal.SIGKILL)
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if time.monotonic() > limit:
            left = ", ".join(map(str, _children()))
            os.write(2, f"The worker has ended; not killed in {_KILL_S:g} s: {left}.\n".encode())
            return
        if not child:
            time.sleep(0.005)


def _send(process, number):
    try:
        os.kill(process, number)
    except (ProcessLookupError, PermissionError):
        pass


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/{own}/task/{own}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _ignores(process, number) -> bool:
    try:
        with open(f"/proc/{process}/status") as file:
            [mask] = [line.split()[1] for line in file if line.startswith("SigIgn:")]
    except (OSError, ValueError):
        return False
    return bool(int(mask, 16) >> number - 1 & 1)


def _prctl(option, value):
    """Calls prctl on Linux; on other systems only the worker's process group is killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _end_by(number):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
