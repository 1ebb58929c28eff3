"""Judges whether all workers of the cluster can connect to each other, and are alike."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence

from tfmulti import rendezvous
from tfmulti.cluster import Cluster, environment
from tfmulti.cluster.network import split_address
from tfmulti.doctor.packages import version_of
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.doctor.visits import Visit, visit_all
from tfmulti.hardware.gpus import Gpu
from tfmulti.rendezvous.errors import RendezvousError, check_equal, name_worker
from tfmulti.rendezvous.messages import digest_cluster
from tfmulti.runtime import console
from tfmulti.runtime.memory import show_size

_ALIKE = ("tfmulti", "tensorflow", "keras", "numpy", "nvidia-nccl-cu12")
_MAY_DIFFER = ("host", "gpus")
_LATE_S, _FAR_S = 1.0, 5e-3
_SLOW_BYTES_PER_S = 50e6
_SKEW, _GPUS = "clocks of the workers", "GPUs of the workers"


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


def leave_together(cluster: Cluster, timeout_s: float, environ=os.environ) -> None:
    """Waits for all workers, so that a launcher ends none before it has reported."""
    with contextlib.suppress(RendezvousError):
        token = environ.get(environment.TOKEN) or digest_cluster(cluster)
        rendezvous.join(cluster, timeout_s=timeout_s, token=token)


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
        visits, claims = visit_all(cluster, notes, timeout_s, environ)
    except RendezvousError as error:
        hint = "See who holds the port with `ss -ltnp`: an earlier run?"
        text = f"no worker can connect to this one: {error.__cause__ or error}"
        return [Check(name, FAILURE, text, hint)], False
    checks = [judge_visit(cluster, visit, timeout_s) for visit in visits]
    checks += judge_duplicate_tasks(cluster, claims)
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


def judge_duplicate_tasks(cluster: Cluster, claims: Mapping[int, set[str]]) -> list[Check]:
    """Returns a failed check for each task that several workers claim.

    Args:
        cluster: The cluster.
        claims: The machines that claim each such task, by its position in `cluster.tasks`.
    """
    hint = "Give each worker another `index` in the `task` of its TF_CONFIG."
    texts = [
        f"{' and '.join(sorted(machines))} both say they are {name_worker(cluster, index)}"
        for index, machines in claims.items()
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


def compare(cluster: Cluster, others: Mapping[int, dict], notes: dict) -> list[Check]:
    """Compares the descriptions of the workers.

    Args:
        cluster: The cluster.
        others: The descriptions of the other workers, by their position in `cluster.tasks`.
        notes: The description of this one.
    """
    versions = "versions of the workers"
    if not others:
        text = "no other worker could be asked"
        return [Check(versions, UNKNOWN, text), Check(_GPUS, UNKNOWN, text)]
    everyone = {cluster.worker_index: notes, **others}
    try:
        alike = [name for name in notes if name not in _MAY_DIFFER]
        check_equal(
            cluster,
            {who: {name: each[name] for name in alike} for who, each in everyone.items()},
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
