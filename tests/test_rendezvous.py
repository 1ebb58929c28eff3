"""The rendezvous before TensorFlow starts, and strangers that come to it."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfmulti import rendezvous
from tfmulti.cluster import Cluster, network
from tfmulti.rendezvous import client, messages, server
from tfmulti.runtime.processes import free_ports

TOKEN = "a secret of this test"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras, which takes longer than most tests here."""


def clusters(number, name="127.0.0.1", source="TF_CONFIG"):
    spec = {"worker": [f"{name}:{port}" for port in free_ports(number)]}
    return [Cluster(spec, "worker", index, source=source) for index in range(number)]


def address_of(cluster, index=0):
    name, port = cluster.spec["worker"][index].split(":")
    return name, int(port)


def serve(workers, notes=None, timeout_s=20.0, tokens=None, gpus=None):
    """Has each worker join in a thread of its own; returns what it got, or its error."""

    def join(position):
        try:
            return rendezvous.join(
                workers[position],
                (notes or [{}] * len(workers))[position],
                timeout_s=timeout_s,
                token=(tokens or [TOKEN] * len(workers))[position],
                gpus=(gpus or [()] * len(workers))[position],
            )
        except rendezvous.RendezvousError as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(join, range(len(workers))))


def connect(address):
    """Comes as a stranger, as soon as somebody listens."""
    limit = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address, timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < limit
            time.sleep(0.01)


@pytest.fixture
def waiting():
    """A rendezvous that waits for its last worker: the cluster of that one, and the results."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        workers = clusters(3)
        results = pool.submit(serve, workers[:2])
        yield workers, results


@pytest.mark.skipif(sys.platform != "linux", reason="reads the backlog as Linux has it")
def test_many_workers_that_come_at_once_are_not_refused(monkeypatch):
    listeners, [cluster, _] = [], clusters(2)
    open_listeners = server.open_listeners

    def keep(cluster):
        listeners.extend(open_listeners(cluster))
        return listeners

    async def read_backlogs():
        token = messages.Token(TOKEN.encode(), True)
        serving = asyncio.create_task(server.Server(cluster, {}, token, 20.0).serve())
        while not (listeners or serving.done()):
            await asyncio.sleep(0)
        # It accepts, and so listens.
        reader, writer = await asyncio.open_connection(*address_of(cluster))
        await reader.readline()
        # `tcpi_sacked` of a socket that listens: see tcp_get_info in the kernel's net/ipv4/tcp.c.
        found = [each.getsockopt(socket.SOL_TCP, socket.TCP_INFO, 32)[28:] for each in listeners]
        writer.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return [int.from_bytes(each, sys.byteorder) for each in found]

    monkeypatch.setattr(server, "open_listeners", keep)
    with open("/proc/sys/net/core/somaxconn") as file:
        most = min(server._BACKLOG, int(file.read()))
    backlogs = asyncio.run(read_backlogs())
    assert backlogs and set(backlogs) == {most}


def finish(waiting):
    workers, results = waiting
    [last] = serve(workers[2:])
    for result in (last, *results.result()):
        assert sorted(result) == [0, 1, 2], result


def test_all_come_and_each_knows_what_all_said():
    results = serve(clusters(3), [{"epochs": 3, "shape": (1, 2)}] * 3)
    for said in results:
        assert sorted(said) == [0, 1, 2]
        assert all(each["shape"] == [1, 2] and each["epochs"] == 3 for each in said.values())
        assert {"cluster", "python", "tfmulti"} < set(said[0])


def test_a_chief_is_the_first_worker():
    first, second = free_ports(2)
    spec = {"chief": [f"127.0.0.1:{first}"], "worker": [f"127.0.0.1:{second}"]}
    results = serve([Cluster(spec, "worker", 0), Cluster(spec, "chief", 0)])
    assert [sorted(each) for each in results] == [[0, 1], [0, 1]]


def test_a_cluster_of_one_does_not_wait():
    [worker] = clusters(1)
    assert sorted(rendezvous.join(worker)) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_the_port_is_free_at_once_fifty_times(name):
    for _ in range(50):
        workers = clusters(2, name)
        port = int(workers[0].address.split(":")[1])
        bound = threading.Event()

        def bind(port=port, bound=bound, worker=workers[0]):
            rendezvous.join(worker, token=TOKEN, timeout_s=20)
            # Without SO_REUSEADDR: not even a connection in TIME_WAIT is left.
            with socket.socket() as listener:
                listener.bind(("0.0.0.0", port))
                bound.set()

        thread = threading.Thread(target=bind)
        thread.start()
        rendezvous.join(workers[1], token=TOKEN, timeout_s=20)
        thread.join()
        assert bound.is_set()


def test_workers_may_have_gpus_of_their_own():
    said = serve(clusters(2), gpus=[["GPU-a", "GPU-b"], ["GPU-c"]])
    assert [said[0][index][rendezvous.GPUS] for index in range(2)] == [
        ["GPU-a", "GPU-b"],
        ["GPU-c"],
    ]


def test_workers_that_share_a_gpu_are_named():
    said = serve(clusters(3), gpus=[["GPU-a"], ["GPU-b", "GPU-c"], ["GPU-c"]])
    for error in map(str, said):
        assert "Received: GPU-c is used by worker 1, worker 2." in error
        assert 'share the GPU with communication="ring"' in error


def test_the_port_is_free_after_an_error():
    workers = clusters(2)
    [error] = serve(workers[:1], timeout_s=0.2)
    assert isinstance(error, rendezvous.RendezvousError)
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", address_of(workers[0])[1]))


def test_who_did_not_come_is_named_by_all_who_came():
    workers = clusters(4)
    errors = serve([workers[0], workers[2]], timeout_s=0.5)
    for error in errors:
        message = str(error)
        assert f"2 had not connected: worker 1 at {workers[1].address}, worker 3 at" in message
        assert "worker 2" not in message and "Received: after 0." in message
        assert "Start them" in message


def test_without_the_first_worker_it_is_named():
    workers = clusters(3)
    for error in serve(workers[1:], timeout_s=0.4):
        assert f"1 had not connected: worker 0 at {workers[0].address}; the last attempt" in str(
            error
        )
        assert "failed: connection refused" in str(error)


def test_the_first_whose_time_is_over_ends_it_for_all():
    workers = clusters(3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Far longer than a test may take.
        slow = pool.submit(serve, workers[:1], timeout_s=3600)
        [hasty] = serve(workers[1:2], timeout_s=0.5)
        [slow] = slow.result()
    assert all(f"worker 2 at {workers[2].address}" in str(error) for error in (hasty, slow))


@pytest.mark.parametrize("source", ["Slurm", "Kubernetes", "MPI"])
def test_under_a_scheduler_nobody_is_told_to_write_tf_config(source):
    workers = clusters(2, source=source)
    (missing,) = serve(workers[:1], timeout_s=0.2)
    assert isinstance(missing, rendezvous.WorkersMissingError)
    three = clusters(3, source=source)
    twice = serve([three[0], three[1], three[1]], timeout_s=5.0)
    with socket.socket() as held:
        held.bind(address_of(workers[0]))
        held.listen()
        (busy,) = serve(workers[:1], timeout_s=0.2)
    for error in (missing, *twice, busy):
        assert isinstance(error, rendezvous.RendezvousError)
        assert "TF_CONFIG" not in str(error)
    assert f"{source} " in str(missing)
    assert "to another port" in str(busy) or "start the job again" in str(busy)


def test_differences_are_told_by_name_with_both_values():
    notes = [{"tensorflow": "2.21.0", "--epochs": 3}] * 2 + [{"tensorflow": "2.20.0"}]
    for error in serve(clusters(3), notes):
        assert 'tensorflow is "2.21.0" on worker 0, worker 1, but "2.20.0" on worker 2' in str(
            error
        )
        assert "--epochs is 3 on worker 0, worker 1, but nothing on worker 2" in str(error)


def test_other_addresses_of_the_cluster_are_told():
    workers = clusters(2)
    longer = {"worker": (*workers[0].spec["worker"], "127.0.0.1:9")}
    for error in serve([workers[0], Cluster(longer, "worker", 1)]):
        assert "cluster is" in str(error) and "127.0.0.1:9" in str(error)


def test_without_a_token_another_cluster_is_refused_and_told(monkeypatch, caplog):
    monkeypatch.delenv("TFMULTI_TOKEN", raising=False)
    workers = clusters(2)
    longer = {"worker": (*workers[0].spec["worker"], "127.0.0.1:9")}
    pair = [workers[0], Cluster(longer, "worker", 1)]
    first, second = serve(pair, timeout_s=1.0, tokens=[None, None])
    assert "127.0.0.1 connected with another cluster" in str(first) and "127.0.0.1:9" in str(first)
    assert "All workers must have the same cluster" in str(second)
    assert workers[0].address in str(second) and "127.0.0.1:9" in str(second)
    assert "has no secret" in caplog.text


def test_two_with_the_same_index_are_told_to_all():
    workers = clusters(3)
    for error in serve([workers[0], workers[1], workers[1]]):
        assert f"two workers with the task of worker 1 at {workers[1].address}" in str(error)


def test_a_worker_that_ends_and_comes_again_is_let_in(waiting):
    workers, _ = waiting
    code = "import sys, tfmulti.rendezvous as m, tfmulti.cluster as c\n"
    code += "print('here', flush=True); m.join(c.resolve_cluster(check_network=False))"
    env = {**os.environ, "TF_CONFIG": workers[2].to_json(), "TFMULTI_TOKEN": TOKEN + "x"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "All workers must have the same token" in done.stderr
    finish(waiting)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["one", "two"], "TFMULTI_TOKEN is set here, and worker 0 at"),
        ([None, "two"], "has none"),
        (["one", None], "TFMULTI_TOKEN is not set here"),
    ],
)
def test_another_token_is_refused_at_once(monkeypatch, tokens, words):
    monkeypatch.delenv("TFMULTI_TOKEN", raising=False)
    first, second = serve(clusters(2), timeout_s=1.0, tokens=tokens)
    assert words in str(second)
    assert "worker 1 at" in str(first) and "connected with another token" in str(first)


STRANGERS = {
    "nothing": b"",
    "line end": b"\n",
    "bytes": bytes(range(256)) + b"\n",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "oversized": b"x" * (4 * messages.MAX_BYTES),
    "deep": b"0" * 64 + b" " + b"[" * 30_000 + b"\n",
    "pickle": b"cos\nsystem\n(S'touch /tmp/x'\ntR.\n",
    "another secret": messages.write(b"guess", "client", "", {"index": 2}),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_do_not_disturb(waiting, name):
    address = address_of(waiting[0][0])
    with connect(address) as stranger, connect(address) as silent:
        try:
            stranger.sendall(STRANGERS[name])
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
        except OSError:
            pass
        finish(waiting)
        assert silent.recv(100).startswith(b"tfmulti-rendezvous")


def test_who_says_nothing_is_shown_out(waiting, monkeypatch):
    monkeypatch.setattr(server, "LINE_S", 0.2)
    with connect(address_of(waiting[0][0])) as slow:
        slow.sendall(b"a")
        with pytest.raises(ConnectionResetError):
            while slow.recv(4096):
                pass
    finish(waiting)


def test_many_strangers_leave_room_for_workers(waiting):
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            # Those who are too many are sent away, some before they know that they had come.
            with contextlib.suppress(ConnectionResetError):
                strangers.enter_context(connect(address_of(waiting[0][0])))
    finish(waiting)


def test_a_message_cannot_be_used_again():
    line = messages.write(b"key", "client", "first", {"index": 1})
    assert messages.read(line, b"key", "client", "first") == {"index": 1}
    for key, role, context in ((b"key", "client", "second"), (b"key", "server", "first")):
        with pytest.raises(messages.MessageError):
            messages.read(line, key, role, context)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_bad_messages(line):
    for read in (
        lambda: messages.read(line, b"key", "client", ""),
        lambda: messages.read_greeting(line),
        lambda: messages.unchecked(line),
    ):
        with pytest.raises(messages.MessageError):
            read()


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
# Never a worker of the rendezvous: that would be one more with the same index.
INDEX = JSON.filter(lambda value: type(value) is not int or not 0 <= value < 2)
CONTENT = st.fixed_dictionaries(
    {"index": INDEX}, optional={name: JSON for name in ("instance", "left_s", "settings", "more")}
)


@given(st.lists(st.binary(max_size=200) | CONTENT, min_size=20, max_size=20))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_rendezvous_survives_random_strangers(lines):
    """Random bytes, and random contents with the right code."""
    workers = clusters(2)

    def visit(line):
        with connect(address_of(workers[0])) as stranger:
            random = stranger.recv(4096).decode().split()[-1]
            if isinstance(line, dict):
                line = messages.write(TOKEN.encode(), "client", random, line)
            stranger.sendall(line + b"\n")

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(serve, workers[:1])
        list(pool.map(visit, lines))
        [second] = serve(workers[1:])
    assert sorted(second) == sorted(first.result()[0]) == [0, 1]


def test_another_service_at_the_address_is_told():
    workers = clusters(2)
    with socket.create_server(address_of(workers[0])) as service:
        thread = threading.Thread(target=lambda: service.accept()[0].sendall(b"SSH-2.0\r\n"))
        thread.start()
        [error] = serve(workers[1:], timeout_s=0.5)
        thread.join()
        assert "worker 0 at" in str(error)
        [error] = serve(workers[:1])
        assert "must be able to listen at its address" in str(error)
        assert "ss -ltnp" in str(error)


def meet_a_false_host(workers, timeout_s):
    """Has worker 1 come to a host without the token; returns its error, and what it has said."""
    heard = []
    with socket.create_server(address_of(workers[0])) as false:

        def answer():
            with false.accept()[0] as connection:
                connection.sendall(messages.write_greeting("0" * 32))
                heard.append(connection.recv(65536))
                connection.sendall(messages.write(b"guess", "server", "", {"settings": {}}))

        thread = threading.Thread(target=answer)
        thread.start()
        [error] = serve(workers[1:], timeout_s=timeout_s)
        thread.join()
    return error, heard[0]


def test_a_false_host_cannot_say_what_others_said():
    error, _ = meet_a_false_host(clusters(2), timeout_s=0.5)
    assert "had not connected: worker 0" in str(error)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("127.0.0.1", {"127.0.0.1"}), ("192.0.2.1", {"0.0.0.0", "::"})],
)
def test_only_its_own_interface_listens_where_it_has_one(name, expected):
    [port] = free_ports(1)
    listeners = server.open_listeners(Cluster({"worker": [f"{name}:{port}"]}, "worker", 0))
    found = {listener.getsockname()[0] for listener in listeners}
    for listener in listeners:
        listener.close()
    assert found <= expected and found


def test_a_name_that_is_loopback_only_here_listens_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert server._interfaces("this-machine") == []
    assert server._interfaces("localhost") == [(socket.AF_INET, "127.0.1.1")]


def test_in_a_notebook_a_loop_runs_already():
    async def cell():
        return rendezvous.join(workers[0], token=TOKEN, timeout_s=20)

    workers = clusters(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(serve, workers[1:])
        assert sorted(asyncio.run(cell())) == sorted(other.result()[0]) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"settings": {"model": object()}},
            "`must_agree` must hold values that JSON can represent",
        ),
        ({"settings": {"long": "x" * messages.MAX_BYTES}}, "shorter than 65536 bytes"),
        ({"timeout_s": 0}, "`timeout_s` must be a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "Received: timeout_s=nan"),
        ({"timeout_s": [3]}, r"Received: timeout_s=\[3\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        rendezvous.join(clusters(2)[0], **arguments)


def test_the_environment_tells_the_time_and_a_wrong_one_is_named():
    assert rendezvous.find_timeout(3, {"TFMULTI_START_TIMEOUT": "5"}) == 3
    assert rendezvous.find_timeout(None, {}) == 60
    with pytest.raises(ValueError, match="TFMULTI_START_TIMEOUT='soon'"):
        rendezvous.find_timeout(None, {"TFMULTI_START_TIMEOUT": "soon"})


def test_public_addresses_are_warned_of(caplog):
    spec = {"worker": ["10.0.0.1:1", "8.8.8.8:2", "name:3", "[2001:4860:4860::8888]:4"]}
    network.warn_of_public_addresses(Cluster(spec, "worker", 0))
    assert "8.8.8.8:2, [2001:4860:4860::8888]:4" in caplog.text
    caplog.clear()
    private = ["192.168.0.1:1", "127.0.0.1:2", "[fe80::1]:3", "100.64.0.1:4", "[::1]:5"]
    network.warn_of_public_addresses(Cluster({"worker": private}, "worker", 0))
    assert not caplog.text


def test_the_secret_is_never_sent_nor_shown():
    workers = clusters(2)
    error, heard = meet_a_false_host(workers, timeout_s=0.3)
    assert json.loads(heard.partition(b" ")[2])["index"] == 1
    assert TOKEN.encode() not in heard and TOKEN not in str(error)
    shown = repr(client.Client(workers[1], {}, rendezvous.find_token(workers[1], TOKEN), 1.0).token)
    assert TOKEN not in shown
