"""Faults, and what must come of each. A scenario returns what was seen; it raises if wrong."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from faults import links, over_mpi, over_servers, own, random_kills
from faults.workers import (
    BY_THE_CLOCK,
    HEALTHY,
    NOTICE_S,
    RUN,
    SAVING,
    expect,
    one_process,
    two_workers,
    weights,
)
from tfmulti import checkpoint
from tfmulti.runtime import processes

SHARDED, PARAMETERS = ("--shard", "state"), ("--shard", "parameters")


def lost(number, victim, flags=()):
    """A worker is killed or frozen; the other names it and exits 144."""

    def scenario(folder: Path):
        with two_workers(folder, *HEALTHY, *flags) as workers:
            workers[0].wait_for("Epoch 3/")
            began = time.monotonic()
            workers[victim].signal(number)
            code = workers[1 - victim].wait()
            seconds = time.monotonic() - began
            error = workers[1 - victim].error
        expect(code == 144 and f"worker {victim} at" in error, code, error)
        expect(seconds < NOTICE_S, seconds)
        return seconds, f"exit 144: {error}"

    return scenario


def missing(present):
    """One worker never comes; the other names it at the deadline."""

    def scenario(folder: Path):
        configs = processes.tf_configs(2)
        configs = [configs[present]]
        began = time.monotonic()
        flags = ("--start_timeout", "3")
        with two_workers(folder, *HEALTHY, *flags, count=1, configs=configs) as workers:
            code = workers[0].wait()
            error = workers[0].error
        expect(code == 1 and f"worker {1 - present}" in error, code, error)
        return time.monotonic() - began, f"exit 1: {error}"

    return scenario


def fails(words, codes, *flags, each=((), ())):
    """Something is wrong from the start or goes wrong on one worker; all end and say so."""

    def scenario(folder: Path):
        began = time.monotonic()
        with two_workers(folder, *flags, each=each) as workers:
            ended = [worker.wait() for worker in workers]
            errors = [worker.error for worker in workers]
        expect(ended == codes, ended, *errors)
        for error in errors:
            expect(words in error, error)
        return time.monotonic() - began, f"exits {codes}: {errors[0]}"

    return scenario


def unlike(model, *words):
    """Workers build unlike models: both sides' variables are told by name, on both."""

    def scenario(folder: Path):
        began = time.monotonic()
        with two_workers(folder, *RUN[:2], "--model", model) as workers:
            ended = [worker.wait() for worker in workers]
            errors = [worker.error for worker in workers]
        expect(ended == [144, 1], ended, *errors)
        for error in errors:
            expect("same model" in error and all(word in error for word in words), error)
        return time.monotonic() - began, f"exits {ended}: {errors[1]}"

    return scenario


def port_taken(folder: Path):
    """Somebody else listens on a worker's port."""
    configs = processes.tf_configs(2)
    address = json.loads(configs[0])["cluster"]["worker"][0].split(":")
    began = time.monotonic()
    with socket.create_server((address[0], int(address[1]))):
        with two_workers(folder, *HEALTHY, count=1, configs=configs) as workers:
            code, error = workers[0].wait(), workers[0].error
    expect(code == 1 and address[1] in error, code, error)
    return time.monotonic() - began, f"exit 1: {error}"


def uninterrupted(folder: Path, flags=SAVING) -> str:
    """The digest of a run that nothing happens to."""
    with two_workers(folder, *flags, "--workdir", folder / "run") as workers:
        expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
        return workers[0].digest


@functools.cache
def digest_without_faults(flags) -> str:
    """The digest of such a run, for the faults that compare with the same one."""
    with tempfile.TemporaryDirectory() as folder:
        return uninterrupted(Path(folder), flags)


def interrupt(folder: Path, number, victims, flags=SAVING):
    """Signals workers in the third epoch; returns exit codes and seconds to the last end."""
    with two_workers(folder, *flags, "--workdir", folder / "run") as workers:
        workers[0].wait_for("Epoch 3/")
        began = time.monotonic()
        for victim in victims:
            workers[victim].signal(number)
        codes = [worker.wait() for worker in workers]
        return codes, time.monotonic() - began


def resumed(number, victims, codes, flags=SAVING):
    """Workers are told to end, or killed; started again, they end as if nothing had been."""

    def scenario(folder: Path):
        expected = digest_without_faults(flags)
        ended, seconds = interrupt(folder, number, victims, flags)
        expect(ended == codes, ended)
        with two_workers(folder / "again", *flags, "--workdir", folder / "run") as workers:
            expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
            expect("resumed at step" in workers[0].text, workers[0].text)
            expect(workers[0].digest == workers[1].digest == expected, workers[0].text)
        return seconds, f"exits {codes}; resumed: same weights, bit for bit"

    return scenario


def elastic(folder: Path):
    """Begun on two workers, gone on with on three logical CPUs."""
    uninterrupted(folder / "whole")
    _, seconds = interrupt(folder, signal.SIGTERM, [0])
    flags = ("--strategy", "mirrored", "--logical_cpus", "3", "--workdir", folder / "run")
    with one_process(folder / "again", "tfmulti.train", *SAVING, *flags) as process:
        expect(process.wait() == 0 and "resumed at step" in process.text, process.text)
    pairs = zip(weights(folder / "whole" / "run"), weights(folder / "run"), strict=True)
    largest = max(float(np.abs(a - b).max()) for a, b in pairs)
    expect(largest < 1e-5, largest)
    return seconds, f"resumed with 3 replicas after 2: weights differ by {largest:.1e}"


def damaged(folder: Path):
    """The latest checkpoint has a flipped byte."""
    expected = uninterrupted(folder / "whole")
    interrupt(folder, signal.SIGKILL, [0, 1])
    latest, *_ = checkpoint.saved_in(folder / "run" / checkpoint.FOLDER).values()
    file = latest / "values.data-00000-of-00001"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(bytes(data))
    with two_workers(folder / "again", *SAVING, "--workdir", folder / "run") as workers:
        expect([worker.wait() for worker in workers] == [0, 0], workers[0].text)
        expect(f"{latest.name} is damaged" in workers[0].text, workers[0].text)
        expect(workers[0].digest == expected, workers[0].text)
    return 0.0, "told; the generation before it taken: same weights, bit for bit"


def restarted(folder: Path):
    """The launcher starts all again after one was killed."""
    expected = digest_without_faults(SAVING)
    train = (sys.executable, "-m", "tfmulti.train", "--strategy", "multi_worker", *SAVING)
    logs = folder / "logs"
    flags = ("--num_workers", "2", "--max_restarts", "1", "--log_dir", logs)
    command = ("tfmulti.launch", *flags, "--", *train, "--workdir", folder / "run")
    with one_process(folder, *command) as launcher:
        launcher.wait_for("Epoch 3/")
        began = time.monotonic()
        os.kill(random_kills.find_worker(folder / "run", 1), signal.SIGKILL)
        launcher.wait_for("resumed at step")
        seconds = time.monotonic() - began
        expect(launcher.wait() == 0, launcher.text)
        expect(launcher.digest == expected, launcher.text)
    return seconds, "restarted by the launcher: same weights, bit for bit"


def full_disk(folder: Path):
    """There is no more room for a checkpoint, once training has begun."""
    room = folder / "room"
    room.mkdir(parents=True)
    if os.system(f"mount -t tmpfs -o size=4m tmpfs {room} 2>/dev/null"):
        return None
    try:
        flags = (*SAVING, "--strategy", "one_device", "--workdir", room)
        with one_process(folder, "tfmulti.train", *flags) as process:
            process.wait_for("Epoch 1/")
            with contextlib.suppress(OSError), open(room / "others", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            code, text, error = process.wait(), process.text, process.error
    finally:
        os.system(f"umount {room}")
    # The first file that does not fit says it, be it of a checkpoint or another.
    is_named = "file system is full" in error or "No space left on device" in error
    expect(code == 1 and is_named, code, text)
    return 0.0, f"exit 1: {error}"


SCENARIOS = {
    "a worker never comes": missing(0),
    "the chief never comes": missing(1),
    "a worker is killed": lost(signal.SIGKILL, 1),
    "the chief is killed": lost(signal.SIGKILL, 0),
    "a worker is killed, sharded state": lost(signal.SIGKILL, 1, SHARDED),
    "a worker is killed, sharded parameters over the ring": lost(signal.SIGKILL, 1, PARAMETERS),
    "a worker is frozen, sharded parameters over the ring": lost(signal.SIGSTOP, 1, PARAMETERS),
    "a worker is frozen": lost(signal.SIGSTOP, 1),
    "the chief is frozen": lost(signal.SIGSTOP, 0),
    **over_mpi.SCENARIOS,
    **over_servers.SCENARIOS,
    "the link is down for 3 s": links.down_for_a_while,
    "the link is down for ever": links.down_for_ever,
    "a stranger, and a namespace": links.strangers_kept_out,
    "a port is taken": port_taken,
    "settings that differ": fails("seed", [1, 1], *RUN, each=(("--seed", "1"), ("--seed", "2"))),
    "models that differ": unlike("faulty:wider_on_one", "(8, 6)", "(8, 7)"),
    "a model with one more layer": unlike("faulty:deeper_on_one", "dense_2/kernel"),
    "a model with one layer less": unlike("faulty:deeper_on_the_first", "dense_2/kernel"),
    "the chief is frozen before the model": own.frozen_before_the_model,
    "the chief is slow": own.script("chief is slow", [0, 0], "done"),
    "the chief alone evaluates": own.script("chief evaluates", [144, 1], "a call of evaluate"),
    "the chief alone saves": own.script("chief saves", [0, 0], "done"),
    "the chief alone saves, sharded state": own.script("chief saves shards", [0, 0], "done"),
    "a worker ends early": own.script("leaves early", [144, 0], "worker 1 at"),
    "an exception in one pipeline": fails(
        "bad record 300", [144, 1], "--dataset", "faulty:bad_record", "--model", "faulty:dense"
    ),
    "an exception in one callback": own.script("callback fails", [144, 1], "bad callback"),
    "an exception in one step": fails(
        "has had enough", [144, 1], "--dataset", "faulty:healthy", "--model", "faulty:failing"
    ),
    "a row that is not a number": fails(
        "at step", [1, 1], "--dataset", "faulty:not_a_number", "--model", "faulty:dense"
    ),
    "SIGTERM to one worker": resumed(signal.SIGTERM, [1], [143, 143]),
    "SIGTERM to all": resumed(signal.SIGTERM, [0, 1], [143, 143]),
    "all are killed": resumed(signal.SIGKILL, [0, 1], [-9, -9]),
    "all are killed, sharded state": resumed(signal.SIGKILL, [0, 1], [-9, -9], (*SAVING, *SHARDED)),
    "all are killed, saved by the clock": resumed(signal.SIGKILL, [0, 1], [-9, -9], BY_THE_CLOCK),
    "killed under the launcher": restarted,
    "twenty kills at random moments": random_kills.kill_many,
    "resumed on another number of replicas": elastic,
    "a flipped byte in the checkpoint": damaged,
    "a full disk": full_disk,
}
