"""Reports the error of a failed worker to the others, which then name that worker."""

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
    """Reports this worker's error to all workers, so that they need not wait for a timeout."""
    cause = " ".join(command_line.cause_of(error).split())
    task = f"/job:{cluster.task_type}/replica:0/task:{cluster.task_index}"
    keras_compat.report_error(f"{peer_errors.REPORT}{cause}"[:_REPORT_LENGTH], task)


def end_worker(error: BaseException, cluster: Cluster | None) -> peer_errors.PeerError | None:
    """Finds out whether another worker caused an error; if not, reports it to the others.

    Returns:
        The peer error, with its text and exit code, or None for a local error.
    """
    peer_error = peer_errors.find_peer_error(error, cluster)
    if cluster is not None and cluster.num_workers > 1:
        if peer_error is None or peer_error.exit_code == peer_errors.ERROR:
            tell_others(error, cluster)
            if cluster.is_chief:
                # The service ends with the chief; workers that wait for MPI poll it.
                time.sleep(_HEARD_S)
    return peer_error


def watch_uncaught(cluster: Cluster) -> None:
    """Reports uncaught errors to the other workers and exits with a code for the launcher.

    An error that another worker caused gives exit code 144 and a message with its name.
    """
    previous = sys.excepthook

    def hook(kind, error, traceback):
        peer_error = end_worker(error, cluster) if isinstance(error, Exception) else None
        previous(kind, error, traceback)
        if peer_error is not None:
            print(f"error: {peer_error.text}", file=sys.stderr)
        if hasattr(sys, "ps1") and peer_error is None:
            # An interactive session continues.
            return
        own = peer_errors.ERROR if isinstance(error, Exception) else command_line.INTERRUPTED
        command_line.end_process(own if peer_error is None else peer_error.exit_code)

    sys.excepthook = hook
