"""Other tasks: whether they are running, and errors of TensorFlow that they have caused.

The port of a process that is frozen, or whose network is cut, still accepts connections, and those
who wait for it get no error. A gRPC server sends its settings to each new connection immediately,
however busy its program is (RFC 9113, section 3.4).

TensorFlow's own text of an error is about heartbeats or sockets, and has the task somewhere in the
middle: here it is rewritten to name that worker.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Callable

from tfmulti.choices import DEFAULT_HEARTBEAT_TIMEOUT_S
from tfmulti.cluster import environment
from tfmulti.cluster.network import split_address
from tfmulti.cluster.task import Cluster
from tfmulti.runtime import command_line

MISSES = 3
"""After so many connections in a row that were refused, a task has gone."""

_CONNECT_S = 2.0
# The length, the type and the flags of a frame, and its stream.
_FRAME_BYTES = 9
NO_ANSWER = "it does not answer (frozen or cut off)"
THERE, SILENT, GONE = "there", "silent", "gone"


def is_reachable(address: str) -> bool:
    """Whether a task listens at an address, and answers."""
    return probe(address) == THERE


def probe(address: str, timeout_s: float = _CONNECT_S) -> str:
    """Returns `THERE` for a task that answers, `SILENT` for one that does not, else `GONE`.

    Args:
        address: Its host and port.
        timeout_s: Seconds to wait for a connection, and for an answer.
    """
    try:
        connection = socket.create_connection(split_address(address), timeout=timeout_s)
    except TimeoutError:
        return SILENT
    except OSError:
        return GONE
    with connection:
        try:
            return THERE if connection.recv(_FRAME_BYTES) else GONE
        except TimeoutError:
            return SILENT
        except OSError:
            return GONE


class Presence:
    """The state of a task over successive checks.

    Args:
        address: Its host and port.
        heartbeat_timeout_s: Seconds without an answer after which the task counts as lost.
        clock: Returns seconds.

    Attributes:
        has_been_there: Whether it has ever answered.

    Example:
        >>> presence = Presence("127.0.0.1:1")
        >>> [presence.note(GONE) for _ in range(3)]
        [None, None, 'nothing listens there']
    """

    def __init__(
        self,
        address: str,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address, self._timeout_s, self._clock = address, heartbeat_timeout_s, clock
        self._misses, self._silent_since = 0, None
        self.has_been_there = False

    def check(self) -> str | None:
        """Looks once more; returns why the task counts as lost, or None."""
        return self.note(probe(self.address))

    def note(self, seen: str) -> str | None:
        """Notes what was seen; returns why the task counts as lost, or None."""
        now = self._clock()
        self._misses = self._misses + 1 if seen == GONE else 0
        if seen != SILENT:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        self.has_been_there |= seen == THERE
        if self._misses >= MISSES:
            return "nothing listens there"
        if self._silent_since is not None and now - self._silent_since >= self._timeout_s:
            return NO_ANSWER
        return None


_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)")
_REPORTED = re.compile(r"Error reported from /job:(\w+)(?:/replica:\d+)?/task:(\d+): ")
# The prefix of the error that a failing worker reports to the others.
REPORT = "this worker failed: "
_LOST = (
    "heartbeat",
    "Socket closed",
    "Connection reset",
    "Connection refused",
    "failed to connect",
    "Broken pipe",
    "recvmsg",
    "unhealthy",
    "CoordinationService",
    "Error reported from",
    "its program has ended",
)
# A program's own connections fail with the same words. An error is the others' only where it also
# has words of TensorFlow's cluster runtime or of our MPI, names another task, or is gRPC's own.
_OF_CLUSTER = re.compile(
    r"collective op|coordination ?service|Error reported from|GRPC error information"
    r"|tasks are unhealthy|to another worker",
    re.IGNORECASE,
)
_OF_GRPC = ("Socket closed", "failed to connect to all addresses", "recvmsg:")
# A function of the program has raised it, within a step or while data are read.
_OF_PYTHON = "Traceback (most recent call last)"
_UNLIKE = (
    "Shape mismatch in the collective",
    "expected type",
    "joining a group with size",
    "Collective instance",
)
_MAX_LENGTH = 600


@dataclasses.dataclass(frozen=True)
class PeerError:
    """How this worker ends because of the others.

    Attributes:
        exit_code: 144 where another worker has gone; 1 where workers do different things.
        text: The message for the user.
    """

    exit_code: int
    text: str


def find_peer_error(error: BaseException, cluster: Cluster | None) -> PeerError | None:
    """Returns the peer error that an error stands for, or None for a local error.

    Args:
        error: The error that was raised on this worker.
        cluster: The cluster, or None if there is none.

    Example:
    >>> cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)
    >>> text = "Socket closed ... from remote target /job:worker/replica:0/task:1 while"
    >>> peer_error = find_peer_error(RuntimeError(text), cluster)
    >>> peer_error.exit_code, peer_error.text.split(".")[0]
    (144, 'worker 1 at 10')
    """
    text = str(error)
    module = type(error).__module__ or ""
    is_of_tensorflow = module.startswith("tensorflow") or type(error) is RuntimeError
    if cluster is None or not is_of_tensorflow:
        return None
    unlike = [text.find(sign) for sign in _UNLIKE if sign in text]
    if unlike:
        line = text[min(unlike) :].splitlines()[0]
        return PeerError(
            command_line.ERROR,
            "Workers must do the same steps with the same model. "
            f"Received: {line[:_MAX_LENGTH]} "
            "Compare the model, the data and the settings of all workers.",
        )
    if REPORT in text:
        report = text.split(REPORT, 1)[1].split("\n")[0].split(" [type.")[0].strip()
        reported = _REPORTED.search(text)
        who = cluster.name_of(reported[1], int(reported[2])) if reported else "another worker"
        return PeerError(environment.PEER_LOST, f"{who} failed, and this worker with it: {report}")
    others = _find_others(text, cluster)
    is_of_grpc = module.startswith("tensorflow") and _OF_PYTHON not in text
    is_of_grpc &= any(sign in text for sign in _OF_GRPC)
    is_of_peer = bool(others) or bool(_OF_CLUSTER.search(text)) or is_of_grpc
    if not is_of_peer or not any(sign in text for sign in _LOST):
        return None
    # Only the service that looks after the workers, which the first task runs, has no name there.
    service = "another worker" if cluster.is_chief else cluster.name_of(*cluster.tasks[0])
    who = ", ".join(cluster.name_of(*task) for task in others) or service
    return PeerError(environment.PEER_LOST, f"{who} is lost: {_reason(text)}")


def _find_others(text, cluster) -> list[tuple[str, int]]:
    mine = (cluster.task_type, cluster.task_index)
    tasks = [(kind, int(index)) for kind, index in _TASK.findall(text)]
    return list(dict.fromkeys(task for task in tasks if task != mine))


def _reason(text) -> str:
    silent = "it has stopped sending heartbeats (ended, frozen or cut off)"
    reasons = {
        "stopped sending heartbeats": silent,
        "unhealthy": silent,
        "eartbeat": "it no longer answers heartbeats (frozen or cut off)",
        "program has ended": "its program has ended, and this one waits for it",
        "gives no answer": "it no longer answers (frozen or cut off)",
    }
    found = [words for sign, words in reasons.items() if sign in text]
    return f"{found[0] if found else 'its connection has closed'}. Start all workers again."
