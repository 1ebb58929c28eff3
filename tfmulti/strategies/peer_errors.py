"""A worker that fails tells the others why; one that lost another says whom."""

from __future__ import annotations

import sys
import time

from tfmulti import keras_compat
from tfmulti.cluster import peer_errors
from tfmulti.cluster.task import Cluster
from tfmulti.runtime import command_line

_REPORT_LENGTH = 1_000
_HEARD_S = 1.0


def tell_others(error: BaseException, cluster: Cluster) -> None:
    """Tells all workers that this one fails, so that they need not wait for its silence."""
    cause = " ".join(command_line.cause_of(error).split())
    task = f"/job:{cluster.task_type}/replica:0/task:{cluster.task_index}"
    keras_compat.report_error(f"{peer_errors.REPORT}{cause}"[:_REPORT_LENGTH], task)


def end_worker(error: BaseException, cluster: Cluster | None) -> peer_errors.PeerError | None:
    """Finds out whether an error came from another worker; if not, tells the others of it.

    Returns:
        What to tell people and the exit code, or None for an error of this worker's own.
    """
    ending = peer_errors.find_peer_error(error, cluster)
    if cluster is not None and cluster.num_workers > 1:
        if ending is None or ending.exit_code == peer_errors.ERROR:
            tell_others(error, cluster)
            if cluster.is_chief:
                # The service ends with it; who waits for MPI looks there now and then.
                time.sleep(_HEARD_S)
    return ending


def watch_uncaught(cluster: Cluster) -> None:
    """Has errors that nobody catches end this worker so that others and a launcher know why.

    One that came from another worker ends it with exit code 144 and that worker's name.
    """
    previous = sys.excepthook

    def hook(kind, error, traceback):
        ending = end_worker(error, cluster) if isinstance(error, Exception) else None
        previous(kind, error, traceback)
        if ending is not None:
            print(f"error: {ending.text}", file=sys.stderr)
        if hasattr(sys, "ps1") and ending is None:
            # Somebody types.
            return
        own = peer_errors.ERROR if isinstance(error, Exception) else command_line.INTERRUPTED
        command_line.leave(own if ending is None else ending.exit_code)

    sys.excepthook = hook
