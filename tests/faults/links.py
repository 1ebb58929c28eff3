"""The network between two workers goes."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import network
from faults.network import configs_of, listening_ports, namespace
from faults.random_kills import find_worker
from faults.workers import HEALTHY, NOTICE_S, RUN, expect, one_process, two_workers


def down_for_ever(folder: Path):
    """The network between the workers goes and does not come back."""
    with network.link() as link:
        if link is None:
            return None
        where = {"configs": configs_of(link), "prefixes": link.prefixes}
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
    with network.link() as link:
        if link is None:
            return None
        with two_workers(folder / "whole", *longer, folder / "whole") as workers:
            expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
            expected = workers[0].digest
        where = {"configs": configs_of(link), "prefixes": link.prefixes}
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


def strangers_kept_out(folder: Path):
    """A job in a network namespace of its own, as the README has it."""
    train = (sys.executable, "-m", "tfmulti.train", "--strategy", "multi_worker", *HEALTHY)
    command = ("tfmulti.launch", "--num_workers", "2", "--", *train, "--workdir", folder)
    with namespace() as name:
        if name is None:
            return None
        inside = ("ip", "netns", "exec", name)
        with one_process(folder, *command, prefix=inside) as launcher:
            launcher.wait_for("Epoch 3/")
            ports = listening_ports(find_worker(folder, 1))
            expect(len(ports) >= 2, ports)
            for port in ports:
                code = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
                subprocess.run([*inside, sys.executable, "-c", code], check=True)
                expect(not answers(port), f"port {port} answers a stranger")
    return 0.0, f"{len(ports)} ports answer within the namespace, none outside of it"


def answers(port: int) -> bool:
    """Whether somebody listens on a port here."""
    with socket.socket() as stranger:
        return stranger.connect_ex(("127.0.0.1", port)) == 0
