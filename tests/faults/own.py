"""Faults of a user's own script."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from faults.workers import NOTICE_S, expect, started
from tfmulti.runtime import processes


def script(fault, codes, words):
    """Two workers run the script; the chief's output must have the words."""

    def scenario(folder: Path):
        began = time.monotonic()
        commands = [["own_script", fault, folder]] * 2
        with started(commands, folder, processes.tf_configs(2), ((), ())) as workers:
            ended = [worker.wait() for worker in workers]
            texts = [worker.text for worker in workers]
        expect(ended == codes and words in texts[0], ended, *texts)
        last = [line for line in texts[0].splitlines() if words in line][-1]
        return time.monotonic() - began, f"exits {ended}: {last}"

    return scenario


def frozen_before_the_model(folder: Path):
    """The chief freezes while the other waits for it to build the model too."""
    commands = [["own_script", "chief freezes", folder]] * 2
    with started(commands, folder, processes.tf_configs(2), ((), ())) as workers:
        workers[0].wait_for("the chief waits")
        workers[1].wait_for("builds the model")
        began = time.monotonic()
        workers[0].signal(signal.SIGSTOP)
        code = workers[1].wait()
        seconds = time.monotonic() - began
        error = workers[1].error
    expect(code == 144 and "worker 0 at" in error and seconds < NOTICE_S, code, seconds, error)
    return seconds, f"exit 144: {error}"
