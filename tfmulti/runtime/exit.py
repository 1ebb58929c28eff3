"""The end of a process: without waiting for what never ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

# How names of this package's threads begin.
OWN_THREADS = "tfmulti"
_THREADS_S = 5.0


def leave(exit_code: int) -> NoReturn:
    """Ends the process, without Python taking itself apart first.

    A thread of TensorFlow's data pipeline that calls Python stops for ever when that has begun,
    and whoever destroys the pipeline waits for it. Exit functions are called, and threads waited
    for: those of this package until they are done, others for some seconds.
    """
    wait_for_threads()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def wait_for_threads() -> None:
    """Waits for this package's threads until they are done, for others some seconds."""
    until = time.monotonic() + _THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            ours = thread.name.startswith(OWN_THREADS)
            thread.join(None if ours else max(0.0, until - time.monotonic()))


def leave_at_exit(exit_code: int) -> None:
    """Has the process end by `leave` when Python comes to its end."""

    def end():
        atexit.unregister(end)
        leave(exit_code)

    atexit.register(end)
