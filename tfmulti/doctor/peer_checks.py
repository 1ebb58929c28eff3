"""Judges what a worker has found at the others: whether each can be reached, and they are alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tfmulti.cluster import Cluster
from tfmulti.cluster.network import split_address
from tfmulti.doctor.peers import Visit, describe_worker, visit_all
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.hardware.gpus import Gpu
from tfmulti.rendezvous.errors import RendezvousError, check_equal, name_worker
from tfmulti.runtime import console
from tfmulti.runtime.memory import show_size

_MAY_DIFFER = ("host", "gpus")
_LATE_S = 1.0
_FAR_S = 5e-3
_SLOW_BYTES_PER_S = 50e6
_SKEW, _GPUS = "clocks of the workers", "GPUs of the workers"


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
        found = visit_all(cluster, notes, timeout_s, environ)
    except RendezvousError as error:
        hint = "See who holds the port with `ss -ltnp`: an earlier run?"
        text = f"nobody can come in: {error.__cause__ or error}"
        return [Check(name, FAILURE, text, hint)], False
    checks = [judge_visit(cluster, visit, found.came, timeout_s) for visit in found.visits]
    checks += judge_twice(cluster, found.twice)
    said = {visit.index: visit.notes for visit in found.visits if visit.notes is not None}
    checks += [judge_clocks(cluster, found.visits), *compare(cluster, said, notes)]
    return checks, len(said) == len(found.visits) == len(found.came)


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
        text += f", {show_size(found.bytes_per_s)}/s to it"
    same = split_address(cluster.address)[0] == split_address(name.rpartition(" ")[2])[0]
    text += " (on this host)" if same else f" (host {found.notes.get('host')})"
    if found.index not in came:
        hint = "Look at its own doctor: can it reach this worker's port, or is a firewall between?"
        return Check(name, FAILURE, f"{text}; but it has not come to this worker", hint)
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


def judge_twice(cluster: Cluster, twice: Mapping[int, set[str]]) -> list[Check]:
    """Names the tasks that several workers have; none where each has its own."""
    checks = []
    for index, machines in twice.items():
        text = f"{' and '.join(sorted(machines))} both say they are {name_worker(cluster, index)}"
        hint = "Give each worker another `index` in the `task` of its TF_CONFIG."
        checks.append(Check("tasks", FAILURE, text, hint))
    return checks


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
        text = f"{console.count(len(everyone), noun)} have the same of {', '.join(alike)}"
        checks = [Check(versions, OK, text)]
    except RendezvousError as error:
        hint = "Install the same versions on every worker, and start all the same way."
        checks = [Check(versions, FAILURE, str(error), hint)]
    return [*checks, _compare_gpus(cluster, everyone)]


def _compare_gpus(cluster, everyone) -> Check:
    # With parameter servers workers alone compute.
    told = {
        index: ", ".join(each["gpus"]) or "none"
        for index, each in sorted(everyone.items())
        if not cluster.has_servers or cluster.tasks[index][0] == "worker"
    }
    if len(set(told.values())) <= 1:
        text = f"the same on all: {next(iter(told.values()))}" if told else "no worker answers"
        return Check(_GPUS, OK if told else UNKNOWN, text)
    text = "; ".join(f"{name_worker(cluster, index)}: {names}" for index, names in told.items())
    hint = "The slowest GPU sets the pace for all."
    if cluster.has_servers:
        hint = "Workers with slower GPUs take fewer steps; with max_staleness=0 all wait for them."
    return Check(_GPUS, WARNING, text, hint)
