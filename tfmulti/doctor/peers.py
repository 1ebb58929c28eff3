"""Checks all workers of the cluster: each connects to each, and compares settings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from tfmulti.cluster import Cluster, environment
from tfmulti.cluster.network import split_address
from tfmulti.doctor.nvidia import Gpu
from tfmulti.doctor.peer_listener import Listener, Round
from tfmulti.doctor.peer_visit import Visit, Visitor
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, megabytes, plural
from tfmulti.rendezvous.errors import RendezvousError, check_alike, name_worker
from tfmulti.rendezvous.messages import digest_cluster, find_token

LOAD_S, ALL_LOADS_S = 0.5, 20.0
"""Seconds to measure one speed, and all speeds of a worker."""

_ALIKE = ("tfmulti", "tensorflow", "keras", "numpy", "nvidia-nccl-cu12")
_LATE_S = 1.0
_FAR_S = 5e-3
_SLOW_BYTES_PER_S = 50e6
_SKEW = "clocks of the workers"


def describe_worker(
    cluster: Cluster, gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ
) -> dict:
    """Returns the description of this worker for the others: settings that must agree, and more."""
    alike = {"cluster": {kind: list(each) for kind, each in cluster.spec.items()}}
    alike["python"] = ".".join(platform.python_version_tuple()[:2])
    for name in _ALIKE:
        try:
            alike[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            alike[name] = "not installed"
    alike["KERAS_BACKEND"] = environ.get("KERAS_BACKEND", "tensorflow")
    return {"alike": alike, "host": socket.gethostname(), "gpus": [gpu.name for gpu in gpus]}


def visit_all(
    cluster: Cluster,
    notes: dict,
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
    measures: bool = True,
) -> tuple[list[Visit], Listener]:
    """Visits all other workers, and lets them visit this one, until all are done.

    Args:
        cluster: The cluster, seen from this worker.
        notes: What the others are told.
        timeout_s: Seconds that all have for everything.
        environ: The environment, with the token.
        measures: Whether speeds are measured.

    Returns:
        What was found at each other worker, and who has come to this one.

    Raises:
        RendezvousError: If it cannot listen at this worker's address.
    """
    # Another check reports whether a token is given.
    secret = environ.get(environment.TOKEN)
    token = find_token(cluster, secret or digest_cluster(cluster), {})
    if not secret:
        token = type(token)(token.secret, False)
    others = [index for index in range(cluster.num_workers) if index != cluster.worker_index]
    load_s = min(LOAD_S, ALL_LOADS_S / (2 * len(others))) if measures else 0.0
    name = "measure" if measures else "leave"
    round_ = Round(name, cluster, token, time.monotonic() + timeout_s, load_s)
    visits, visitor = [Visit(index) for index in others], Visitor(round_)
    with Listener(round_, notes) as listener:
        threads = [
            threading.Thread(target=visitor.visit, args=(found,), daemon=True) for found in visits
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(round_.left_s)
        refused = {found.index for found in visits if found.refused}

        def is_over():
            # A worker that refuses this one is admitted once, so that it reports that too.
            done = listener.left | (refused & listener.turned_away)
            return listener.twice or not set(others) - done

        with listener.changed:
            listener.changed.wait_for(is_over, round_.left_s)
    return visits, listener


def check_peers(
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
        visits, listener = visit_all(cluster, notes, timeout_s, environ)
    except RendezvousError as error:
        hint = "See who holds the port with `ss -ltnp`: an earlier run?"
        text = f"nobody can come in: {error.__cause__ or error}"
        return [Check(name, FAILURE, text, hint)], False
    checks = [judge_visit(cluster, found, listener.came, timeout_s) for found in visits]
    for index, machines in listener.twice.items():
        text = f"{' and '.join(sorted(machines))} both say they are {name_worker(cluster, index)}"
        hint = "Give each worker another `index` in the `task` of its TF_CONFIG."
        checks.append(Check("tasks", FAILURE, text, hint))
    said = {found.index: found.notes for found in visits if found.notes is not None}
    checks += [judge_clocks(cluster, visits), *compare(cluster, said, notes)]
    return checks, len(said) == len(visits) == len(listener.came)


def leave_together(cluster: Cluster, timeout_s: float, environ=os.environ) -> None:
    """Waits for all workers, so that a launcher ends none before it has reported."""
    with contextlib.suppress(RendezvousError):
        visit_all(cluster, {}, timeout_s, environ, measures=False)


def judge_visit(cluster: Cluster, found: Visit, came: set[int], timeout_s: float) -> Check:
    """Checks one other worker.

    Args:
        cluster: The cluster.
        found: What was found there.
        came: The workers that have come to this one.
        timeout_s: Seconds that it had.
    """
    name = name_worker(cluster, found.index)
    if found.notes is None:
        return _missing(name, found, found.index in came, timeout_s)
    text = f"round trip {found.round_trip_s * 1e3:.2f} ms" if found.round_trip_s else "answers"
    if found.bytes_per_s:
        text += f", {megabytes(found.bytes_per_s)}/s to it"
    same = split_address(cluster.address)[0] == split_address(name.rpartition(" ")[2])[0]
    text += " (on this host)" if same else f" (host {found.notes.get('host')})"
    if found.index not in came:
        hint = "Look at its own doctor: can it reach this worker's port, or is a firewall between?"
        return Check(name, FAILURE, f"{text}; but it has not come to this worker", hint)
    if found.fault:
        return Check(name, WARNING, f"{text}; {found.fault}", "Give it longer: --start_timeout.")
    slow = found.bytes_per_s is not None and found.bytes_per_s < _SLOW_BYTES_PER_S
    # Between workers of one host the CPU limits the speed.
    if (slow and not same) or (found.round_trip_s or 0.0) > _FAR_S:
        hint = "Gradients travel this way each step: use a faster network, or NCCL_SOCKET_IFNAME."
        return Check(name, WARNING, f"{text}: slow", hint)
    return Check(name, OK, text)


def _missing(name, found, came, timeout_s) -> Check:
    if found.refused:
        hint = "Give all workers the same TFMULTI_TOKEN, or none, and the same `cluster`."
        return Check(name, FAILURE, f"refuses this worker: {found.fault}", hint)
    if found.has_no_address:
        hint = "Correct the name, write the IP address, or ask who keeps the names (DNS)."
        return Check(name, FAILURE, f"its name is not found here: {found.fault}", hint)
    text = f"did not answer within {timeout_s:g} s: {found.fault or 'no answer'}"
    if came:
        hint = "A firewall on its side? Open its port, for all workers."
        return Check(name, FAILURE, f"{text}; yet it came to this worker", hint)
    hint = "Start its doctor too, with --cluster; then compare addresses, and look for a firewall."
    return Check(name, FAILURE, text, hint)


def judge_clocks(cluster: Cluster, visits: Sequence[Visit]) -> Check:
    """Looks for clocks that differ by more than a second."""
    known = [found for found in visits if found.ahead_s is not None]
    if not known:
        return Check(_SKEW, UNKNOWN, "no other worker could be asked")
    most = max(known, key=lambda found: abs(found.ahead_s))
    way = "ahead of" if most.ahead_s > 0 else "behind"
    who = name_worker(cluster, most.index)
    text = f"{who} is {abs(most.ahead_s) * 1e3:.1f} ms {way} this one: nobody more"
    if abs(most.ahead_s) > _LATE_S:
        hint = "Let NTP or chrony set the clocks: logs and the times of files are in no order."
        return Check(_SKEW, WARNING, text, hint)
    return Check(_SKEW, OK, text)


def compare(cluster: Cluster, said: Mapping[int, dict], notes: dict) -> list[Check]:
    """Compares the descriptions of the workers.

    Args:
        cluster: The cluster.
        said: What others say, by their position in `cluster.tasks`.
        notes: What this one says.
    """
    versions, gpus = "versions of the workers", "GPUs of the workers"
    if not said:
        text = "no other worker could be asked"
        return [Check(versions, UNKNOWN, text), Check(gpus, UNKNOWN, text)]
    everyone = {cluster.worker_index: notes, **said}
    try:
        check_alike(cluster, {index: each["alike"] for index, each in everyone.items()})
        text = f"{plural(len(everyone), 'worker')} have the same of {', '.join(notes['alike'])}"
        checks = [Check(versions, OK, text)]
    except RendezvousError as error:
        hint = "Install the same versions on every worker, and start all the same way."
        checks = [Check(versions, FAILURE, str(error), hint)]
    told = {index: ", ".join(each["gpus"]) or "none" for index, each in sorted(everyone.items())}
    if len(set(told.values())) == 1:
        return [*checks, Check(gpus, OK, f"the same on all: {told[cluster.worker_index]}")]
    text = "; ".join(f"{name_worker(cluster, index)}: {names}" for index, names in told.items())
    hint = "The slowest GPU sets the pace for all."
    return [*checks, Check(gpus, WARNING, text, hint)]
