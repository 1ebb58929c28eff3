"""The doctor and a cluster: its description, its addresses, and visits among real processes."""

import asyncio
import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfmulti.cluster import Cluster, environment
from tfmulti.doctor import between_workers, cluster_settings
from tfmulti.doctor.visits import Visit, visit_all
from tfmulti.rendezvous.client import Client
from tfmulti.rendezvous.messages import find_token
from tfmulti.rendezvous.server import Server
from tfmulti.runtime import processes

QUICK = {"timeout_s": 20.0}


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


def cluster_of(num_workers, index=0, ports=None):
    ports = ports or processes.free_ports(num_workers)
    return Cluster({"worker": [f"127.0.0.1:{port}" for port in ports]}, "worker", index)


def named(checks):
    return {check.name: check for check in checks}


# What one worker can tell alone.


@pytest.mark.parametrize(
    ("tf_config", "words"),
    [
        ("{nope", "must be JSON"),
        ('{"cluster": {"worker": ["a:1", "b"]}}', '`TF_CONFIG["task"]`'),
        (
            '{"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}}',
            '`TF_CONFIG["cluster"]["worker"][1]` must be "host:port", and names no port',
        ),
        (
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
            '`TF_CONFIG["task"]["index"]` must be 0',
        ),
    ],
)
def test_a_broken_tf_config_is_a_failure_that_names_the_place(tf_config, words):
    cluster, check = cluster_settings.read_cluster(None, {"TF_CONFIG": tf_config})
    assert cluster is None
    assert check.status == "failure"
    assert words in check.detail or words == '`TF_CONFIG["task"]`'
    assert check.hint


def test_no_tf_config_is_no_fault():
    cluster, check = cluster_settings.read_cluster(None, {})
    assert (cluster, check.status) == (None, "ok")
    checks = cluster_settings.check_addresses(None, {})
    assert {each.status for each in checks} == {"unknown"}
    [check], met = between_workers.check_workers(None, True, [], 1.0, {})
    assert (check.status, met) == ("failure", False)


def test_a_port_that_somebody_holds_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = cluster_of(1, ports=[server.getsockname()[1]])
        check = cluster_settings.check_own_port(cluster)
        assert check.status == "failure"
        assert 'TF_CONFIG["cluster"]["worker"][0]' in check.detail
        assert "ss -ltnp" in check.hint
    assert cluster_settings.check_own_port(cluster).status == "ok"


def test_addresses_that_cannot_work():
    found = named(cluster_settings.check_addresses(cluster_of(2), {}))
    assert found["secret"].status == "warning"
    assert {each.status for each in found.values()} == {"ok", "warning"}
    token = {environment.TOKEN: "x"}
    found = named(cluster_settings.check_addresses(cluster_of(2), token))
    assert {each.status for each in found.values()} == {"ok"}
    mixed = Cluster({"worker": ["127.0.0.1:1234", "8.8.8.8:1234"]}, "worker", 0)
    assert cluster_settings.check_own_address(mixed).status == "failure"
    assert cluster_settings.check_private(mixed).status == "warning"
    # An address that documentation has for itself (RFC 5737).
    foreign = Cluster({"worker": ["203.0.113.5:1234", "203.0.113.6:1234"]}, "worker", 1)
    check = cluster_settings.check_own_address(foreign)
    assert (check.status, "index" in check.hint) == ("warning", True)
    unknown = Cluster({"worker": ["no-such-host.invalid:1234"]}, "worker", 0)
    check = cluster_settings.check_names(unknown)
    assert check.status == "failure"
    assert "no-such-host.invalid" in check.detail
    assert "check_network" not in check.detail


def test_names_that_come_with_their_hosts_are_no_fault_before():
    spec = {"worker": [f"127.0.0.1:{processes.free_ports(1)[0]}", "no-such-host.invalid:1234"]}
    pod = Cluster(spec, "worker", 0, "Kubernetes", names_come_late=True)
    check = cluster_settings.check_names(pod)
    assert (check.status, "Kubernetes gives" in check.detail) == ("unknown", True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        held = Cluster({"worker": [f"127.0.0.1:{port}"]}, "worker", 0, "Slurm")
        assert "(from Slurm)" in cluster_settings.check_own_port(held).detail


# Visits.


def visit_together(clusters, environs=None, **settings):
    """What each of several workers finds, all in this process."""

    def visit(index):
        threading.current_thread().name = f"visits of {index}"
        said = between_workers.describe_worker(clusters[index], [], {})
        environ = environs[index] if environs else {}
        visits, twice = visit_all(clusters[index], said, environ=environ, **settings)
        return {visit.index: visit for visit in visits}, twice

    with ThreadPoolExecutor(len(clusters)) as threads:
        return dict(zip(clusters, threads.map(visit, clusters)))


@pytest.mark.slow
def test_three_workers_visit_one_another():
    ports = processes.free_ports(3)
    clusters = {index: cluster_of(3, index, ports) for index in range(3)}
    found = visit_together(clusters, **QUICK)
    for index, (visits, twice) in found.items():
        others = {0, 1, 2} - {index}
        assert set(visits) == others
        assert not twice
        for visit in visits.values():
            assert visit.came and visit.fault == ""
            assert 0 < visit.round_trip_s < 1
            assert abs(visit.ahead_s) < 1
            assert visit.bytes_per_s > 1e6
            assert visit.notes["cluster"] == {"worker": list(clusters[0].spec["worker"])}
    # The ports are free again.
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_worker_that_does_not_come_is_named():
    ports = processes.free_ports(3)
    clusters = {index: cluster_of(3, index, ports) for index in range(2)}
    began = time.monotonic()
    found = visit_together(clusters, timeout_s=2.0)
    assert time.monotonic() - began < 20
    visits, _ = found[0]
    missing = between_workers.judge_visit(clusters[0], visits[2], 2.0)
    assert missing.status == "failure"
    assert missing.name == f"worker 2 at 127.0.0.1:{ports[2]}"
    assert "did not answer within 2 s: connection refused" in missing.detail
    there = between_workers.judge_visit(clusters[0], visits[1], 2.0)
    assert there.status == "ok"


@pytest.mark.slow
def test_a_name_that_cannot_be_one_is_told():
    spec = {"worker": [f"127.0.0.1:{processes.free_ports(1)[0]}", "a..b:12345"]}
    visits, _ = visit_together({0: Cluster(spec, "worker", 0)}, timeout_s=3.0)[0]
    missing = between_workers.judge_visit(Cluster(spec, "worker", 0), visits[1], 3.0)
    assert missing.status == "failure"
    assert missing.detail.startswith("its name is not found here: ")
    own = cluster_settings.check_own_address(Cluster(spec, "worker", 1))
    assert (own.status, "a..b has no address" in own.detail) == ("unknown", True)


@pytest.mark.slow
def test_a_name_that_is_not_found_is_told_by_its_cause():
    spec = {"worker": [f"127.0.0.1:{processes.free_ports(1)[0]}", "nobody.invalid:12345"]}
    cluster = Cluster(spec, "worker", 0)
    visits, _ = visit_together({0: cluster}, timeout_s=5.0)[0]
    missing = between_workers.judge_visit(cluster, visits[1], 5.0)
    assert missing.status == "failure"
    assert missing.detail.startswith("its name is not found here: ")
    assert "unknown error" not in missing.detail


def test_another_program_on_the_port_is_no_worker():
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = cluster_of(2, 0, [processes.free_ports(1)[0], server.getsockname()[1]])
        visits, _ = visit_together({0: cluster}, timeout_s=1.0)[0]
    assert visits[1].notes is None
    assert between_workers.judge_visit(cluster, visits[1], 1.0).status == "failure"


def test_another_token_or_another_cluster_is_refused_and_nobody_waits():
    ports = processes.free_ports(3)
    clusters = {index: cluster_of(2, index, ports[:2]) for index in range(2)}
    tokens = [{environment.TOKEN: "one"}, {environment.TOKEN: "other"}]
    began = time.monotonic()
    found = visit_together(clusters, environs=tokens, **QUICK)
    assert time.monotonic() - began < 10
    for index, (visits, _) in found.items():
        check = between_workers.judge_visit(clusters[index], visits[1 - index], 20.0)
        assert check.status == "failure"
        assert "TFMULTI_TOKEN" in check.detail
    clusters[1] = cluster_of(3, 1, ports)
    visits, _ = visit_together({**clusters}, timeout_s=2.0)[0]
    assert "must have the same cluster" in visits[1].fault


@pytest.mark.slow
def test_two_workers_with_the_same_task_are_told():
    ports = processes.free_ports(2)
    clusters = [cluster_of(2, index, ports) for index in (0, 1, 1)]

    def look(cluster):
        return between_workers.check_workers(cluster, True, [], 3.0, {})[0]

    with ThreadPoolExecutor(3) as threads:
        _, *found = threads.map(look, clusters)
    # One of the two has the port; whoever has not says so, and the first has seen both or one.
    assert any("in use" in check.detail for checks in found for check in checks)


@pytest.mark.slow
def test_a_second_worker_with_the_same_task_is_told_to_all_who_come():
    cluster = cluster_of(3, 0)
    # The third worker has the task of the second, and an address of its own, as on another host.
    elsewhere = cluster_of(1).spec["worker"][0]
    addresses = cluster.spec["worker"]
    wrong = Cluster({"worker": [addresses[0], elsewhere, addresses[2]]}, "worker", 1)
    right = Cluster(cluster.spec, "worker", 1)
    token = {environment.TOKEN: "secret"}
    found = visit_together({0: cluster, 1: right, 2: wrong}, environs=[token] * 3, timeout_s=2.0)
    for index in range(3):
        assert found[index][1] == {1: {"127.0.0.1"}}
    [check] = between_workers.judge_duplicate_tasks(cluster, found[0][1])
    assert (check.status, "worker 1 at" in check.detail) == ("failure", True)


@pytest.mark.slow
def test_two_who_cannot_reach_each_other_are_told_although_both_reach_the_first(monkeypatch):
    ports = processes.free_ports(3)
    clusters = {index: cluster_of(3, index, ports) for index in range(3)}
    opened = asyncio.open_connection

    async def open_connection(host, port, **settings):
        # Nobody comes through to worker 2 but the first.
        if port == ports[2] and threading.current_thread().name == "visits of 1":
            raise ConnectionRefusedError(111, "Connection refused")
        return await opened(host, port, **settings)

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    found = visit_together(clusters, timeout_s=2.0)

    def judge(index, other):
        visits, _ = found[index]
        return between_workers.judge_visit(clusters[index], visits[other], 2.0)

    assert judge(0, 1).status == judge(0, 2).status == judge(1, 0).status == "ok"
    assert "did not answer within 2 s: connection refused; yet it connected" in judge(1, 2).detail
    assert "but it has not connected to this worker" in judge(2, 1).detail


def test_who_leaves_early_is_received_when_the_others_leave_too():
    """The first worker still measures while the second is ready to leave."""
    ports = processes.free_ports(2)
    first, second = (cluster_of(2, index, ports) for index in range(2))
    talks, left = threading.Event(), []

    async def talk(reader, writer):
        talks.set()
        await reader.read(1)

    token = find_token(first, "secret")
    environ = {environment.TOKEN: "secret"}
    leaving = [
        threading.Thread(
            target=lambda cluster=cluster: left.append(
                between_workers.leave_together(cluster, 20.0, environ)
            )
        )
        for cluster in (first, second)
    ]

    async def stay():
        async def go(reader, writer):
            leaving[1].start()
            await asyncio.sleep(0.5)

        server = Server(first, {}, token, 20.0, talk, 20.0)
        await asyncio.gather(server.serve(), Client(second, {}, token, 20.0, 0, go).join())

    asyncio.run(stay())
    assert talks.is_set() and leaving[1].is_alive() and not left
    leaving[0].start()
    began = time.monotonic()
    for thread in leaving:
        thread.join()
    assert len(left) == 2 and time.monotonic() - began < 10


def test_slow_far_and_lost_ways_are_judged():
    cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)
    notes = {"host": "h", "gpus": []}

    def judge(came=True, **facts):
        usual = {"notes": notes, "round_trip_s": 1e-4, "ahead_s": 0.0, "bytes_per_s": 1e9}
        return between_workers.judge_visit(cluster, Visit(1, came, **{**usual, **facts}), 5.0)

    assert judge().status == "ok"
    assert "round trip 0.10 ms, 1 GB/s to it" in judge().detail
    assert judge(bytes_per_s=1e7).status == judge(round_trip_s=0.02).status == "warning"
    assert (
        judge(bytes_per_s=None, fault="its speed could not be measured in time").status == "warning"
    )
    assert "firewall" in judge(came=False).hint
    assert judge(came=False).status == "failure"
    assert "yet it connected to this worker" in judge(notes=None, fault="no answer").detail


def test_clocks_that_go_wrong_warn():
    cluster = cluster_of(3, 0)
    right = [Visit(1, ahead_s=1e-4), Visit(2, ahead_s=-2e-3)]
    check = between_workers.judge_clocks(cluster, right)
    assert check.status == "ok"
    assert "2.0 ms behind" in check.detail
    wrong = between_workers.judge_clocks(cluster, [Visit(1, ahead_s=90.0), Visit(2)])
    assert (wrong.status, "90000.0 ms ahead of" in wrong.detail) == ("warning", True)
    assert between_workers.judge_clocks(cluster, [Visit(1)]).status == "unknown"


def test_versions_and_gpus_of_the_workers_are_compared():
    cluster = cluster_of(2, 0)
    mine = between_workers.describe_worker(cluster, [], {})
    versions, gpus = between_workers.compare(cluster, {1: mine}, mine)
    assert versions.status == gpus.status == "ok"
    theirs = {**mine, "gpus": ["Tesla T4"], "tensorflow": "2.20.0"}
    versions, gpus = between_workers.compare(cluster, {1: theirs}, mine)
    assert (versions.status, gpus.status) == ("failure", "warning")
    assert 'tensorflow is "2.21' in versions.detail
    assert '"2.20.0" on worker 1' in versions.detail
    assert between_workers.compare(cluster, {}, mine)[0].status == "unknown"


SERVERS = {"chief": 1, "worker": 2, "ps": 1}


def cluster_with_servers(kind, index, ports):
    ports, spec = iter(ports), {}
    for name, count in SERVERS.items():
        spec[name] = [f"127.0.0.1:{next(ports)}" for _ in range(count)]
    config = {"cluster": spec, "task": {"type": kind, "index": index}}
    cluster, check = cluster_settings.read_cluster(None, {"TF_CONFIG": json.dumps(config)})
    assert check.status == "ok"
    assert check.detail.startswith(f"{kind} {index} of {SERVERS[kind]} (127.0.0.1:")
    return cluster


@pytest.mark.slow
def test_servers_and_the_chief_are_visited_too():
    ports = processes.free_ports(4)
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    clusters = {i: cluster_with_servers(*task, ports) for i, task in enumerate(tasks)}
    assert [cluster.worker_index for cluster in clusters.values()] == [0, 1, 2, 3]
    found = visit_together(clusters, **QUICK)
    for index, (visits, _) in found.items():
        assert {i for i, visit in visits.items() if visit.came} == {0, 1, 2, 3} - {index}
        checks = [between_workers.judge_visit(clusters[index], v, 1.0) for v in visits.values()]
        assert {check.status for check in checks} == {"ok"}
        others = [" ".join(map(str, task)) for i, task in enumerate(tasks) if i != index]
        assert [check.name.split(" at ")[0] for check in checks] == others
    own_address = cluster_settings.check_addresses(clusters[3], {environment.TOKEN: "x"})
    assert {check.status for check in own_address} == {"ok"}


def test_a_server_that_does_not_come_is_named():
    ports = processes.free_ports(4)
    clusters = {0: cluster_with_servers("chief", 0, ports)}
    [(visits, _)] = visit_together(clusters, timeout_s=0.5).values()
    check = between_workers.judge_visit(clusters[0], visits[3], 0.5)
    assert (check.name, check.status) == (f"ps 0 at 127.0.0.1:{ports[3]}", "failure")


def test_the_gpus_of_workers_alone_are_compared_where_there_are_servers():
    cluster = cluster_with_servers("ps", 0, processes.free_ports(4))
    mine = between_workers.describe_worker(cluster, [], {})
    fast, slow = {**mine, "gpus": ["H100"]}, {**mine, "gpus": ["T4"]}
    versions, gpus = between_workers.compare(cluster, {0: mine, 1: fast, 2: fast}, mine)
    assert (versions.status, gpus.status) == ("ok", "ok")
    assert versions.detail.startswith("4 tasks agree on cluster, python")
    assert gpus.detail == "the same on all: H100"
    [_, gpus] = between_workers.compare(cluster, {0: mine, 1: fast, 2: slow}, mine)
    assert (gpus.status, "max_staleness" in gpus.hint) == ("warning", True)
    [versions, gpus] = between_workers.compare(cluster, {0: {**mine, "keras": "3.0.0"}}, mine)
    assert (versions.status, gpus.status) == ("failure", "unknown")
    assert '"3.0.0" on chief 0' in versions.detail


@pytest.mark.slow
def test_the_chief_its_workers_and_servers_examine_one_another():
    command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=1", "--num_ps=1"]
    command += ["--all_output", "--", sys.executable, "-m", "tfmulti.doctor", "--cluster"]
    command += ["--tensorflow_timeout=1"]
    [done] = processes.run_together(command, [{}], timeout_s=200.0)
    for name in ("worker 0 at 127.0.0.1:", "ps 0 at 127.0.0.1:"):
        assert any(name in line for line in done.stdout.splitlines() if line.startswith("[chief]"))
    assert "3 tasks agree on" in done.stdout
    assert "Not ready: import of TensorFlow. (1 failure" in done.stdout


def test_two_real_workers_examine_each_other(run_workers):
    # TensorFlow has no time to be imported: its line is a failure, and the others stay as they are.
    arguments = ["-m", "tfmulti.doctor", "--cluster", "--json", "--tensorflow_timeout=1"]
    for index, text in enumerate(run_workers(2, arguments, check=False)):
        found = {each["name"]: each for each in json.loads(text)["checks"]}
        [other] = [each for name, each in found.items() if name.startswith("worker ")]
        assert other["name"].startswith(f"worker {1 - index} at 127.0.0.1:")
        assert other["status"] == "ok"
        assert "round trip" in other["detail"]
        for name in ("clocks of the workers", "versions of the workers", "GPUs of the workers"):
            assert found[name]["status"] == "ok"
        failed = [name for name, each in found.items() if each["status"] == "failure"]
        assert failed == ["import of TensorFlow"]
        assert "no answer in 1 s" in found["import of TensorFlow"]["detail"]


@pytest.mark.slow
def test_the_launcher_shows_the_first_workers_table():
    command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--"]
    command += [sys.executable, "-m", "tfmulti.doctor", "--cluster", "--tensorflow_timeout=1"]
    [done] = processes.run_together(command, [{"KERAS_BACKEND": "jax"}], timeout_s=200.0)
    # The traps are on both, and both have said all that they had to say.
    assert done.returncode == 1
    assert "Not ready: import of TensorFlow, backend of Keras. (2 failures" in done.stdout
    assert "worker 1 at 127.0.0.1:" in done.stdout
    assert "failed with exit code 1" in done.stderr
