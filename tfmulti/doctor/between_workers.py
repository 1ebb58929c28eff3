"""Visits all workers of the cluster, and judges whether each can be reached, and they are alike.

Each connects to each, and asks for its settings. There is a rendezvous at the address of every
worker, not of the first one only: two workers may be unable to connect although both reach the
first, or the first may be missing. After each, the clients measure their connection to that worker,
which the rendezvous before training does not do; this module has the messages for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import random
import socket
import time
from collections.abc import Mapping, Sequence

from tfmulti import rendezvous
from tfmulti.cluster import Cluster, environment
from tfmulti.cluster.network import split_address
from tfmulti.doctor.packages import version_of
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.hardware.gpus import Gpu
from tfmulti.rendezvous.client import Client
from tfmulti.rendezvous.errors import RendezvousError, check_equal, describe_fault, name_worker
from tfmulti.rendezvous.messages import MessageError, digest_cluster, find_token, read_line
from tfmulti.rendezvous.server import Server
from tfmulti.runtime import console
from tfmulti.runtime.memory import show_size

LOAD_S, ALL_LOADS_S, MEASURING_S = 0.5, 20.0, 60.0
"""Seconds to measure one speed, all speeds of a worker, and all with the waits for a turn."""

_ALIKE = ("tfmulti", "tensorflow", "keras", "numpy", "nvidia-nccl-cu12")
_TURN, _GO, _BUSY, _PING, _DONE = b"turn\n", b"go\n", b"busy\n", b"ping\n", b"done\n"
_STALL_S = 10.0
_PINGS = 20
_CHUNK = bytes(1 << 20)
_FIRST_LOAD, _MAX_LOAD = 1 << 20, 1 << 30
_REST_S = (0.01, 0.1)


def describe_worker(
    cluster: Cluster, gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ
) -> dict:
    """Returns the description of this worker for the others: settings that must agree, and more."""
    return {
        "cluster": {kind: list(each) for kind, each in cluster.spec.items()},
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: version_of(name) or "not installed" for name in _ALIKE},
        "KERAS_BACKEND": environ.get("KERAS_BACKEND", "tensorflow"),
        "host": socket.gethostname(),
        "gpus": [gpu.name for gpu in gpus],
    }


@dataclasses.dataclass
class Visit:
    """The results of connecting to another worker.

    Attributes:
        index: Its position in `cluster.tasks`.
        came: Whether it has connected to this worker.
        notes: Its description of itself; None if it could not be reached.
        round_trip_s: Seconds from a question to its answer, the shortest of several.
        ahead_s: Seconds that its clock is ahead of this worker's.
        bytes_per_s: Speed of sending to it, over one connection.
        fault: Why a value is missing.
        refused: Whether it has refused this worker.
        has_no_address: Whether its name cannot be resolved here.
    """

    index: int
    came: bool = False
    notes: dict | None = None
    round_trip_s: float | None = None
    ahead_s: float | None = None
    bytes_per_s: float | None = None
    fault: str = ""
    refused: bool = False
    has_no_address: bool = False


class _Visitor:
    """Serves at one worker's address, and visits all others; each measures alone."""

    def __init__(self, cluster, notes, token, timeout_s):
        self._cluster, self._notes, self._token = cluster, notes, token
        self._timeout_s, self._turn = timeout_s, asyncio.Lock()
        others = [index for index in range(cluster.num_workers) if index != cluster.worker_index]
        self._load_s = min(LOAD_S, ALL_LOADS_S / (2 * len(others)))
        self._visits = [Visit(index) for index in others]
        self._server = Server(cluster, notes, token, timeout_s, self._answer, MEASURING_S)

    async def visit_all(self) -> tuple[list[Visit], dict[int, set[str]]]:
        serving = self._server.serve()
        outcomes = await asyncio.gather(serving, *(self._visit(found) for found in self._visits))
        twice: dict[int, set[str]] = {}
        for outcome in outcomes:
            if "twice" in outcome:
                twice.setdefault(outcome["twice"], set()).update(outcome["machines"])
        for visit in self._visits:
            visit.came = visit.index in outcomes[0]["settings"]
        return self._visits, twice

    async def _visit(self, found) -> dict:
        async def measure(reader, writer):
            try:
                await asyncio.wait_for(self._measure(found, reader, writer), MEASURING_S)
            except asyncio.TimeoutError:
                found.fault = "its speed could not be measured in time"
            except (OSError, EOFError, MessageError, ValueError) as error:
                found.fault = f"while its speed was measured: {describe_fault(error)}"

        own = self._cluster, self._notes, self._token, self._timeout_s
        client = Client(*own, found.index, measure)
        try:
            outcome = await client.join()
        except RendezvousError as error:
            found.refused, found.fault = True, str(error)
            self._server.give_up(found.index)
            return {}
        found.notes = outcome.get("settings", {}).get(str(found.index))
        if found.notes is None and client.fault is not None:
            found.fault = describe_fault(client.fault)
            is_unknown = isinstance(client.fault, (socket.gaierror, UnicodeError))
            found.has_no_address = is_unknown and not self._cluster.names_come_late
        return outcome

    async def _measure(self, found, reader, writer):
        while True:
            async with self._turn:
                writer.write(_TURN)
                if await read_line(reader) == _GO:
                    return await _in_thread(writer, _ask, found, self._load_s)
            # Random delays, so that two workers do not retry at the same time forever.
            await asyncio.sleep(random.uniform(*_REST_S))

    async def _answer(self, reader, writer):
        while await read_line(reader) == _TURN:
            if self._turn.locked():
                writer.write(_BUSY)
                continue
            async with self._turn:
                return await _in_thread(writer, _answer_questions)


async def _in_thread(writer, function, *arguments):
    """Hands a connection to blocking code: else asyncio, not the network, would set the speed."""
    writer.transport.pause_reading()
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
        connection.settimeout(_STALL_S)
        await asyncio.to_thread(function, connection, *arguments)


def _ask(connection, found, load_s):
    with connection.makefile("rb") as reader:
        for _ in range(_PINGS):
            wall, began = time.time(), time.perf_counter()
            connection.sendall(_PING)
            line = reader.readline(64)
            seconds = time.perf_counter() - began
            if found.round_trip_s is None or seconds < found.round_trip_s:
                found.round_trip_s = seconds
                # The clock is read in the middle of the shortest round trip, as NTP does.
                found.ahead_s = float(line) - (wall + seconds / 2)
        size = _FIRST_LOAD
        for _ in range(2):
            found.bytes_per_s = size / _send(connection, reader, size)
            size = int(min(max(found.bytes_per_s * load_s, _FIRST_LOAD), _MAX_LOAD))


def _send(connection, reader, size) -> float:
    """Returns the seconds that sending takes."""
    connection.sendall(b"load %d\n" % size)
    began = time.perf_counter()
    for start in range(0, size, len(_CHUNK)):
        connection.sendall(memoryview(_CHUNK)[: size - start])
    if not reader.readline(64):
        raise EOFError
    return time.perf_counter() - began


def _answer_questions(connection):
    """Answers until the other side ends the connection."""
    chunk = memoryview(bytearray(len(_CHUNK)))
    connection.sendall(_GO)
    with connection.makefile("rb") as reader:
        while line := reader.readline(64):
            if line == _PING:
                connection.sendall(b"%.9f\n" % time.time())
                continue
            left = int(line.removeprefix(b"load "))
            while left > 0:
                count = reader.readinto(chunk[: min(left, len(chunk))])
                if not count:
                    raise EOFError
                left -= count
            connection.sendall(_DONE)


def visit_all(
    cluster: Cluster, notes: dict, timeout_s: float, environ: Mapping[str, str] = os.environ
) -> tuple[list[Visit], dict[int, set[str]]]:
    """Connects to all other workers, and serves them, until all have connected.

    Args:
        cluster: The cluster, seen from this worker.
        notes: The description for the others, as from `describe_worker`.
        timeout_s: Seconds that all have to connect.
        environ: The environment, with the token.

    Returns:
        What was found at each other worker; and by position the machines of the workers that claim
        the same task.

    Raises:
        RendezvousError: If it cannot listen at this worker's address.
    """
    # Another check reports whether a token is given.
    secret = environ.get(environment.TOKEN)
    token = find_token(cluster, secret or digest_cluster(cluster), {})
    token = dataclasses.replace(token, is_given=bool(secret))
    return asyncio.run(_Visitor(cluster, notes, token, timeout_s).visit_all())


def leave_together(cluster: Cluster, timeout_s: float, environ=os.environ) -> None:
    """Waits for all workers, so that a launcher ends none before it has reported."""
    with contextlib.suppress(RendezvousError):
        token = environ.get(environment.TOKEN) or digest_cluster(cluster)
        rendezvous.join(cluster, timeout_s=timeout_s, token=token)


_MAY_DIFFER = ("host", "gpus")
_LATE_S, _FAR_S = 1.0, 5e-3
_SLOW_BYTES_PER_S = 50e6
_SKEW, _GPUS = "clocks of the workers", "GPUs of the workers"


def check_workers(
    cluster: Cluster | None,
    is_asked: bool,
    gpus: Sequence[Gpu],
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
) -> tuple[list[Check], bool]:
    """Visits the other workers, and judges what was found; unknown where that is not asked for.

    Returns:
        The checks, and whether all workers have met.
    """
    name = "other workers"
    if cluster is None:
        status = FAILURE if is_asked else UNKNOWN
        hint = "Set TF_CONFIG, or start this with tfmulti.launch." if is_asked else ""
        return [Check(name, status, "no cluster here", hint)], False
    if cluster.num_workers == 1:
        return [Check(name, OK, "none: the cluster has one worker")], False
    if not is_asked:
        hint = "Run it on every worker at the same time, with --cluster."
        return [Check(name, UNKNOWN, f"{cluster.num_workers - 1}, not looked at", hint)], False
    notes = describe_worker(cluster, gpus, environ)
    try:
        visits, twice = visit_all(cluster, notes, timeout_s, environ)
    except RendezvousError as error:
        hint = "See who holds the port with `ss -ltnp`: an earlier run?"
        text = f"no worker can connect to this one: {error.__cause__ or error}"
        return [Check(name, FAILURE, text, hint)], False
    checks = [judge_visit(cluster, visit, timeout_s) for visit in visits]
    checks += judge_twice(cluster, twice)
    others = {visit.index: visit.notes for visit in visits if visit.notes is not None}
    checks += [judge_clocks(cluster, visits), *compare(cluster, others, notes)]
    return checks, all(visit.came and visit.notes is not None for visit in visits)


def judge_visit(cluster: Cluster, found: Visit, timeout_s: float) -> Check:
    """Checks one other worker.

    Args:
        cluster: The cluster.
        found: What was found there.
        timeout_s: Seconds that it had.
    """
    name = name_worker(cluster, found.index)
    if found.notes is None:
        return _missing(name, found, timeout_s)
    text = f"round trip {found.round_trip_s * 1e3:.2f} ms" if found.round_trip_s else "answers"
    if found.bytes_per_s:
        text += f", {show_size(found.bytes_per_s)}/s to it"
    same = split_address(cluster.address)[0] == split_address(name.rpartition(" ")[2])[0]
    text += " (on this host)" if same else f" (host {found.notes.get('host')})"
    if not found.came:
        hint = "Look at its own doctor: can it reach this worker's port, or is a firewall between?"
        return Check(name, FAILURE, f"{text}; but it has not connected to this worker", hint)
    if found.fault:
        hint = "Run the doctor again while nothing else uses the network."
        return Check(name, WARNING, f"{text}; {found.fault}", hint)
    slow = found.bytes_per_s is not None and found.bytes_per_s < _SLOW_BYTES_PER_S
    # Between workers of one host the CPU limits the speed.
    if (slow and not same) or (found.round_trip_s or 0.0) > _FAR_S:
        hint = "Gradients travel this way each step: use a faster network, or NCCL_SOCKET_IFNAME."
        if cluster.has_servers:
            hint = "Weights and gradients travel between workers and servers: use a faster network."
        return Check(name, WARNING, f"{text}: slow", hint)
    return Check(name, OK, text)


def _missing(name, found, timeout_s) -> Check:
    if found.refused:
        hint = "Give all workers the same TFMULTI_TOKEN, or none, and the same `cluster`."
        return Check(name, FAILURE, f"refuses this worker: {found.fault}", hint)
    if found.has_no_address:
        hint = "Correct the name, write the IP address, or ask your network administrator (DNS)."
        return Check(name, FAILURE, f"its name is not found here: {found.fault}", hint)
    text = f"did not answer within {timeout_s:g} s: {found.fault or 'no answer'}"
    if found.came:
        hint = "A firewall on its side? Open its port, for all workers."
        return Check(name, FAILURE, f"{text}; yet it connected to this worker", hint)
    hint = "Start its doctor too, with --cluster; then compare addresses, and look for a firewall."
    return Check(name, FAILURE, text, hint)


def judge_twice(cluster: Cluster, twice: Mapping[int, set[str]]) -> list[Check]:
    """Names the tasks that several workers have; none where each has its own."""
    hint = "Give each worker another `index` in the `task` of its TF_CONFIG."
    texts = [
        f"{' and '.join(sorted(machines))} both say they are {name_worker(cluster, index)}"
        for index, machines in twice.items()
    ]
    return [Check("tasks", FAILURE, text, hint) for text in texts]


def judge_clocks(cluster: Cluster, visits: Sequence[Visit]) -> Check:
    """Looks for clocks that differ by more than a second."""
    known = [found for found in visits if found.ahead_s is not None]
    if not known:
        return Check(_SKEW, UNKNOWN, "no other worker could be asked")
    most = max(known, key=lambda found: abs(found.ahead_s))
    way = "ahead of" if most.ahead_s > 0 else "behind"
    who = name_worker(cluster, most.index)
    text = f"{who} is {abs(most.ahead_s) * 1e3:.1f} ms {way} this one: no worker differs more"
    if abs(most.ahead_s) > _LATE_S:
        hint = "Synchronize clocks with NTP or chrony: the times in logs and of files do not agree."
        return Check(_SKEW, WARNING, text, hint)
    return Check(_SKEW, OK, text)


def compare(cluster: Cluster, said: Mapping[int, dict], notes: dict) -> list[Check]:
    """Compares the descriptions of the workers.

    Args:
        cluster: The cluster.
        said: What others say, by their position in `cluster.tasks`.
        notes: What this one says.
    """
    versions = "versions of the workers"
    if not said:
        text = "no other worker could be asked"
        return [Check(versions, UNKNOWN, text), Check(_GPUS, UNKNOWN, text)]
    everyone = {cluster.worker_index: notes, **said}
    try:
        alike = [name for name in notes if name not in _MAY_DIFFER]
        check_equal(
            cluster,
            {who: {name: said[name] for name in alike} for who, said in everyone.items()},
        )
        noun = "task" if cluster.has_servers else "worker"
        text = f"{console.count(len(everyone), noun)} agree on {', '.join(alike)}"
        checks = [Check(versions, OK, text)]
    except RendezvousError as error:
        hint = "Install the same versions on every worker, and start all the same way."
        checks = [Check(versions, FAILURE, str(error), hint)]
    return [*checks, _compare_gpus(cluster, everyone)]


def _compare_gpus(cluster, everyone) -> Check:
    # With parameter servers workers alone compute.
    gpus_of = {
        index: ", ".join(each["gpus"]) or "none"
        for index, each in sorted(everyone.items())
        if not cluster.has_servers or cluster.tasks[index][0] == "worker"
    }
    if len(set(gpus_of.values())) <= 1:
        text = (
            f"the same on all: {next(iter(gpus_of.values()))}" if gpus_of else "no worker answers"
        )
        return Check(_GPUS, OK if gpus_of else UNKNOWN, text)
    text = "; ".join(f"{name_worker(cluster, index)}: {names}" for index, names in gpus_of.items())
    hint = "The slowest GPU sets the pace for all."
    if cluster.has_servers:
        hint = "Workers with slower GPUs take fewer steps; with max_staleness=0 all wait for them."
    return Check(_GPUS, WARNING, text, hint)
