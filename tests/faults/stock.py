"""The same faults put into workers of TensorFlow alone: what is seen within a while."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks import network
from faults.network import configs_of
from faults.workers import started
from tfmulti.runtime import processes

# Twice what tfmulti guarantees, and the start.
WHILE_S = 30
ERROR = re.compile(r"\w+Error: ")


def describe(workers, since, watched=(0, 1), first=0) -> str:
    """What has become of workers, after waiting for them for a while."""
    words = []
    for index, worker in enumerate(workers):
        if index not in watched:
            continue
        try:
            code = worker.process.wait(timeout=max(0.0, since + WHILE_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            words.append(f"worker {first + index} still runs or waits after {WHILE_S} s")
            continue
        lines = [line.strip() for line in worker.text.splitlines() if line.strip()]
        errors = [line for line in lines if ERROR.search(line)]
        said = [*lines, *errors][-1][:150] if lines else "no word"
        words.append(f"worker {first + index} ended with {code} ({said})")
    return "; ".join(words)


def start(folder: Path, fault="", count=2, configs=None, prefixes=((), ())):
    """Starts workers of TensorFlow alone."""
    configs = configs or processes.tf_configs(2)
    command = ["stock_worker", fault]
    return started([command] * count, folder, configs, prefixes)


def hit(number, victim, watched=None):
    """A worker gets a signal in the third epoch; the other is watched, or those named."""

    def scenario(folder: Path):
        with start(folder) as workers:
            workers[0].wait_for("Epoch 3/")
            workers[victim].signal(number)
            return describe(workers, time.monotonic(), watched or [1 - victim])

    return scenario


def alone(index):
    """One worker comes, the other does not."""

    def scenario(folder: Path):
        with start(folder, count=1, configs=[processes.tf_configs(2)[index]]) as workers:
            return describe(workers, time.monotonic(), first=index)

    return scenario


def wrong(fault):
    """Something is wrong with one worker's program."""

    def scenario(folder: Path):
        with start(folder, fault) as workers:
            return describe(workers, time.monotonic())

    return scenario


def port_taken(folder: Path):
    """Somebody else listens on a worker's port."""
    configs = processes.tf_configs(2)
    host, port = json.loads(configs[0])["cluster"]["worker"][0].split(":")
    with socket.create_server((host, int(port))):
        with start(folder, count=1, configs=configs) as workers:
            return describe(workers, time.monotonic())


def link_down(folder: Path):
    """The network between the workers goes and does not come back."""
    with network.link() as link:
        if link is None:
            return None
        with start(folder, configs=configs_of(link), prefixes=link.prefixes) as workers:
            workers[0].wait_for("Epoch 3/")
            link.set("down")
            return describe(workers, time.monotonic())


SCENARIOS = {
    "a worker never comes": alone(0),
    "the chief never comes": alone(1),
    "a worker is killed": hit(signal.SIGKILL, 1),
    "the chief is killed": hit(signal.SIGKILL, 0),
    "a worker is frozen": hit(signal.SIGSTOP, 1),
    "the chief is frozen": hit(signal.SIGSTOP, 0),
    "the link is down for ever": link_down,
    "a port is taken": port_taken,
    "models that differ": wrong("models"),
    "an exception in one pipeline": wrong("exception"),
    "a row that is not a number": wrong("data"),
    "SIGTERM to one worker": hit(signal.SIGTERM, 1, watched=[0, 1]),
}
