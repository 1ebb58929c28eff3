"""Ends a process without waiting for threads that never end."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import NoReturn

# The prefix of the names of this package's threads.
OWN_THREADS = "tfmulti"
_THREADS_S = 5.0


def end_process(exit_code: int) -> NoReturn:
    """Ends the process without Python's own shutdown.

    During Python's shutdown a thread of TensorFlow's data pipeline that calls Python blocks
    forever, and the destructor of the pipeline waits for it. This function runs the exit
    handlers, and waits for threads: for those of this package until they are done, for others
    some seconds.
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


def end_process_at_exit(exit_code: int) -> None:
    """Makes the process end through `end_process` when Python exits."""

    def end():
        atexit.unregister(end)
        end_process(exit_code)

    atexit.register(end)
