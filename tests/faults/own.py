"""Faults of a user's own script."""

from __future__ import annotations

import time
from pathlib import Path

from faults.workers import expect, started
from tfmulti import processes


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
