"""The network between two workers goes."""

from __future__ import annotations

import time
from pathlib import Path

from faults.network import cable
from faults.workers import HEALTHY, NOTICE_S, RUN, expect, two_workers


def down_for_ever(folder: Path):
    """The network between the workers goes and does not come back."""
    with cable() as link:
        if link is None:
            return None
        where = {"configs": link.configs, "prefixes": link.prefixes}
        with two_workers(folder, *HEALTHY, **where) as workers:
            workers[0].wait_for("Epoch 3/")
            began = time.monotonic()
            link.set("down")
            codes = [worker.wait() for worker in workers]
            seconds = time.monotonic() - began
            errors = [worker.error for worker in workers]
    expect(codes == [144, 144] and seconds < NOTICE_S, codes, seconds, *errors)
    expect("worker 1 at" in errors[0] and "worker 0 at" in errors[1], *errors)
    return seconds, f"exits {codes}: {errors[0]}"


def down_for_a_while(folder: Path):
    """The network between the workers goes for three seconds."""
    longer = (*RUN[:-1], "30", "--optimizer", "sgd", "--workdir")
    with cable() as link:
        if link is None:
            return None
        with two_workers(folder / "whole", *longer, folder / "whole") as workers:
            expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
            expected = workers[0].digest
        where = {"configs": link.configs, "prefixes": link.prefixes}
        with two_workers(folder / "cut", *longer, folder / "cut", **where) as workers:
            workers[0].wait_for("Epoch 3/")
            link.set("down")
            time.sleep(3)
            expect(workers[0].process.poll() is None, workers[0].text)
            link.set("up")
            began = time.monotonic()
            expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
            seconds = time.monotonic() - began
            expect(workers[0].digest == workers[1].digest == expected, workers[0].text)
    return seconds, "went on by itself: same weights, bit for bit"
