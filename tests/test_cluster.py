"""The cluster: what a `TF_CONFIG` says, and the message for every mistake in it."""

import copy
import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tfmulti.cluster import Cluster, ClusterError, from_tf_config, network, resolve_cluster
from tfmulti.runtime.processes import free_ports

REPOSITORY = Path(__file__).resolve().parents[1]
READY_FILES = sorted((REPOSITORY / "tf_config").glob("*/*.json"))

PAIR = {"worker": ["127.0.0.1:12345", "127.0.0.1:23456"]}
TRIO = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
FIRST = {"type": "worker", "index": 0}


def config(cluster=PAIR, task=FIRST):
    return {"cluster": cluster, "task": task}


def workers(*addresses):
    return config({"worker": list(addresses)})


def read(text, **kwargs):
    """Resolves a cluster from the environment variable alone."""
    text = text if isinstance(text, str) else json.dumps(text)
    return resolve_cluster(environ={"TF_CONFIG": text}, check_network=False, **kwargs)


def message_of(function, *args, **kwargs):
    with pytest.raises(ClusterError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "TF_CONFIG" in message
    assert ". Received: " in message
    return message


@pytest.fixture
def listener():
    """A socket that listens on a free port of 127.0.0.1."""
    with socket.socket() as server:
        # As gRPC does; the kernel remembers it for the connections in TIME_WAIT.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


CLUSTER = 'TF_CONFIG["cluster"]'
WORKER = f'{CLUSTER}["worker"]'
TASK = 'TF_CONFIG["task"]'

# What is in TF_CONFIG, the place that the message names, what it received, a part of its advice.
MISTAKES = {
    "empty": ("", "TF_CONFIG", '""', "unset TF_CONFIG"),
    "blank": (" \n", "TF_CONFIG", r'" \n"', "unset TF_CONFIG"),
    "not JSON": ("{cluster: nope", "TF_CONFIG", "{cluster: nope", "line 1, column 2"),
    "not JSON, advice": ("{'cluster': {}}", "TF_CONFIG", "{'cluster'", "Use double quotes inside"),
    "not JSON, third line": ('{\n"cluster":\n]}', "TF_CONFIG", "cluster", "line 3, column 1"),
    "a path": ("tf_config/worker_0.json", "TF_CONFIG", "worker_0.json", "looks like a path"),
    "a list": ("[1, 2]", "TF_CONFIG", "[1, 2]", 'Write {"cluster"'),
    "null": ("null", "TF_CONFIG", "null", 'Write {"cluster"'),
    "key twice": (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}',
        "TF_CONFIG",
        '["worker", "worker"]',
        'all that belongs to "worker" under one key',
    ),
    "empty object": ({}, "TF_CONFIG", "{}", 'Write {"cluster"'),
    "no cluster": ({"task": FIRST}, "TF_CONFIG", '{"task"', 'must have the key "cluster"'),
    "no task": ({"cluster": PAIR}, "TF_CONFIG", '{"cluster"', 'must have the key "task"'),
    "unknown key": (
        {"clutser": PAIR, "task": FIRST},
        'TF_CONFIG["clutser"]',
        '"clutser"',
        'Did you mean "cluster"?',
    ),
    "cluster a list": (config([1]), CLUSTER, "[1]", "Write addresses by task type"),
    "cluster empty": (config({}), CLUSTER, "{}", "Write addresses by task type"),
    "cluster type misspelt": (
        config({"wroker": ["a:1"]}),
        f'{CLUSTER}["wroker"]',
        '"wroker"',
        'Did you mean "worker"?',
    ),
    "cluster type in capitals": (
        config({"Worker": ["a:1"]}),
        f'{CLUSTER}["Worker"]',
        '"Worker"',
        'Did you mean "worker"?',
    ),
    "cluster type unlike any": (config({"gpu": ["a:1"]}), f'{CLUSTER}["gpu"]', '"gpu"', "Write"),
    "cluster master": (
        config({"master": ["a:1"]}),
        f'{CLUSTER}["master"]',
        '"master"',
        'Write "chief"',
    ),
    "cluster ps": (
        config({**PAIR, "ps": ["a:1"]}),
        f'{CLUSTER}["ps"]',
        '"ps"',
        "without parameter servers",
    ),
    "cluster of an evaluator": (
        config({"evaluator": ["a:1"]}),
        CLUSTER,
        '{"evaluator": ["a:1"]}',
        'must have a "worker" or a "chief"',
    ),
    "two chiefs": (
        config({"chief": ["a:1", "b:1"]}),
        f'{CLUSTER}["chief"]',
        '["a:1", "b:1"]',
        'move the others to "worker"',
    ),
    "addresses a string": (config({"worker": "a:1"}), WORKER, '"a:1"', "Write ["),
    "addresses an object": (config({"worker": {"0": "a:1"}}), WORKER, '{"0": "a:1"}', "Write ["),
    "addresses null": (config({"worker": None}), WORKER, "null", "Write ["),
    "addresses empty": (config({"worker": []}), WORKER, "[]", "at least one address"),
    "addresses empty beside a chief": (
        config({"chief": ["a:1"], "worker": []}),
        WORKER,
        "[]",
        "or remove the key",
    ),
    "address a number": (workers("a:1", 12345), f"{WORKER}[1]", "12345", '"10.0.0.1:12345"'),
    "address an object": (workers({"a": 1}), f"{WORKER}[0]", '{"a": 1}', '"10.0.0.1:12345"'),
    "address empty": (workers(""), f"{WORKER}[0]", '""', "names no port"),
    "no port": (workers("a:1", "10.0.0.1"), f"{WORKER}[1]", '"10.0.0.1"', '"10.0.0.1:12345"'),
    "no port, IPv6": (workers("[::1]"), f"{WORKER}[0]", '"[::1]"', '"[::1]:12345"'),
    "port empty": (workers("a:"), f"{WORKER}[0]", '"a:"', 'Write "a:12345"'),
    "port a word": (workers("a:http"), f"{WORKER}[0]", '"a:http"', "an integer as port"),
    "port a fraction": (workers("a:1.5"), f"{WORKER}[0]", '"a:1.5"', "an integer as port"),
    "port with a sign": (workers("a:+1"), f"{WORKER}[0]", '"a:+1"', "an integer as port"),
    "port with an underscore": (workers("a:1_0"), f"{WORKER}[0]", '"a:1_0"', "an integer"),
    "port in other digits": (workers("a:٣"), f"{WORKER}[0]", '"a:٣"', "an integer as port"),
    "port 0": (workers("a:0"), f"{WORKER}[0]", '"a:0"', "from 1 to 65535"),
    "port negative": (workers("a:-1"), f"{WORKER}[0]", '"a:-1"', "an integer as port"),
    "port 65536": (workers("a:65536"), f"{WORKER}[0]", '"a:65536"', "from 1 to 65535"),
    "port 99999": (workers("a:99999"), f"{WORKER}[0]", '"a:99999"', "free on that machine"),
    "port endless": (workers("a:" + "9" * 5000), f"{WORKER}[0]", '"a:9999', "from 1 to 65535"),
    "no host": (workers(":12345"), f"{WORKER}[0]", '":12345"', "names no host"),
    "no host, IPv6": (workers("[]:12345"), f"{WORKER}[0]", '"[]:12345"', "names no host"),
    "host with a space": (workers(" a:1"), f"{WORKER}[0]", '" a:1"', "without spaces"),
    "host with a slash": (workers("a/b:1"), f"{WORKER}[0]", '"a/b:1"', "letters, digits"),
    "host for listeners": (workers("0.0.0.0:1"), f"{WORKER}[0]", '"0.0.0.0:1"', "can reach"),
    "host for listeners, IPv6": (workers("[::]:1"), f"{WORKER}[0]", '"[::]:1"', "can reach"),
    "grpc scheme": (
        workers("grpc://a:1"),
        f"{WORKER}[0]",
        '"grpc://a:1"',
        'without a scheme. Received: "grpc://a:1" (from the environment variable TF_CONFIG). '
        'Write "a:1".',
    ),
    "http scheme": (workers("http://a:1/"), f"{WORKER}[0]", '"http://a:1/"', 'Write "a:1".'),
    "IPv6 without brackets": (
        workers("::1:12345"),
        f"{WORKER}[0]",
        '"::1:12345"',
        '"[2001:db8::1]:12345"',
    ),
    "two colons": (workers("a:1:2"), f"{WORKER}[0]", '"a:1:2"', "with one colon"),
    "brackets round a name": (workers("[a]:1"), f"{WORKER}[0]", '"[a]:1"', "without brackets"),
    "same address twice": (
        workers("a:1", "b:1", "A:1"),
        f"{WORKER}[2]",
        '"A:1"',
        f"is the same as `{WORKER}[0]`",
    ),
    "same address, two types": (
        config({"worker": ["a:1"], "evaluator": ["a:1"]}),
        f'{CLUSTER}["evaluator"][0]',
        '"a:1"',
        f"is the same as `{WORKER}[0]`",
    ),
    "task a number": (config(task=0), TASK, "0", 'as {"type": "worker", "index": 0}'),
    "task null": (config(task=None), TASK, "null", 'as {"type": "worker", "index": 0}'),
    "task without type": (config(task={"index": 0}), TASK, '{"index": 0}', 'the key "type"'),
    "task without index": (config(task={"type": "worker"}), TASK, '{"type"', 'the key "index"'),
    "task key misspelt": (
        config(task={"type": "worker", "indx": 0}),
        TASK,
        '"indx": 0',
        'Rename the key "indx"',
    ),
    "task type misspelt": (
        config(task={"type": "wroker", "index": 0}),
        f'{TASK}["type"]',
        '"wroker"',
        'Did you mean "worker"?',
    ),
    "task type a number": (config(task={"type": 3, "index": 0}), f'{TASK}["type"]', "3", "Write"),
    "task type a list": (config(task={"type": [], "index": 0}), f'{TASK}["type"]', "[]", "Write"),
    "task type master": (
        config(task={"type": "master", "index": 0}),
        f'{TASK}["type"]',
        '"master"',
        'Write "chief".',
    ),
    "task type not in the cluster": (
        config(task={"type": "chief", "index": 0}),
        f'{TASK}["type"]',
        '"chief"',
        'that the cluster has: ["worker"]',
    ),
    "task evaluator, not in the cluster": (
        config(task={"type": "evaluator", "index": 0}),
        f'{TASK}["type"]',
        '"evaluator"',
        "trains on these alone",
    ),
    "task evaluator, in the cluster": (
        config({**PAIR, "evaluator": ["a:1"]}, {"type": "evaluator", "index": 0}),
        f'{TASK}["type"]',
        '"evaluator"',
        "MultiWorkerMirroredStrategy",
    ),
    "task index 1 of 1": (
        config({"worker": ["a:1"]}, {"type": "worker", "index": 1}),
        f'{TASK}["index"]',
        "1",
        "must be 0; number of",
    ),
    "task ps": (
        config(task={"type": "ps", "index": 0}),
        f'{TASK}["type"]',
        '"ps"',
        "MultiWorkerMirroredStrategy",
    ),
}
BAD_INDEXES = (2, 5, -1, True, 0.0, None, "", "-1", "one", "0.0", " 0", "9" * 5000, [0])


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_has_a_message(mistake):
    text, place, received, advice = mistake
    message = message_of(read, text)
    assert message.startswith(f"`{place}` ")
    assert received in message.partition("Received: ")[2]
    assert "(from the environment variable TF_CONFIG)" in message
    assert advice in message
    assert message.endswith(".")


@pytest.mark.parametrize("index", BAD_INDEXES, ids=lambda index: repr(index)[:8])
def test_index_must_be_one_of_the_cluster(index):
    message = message_of(read, config(task={"type": "worker", "index": index}))
    assert message.startswith(f'`{TASK}["index"]` must be an integer from 0 to 1')
    assert 'number of "worker" tasks in the cluster: 2' in message
    assert f"Received: {json.dumps(index)[:20]}" in message
    assert f"Write the position of this task in `{WORKER}`" in message


@pytest.mark.parametrize("index", [1, "1"])
def test_index_may_be_a_number_or_digits(index):
    assert read(config(task={"type": "worker", "index": index})).task_index == 1


def test_long_values_are_shortened():
    message = message_of(read, config({"worker": "x" * 10_000}))
    assert len(message) < 500


def test_keys_of_other_tools_do_no_harm():
    others = {"environment": "cloud", "rpc_layer": "grpc", "job": {}, "session_master": ""}
    task = {**FIRST, "trial": "1"}
    assert read({**config(task=task), **others}) == read(config())


def test_good_addresses_are_kept():
    addresses = ("[::1]:1", "host-1.example.com:65535", "my_host:2", "10.0.0.1:80")
    assert read(workers(*addresses)).spec["worker"] == addresses


def test_cluster_without_a_chief():
    cluster = Cluster(PAIR, "worker", 1)
    assert cluster.tasks == (("worker", 0), ("worker", 1))
    assert (cluster.num_workers, cluster.worker_index) == (2, 1)
    assert cluster.address == "127.0.0.1:23456"
    assert cluster.describe() == "worker 1 of 2 (127.0.0.1:23456)"
    assert not cluster.is_chief
    assert Cluster(PAIR, "worker", 0).is_chief


@pytest.mark.parametrize(
    ("task", "worker_index", "is_chief", "line"),
    [
        (("chief", 0), 0, True, "chief 0 of 1 (a:1), in a cluster of 3"),
        (("worker", 0), 1, False, "worker 0 of 2 (b:1), in a cluster of 3"),
        (("worker", 1), 2, False, "worker 1 of 2 (c:1), in a cluster of 3"),
    ],
)
def test_cluster_with_a_chief(task, worker_index, is_chief, line):
    cluster = Cluster(TRIO, *task)
    assert cluster.tasks == (("chief", 0), ("worker", 0), ("worker", 1))
    assert (cluster.worker_index, cluster.is_chief) == (worker_index, is_chief)
    assert cluster.describe() == line


def test_chief_comes_first_wherever_it_is_written():
    cluster = read(config({"evaluator": ["d:1"], "worker": ["b:1"], "chief": ["a:1"]}))
    assert list(cluster.spec) == ["chief", "worker", "evaluator"]
    assert cluster.tasks == (("chief", 0), ("worker", 0))
    assert cluster.num_workers == 2


def test_evaluator_neither_counts_nor_is_chief():
    cluster = Cluster({**PAIR, "evaluator": ["a:1"]}, "evaluator", 0)
    assert cluster.num_workers == 2
    assert not cluster.is_chief


def test_json_says_the_same():
    cluster = Cluster(TRIO, "worker", 1)
    assert json.loads(cluster.to_json()) == config(TRIO, {"type": "worker", "index": 1})
    assert from_tf_config(cluster.to_json()) == cluster


def test_cluster_cannot_be_changed():
    addresses = ["a:1"]
    cluster = Cluster({"worker": addresses}, "worker", 0)
    addresses.append("b:1")
    assert cluster.num_workers == 1
    with pytest.raises(AttributeError):
        cluster.task_index = 1
    with pytest.raises(TypeError):
        cluster.spec["worker"] = ()


def test_cluster_can_be_compared_hashed_copied_and_pickled():
    cluster = Cluster(PAIR, "worker", 0)
    assert cluster != Cluster(PAIR, "worker", 1)
    assert len({cluster, Cluster(PAIR, "worker", 0), Cluster(TRIO, "worker", 0)}) == 2
    assert copy.deepcopy(cluster) == pickle.loads(pickle.dumps(cluster)) == cluster


def test_only_an_absent_variable_means_no_cluster():
    assert resolve_cluster(environ={}) is None
    assert resolve_cluster(environ={"TASK_INDEX": "0"}) is None


@pytest.mark.parametrize("asked", [{"task_index": 0}, {"task_type": "worker"}])
def test_a_named_task_needs_a_cluster(asked):
    message = message_of(resolve_cluster, environ={}, **asked)
    assert next(iter(asked)) in message
    assert "leave the two out to train alone" in message


def test_environment_is_read_by_default(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config()))
    assert resolve_cluster(check_network=False) == Cluster(PAIR, "worker", 0)


@pytest.mark.parametrize("path", READY_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_files_in_tf_config_name_their_task_and_one_cluster(path):
    cluster = resolve_cluster(path, environ={}, check_network=False)
    assert path.name == f"{cluster.task_type}_{cluster.task_index}.json"
    others = [json.loads(other.read_text())["cluster"] for other in path.parent.glob("*.json")]
    assert others == [json.loads(path.read_text())["cluster"]] * cluster.num_workers


def test_there_are_five_ready_files():
    assert len(READY_FILES) == 5


def test_mapping_is_taken_as_it_is():
    message = message_of(resolve_cluster, workers("a"), environ={})
    assert "(from the argument `tf_config`)" in message
    tuples = {"cluster": {"worker": ("a:1",)}, "task": FIRST}
    assert resolve_cluster(tuples, check_network=False).address == "a:1"


def test_argument_comes_before_the_environment():
    environ = {"TF_CONFIG": ""}
    assert resolve_cluster(config(), environ=environ, check_network=False).num_workers == 2


def test_file_is_named_in_its_messages(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(workers("a")))
    message = message_of(resolve_cluster, str(path), environ={})
    assert f"(from the file {path})" in message


def test_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "windows.json"
    path.write_text(json.dumps(config()), encoding="utf-8-sig")
    assert resolve_cluster(path, check_network=False).num_workers == 2


def test_missing_file_is_an_error_that_lists_the_others(tmp_path):
    (tmp_path / "worker_0.json").touch()
    message = message_of(resolve_cluster, tmp_path / "worker_1.json", environ={})
    assert f"Received: {tmp_path / 'worker_1.json'}: No such file" in message
    assert "Correct the path" in message
    assert "worker_0.json" in message


def test_missing_folder_is_an_error():
    message = message_of(resolve_cluster, "no/such/folder", environ={})
    assert "Received: no/such/folder: No such file" in message


def test_file_must_be_text(tmp_path):
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert "can't decode" in message_of(resolve_cluster, path, environ={})


@pytest.mark.parametrize("value", ["", 3, b"worker_0.json", [1, 2]])
def test_argument_must_be_a_path(value):
    message = message_of(resolve_cluster, value, environ={})
    assert f"Received: tf_config={value!r}" in message
    assert "Leave it out" in message


def test_argument_is_a_path_and_not_a_text():
    message = message_of(resolve_cluster, json.dumps(config()), environ={})
    assert "must be a path, not the text" in message
    assert "environment variable TF_CONFIG" in message


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"])
def test_impossible_path_is_an_error(path):
    assert "Correct the path" in message_of(resolve_cluster, path, environ={})


@pytest.mark.parametrize(
    ("arguments", "environ", "task"),
    [
        ({"task_index": 0}, {}, ("worker", 0)),
        ({}, {"TASK_INDEX": "1"}, ("worker", 1)),
        ({"task_index": 0}, {"TASK_INDEX": "1"}, ("worker", 0)),
        ({"task_index": 0, "task_type": "chief"}, {}, ("chief", 0)),
        ({}, {"TASK_INDEX": "0", "TASK_TYPE": "chief"}, ("chief", 0)),
        ({"task_type": "worker"}, {"TASK_INDEX": "0", "TASK_TYPE": "chief"}, ("worker", 0)),
    ],
)
def test_folder_holds_a_file_for_each_task(arguments, environ, task):
    folder = REPOSITORY / "tf_config" / "chief_and_two_workers"
    cluster = resolve_cluster(folder, environ=environ, check_network=False, **arguments)
    assert (cluster.task_type, cluster.task_index) == task


@pytest.mark.parametrize(
    ("arguments", "environ", "place", "received"),
    [
        ({}, {}, "TASK_INDEX", "no `task_index` and no TASK_INDEX"),
        ({}, {"TASK_INDEX": ""}, "TASK_INDEX", '""'),
        ({}, {"TASK_INDEX": "first"}, "TASK_INDEX", '"first"'),
        ({"task_index": -1}, {}, "task_index", "-1"),
        ({"task_index": True}, {}, "task_index", "true"),
        ({"task_index": 0, "task_type": "wroker"}, {}, "task_type", 'task_type="wroker"'),
        ({}, {"TASK_INDEX": "0", "TASK_TYPE": "ps"}, "TASK_TYPE", 'TASK_TYPE="ps"'),
    ],
)
def test_folder_needs_a_task(arguments, environ, place, received):
    folder = REPOSITORY / "tf_config" / "two_workers"
    message = message_of(resolve_cluster, folder, environ=environ, **arguments)
    assert message.startswith(f"`{place}` must be")
    assert f"Received: {received} (from the folder {folder})" in message
    assert "worker_0.json, worker_1.json" in message


def test_folder_without_the_file_lists_the_others():
    folder = REPOSITORY / "tf_config" / "two_workers"
    message = message_of(resolve_cluster, folder, task_index=2, environ={})
    assert str(folder / "worker_2.json") in message
    assert "worker_0.json, worker_1.json" in message


def test_folder_without_files_says_so(tmp_path):
    message = message_of(resolve_cluster, tmp_path, task_index=0, environ={})
    assert "none that ends in .json" in message


def test_copied_file_with_the_old_task_is_an_error(tmp_path):
    for index in range(2):
        (tmp_path / f"worker_{index}.json").write_text(json.dumps(config()))
    message = message_of(resolve_cluster, tmp_path, task_index=1, environ={})
    assert message.startswith(f'`{TASK}["index"]` must agree with the task that was asked for')
    assert "task_index=1" in message
    assert "Received: 0 (from the file" in message
    assert "Write 1 there" in message


@pytest.mark.parametrize(
    ("asked", "key"), [({"task_index": 1}, "index"), ({"task_type": "chief"}, "type")]
)
def test_arguments_must_agree_with_what_was_read(asked, key):
    message = message_of(read, config(), **asked)
    assert message.startswith(f'`{TASK}["{key}"]` must agree')


def refuse(host):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_hosts_must_resolve():
    config_with_name = config({"worker": ["127.0.0.1:12345", "wroker-1:12345"]})
    message = message_of(resolve_cluster, config_with_name, resolve_host=refuse)
    assert message.startswith(f"`{WORKER}[1]` must name a host")
    assert 'Received: "wroker-1:12345"' in message
    assert "Name or service not known (from the argument `tf_config`)" in message
    assert "getent hosts wroker-1" in message


def test_the_first_host_is_reported_and_each_is_asked_once():
    asked = []

    def resolve(host):
        asked.append(host)
        refuse(host)

    cluster = Cluster({"worker": ["z:1", "a:1", "z:2", "10.0.0.1:1", "[::1]:1"]}, "worker", 0)
    message = message_of(network.check_hosts, cluster, source="TF_CONFIG", resolve=resolve)
    assert message.startswith(f"`{WORKER}[0]`")
    assert sorted(asked) == ["a", "z"]


def test_evaluators_are_not_looked_up():
    cluster = Cluster({"worker": ["127.0.0.1:1"], "evaluator": ["nowhere:1"]}, "worker", 0)
    network.check_hosts(cluster, source="TF_CONFIG", resolve=refuse)


def test_malformed_name_does_not_resolve():
    message = message_of(
        network.check_hosts, Cluster({"worker": ["a..b:1"]}, "worker", 0), source="TF_CONFIG"
    )
    assert '"a..b:1"' in message


def test_localhost_resolves():
    network.check_hosts(Cluster({"worker": ["localhost:1"]}, "worker", 0), source="TF_CONFIG")


def test_lookup_that_hangs_is_given_up():
    done = threading.Event()
    began = time.monotonic()
    hanging = Cluster({"worker": [f"host{index}:1" for index in range(8)]}, "worker", 0)
    try:
        message = message_of(
            network.check_hosts,
            hanging,
            source="TF_CONFIG",
            timeout=0.1,
            resolve=lambda host: done.wait(60),
        )
    finally:
        done.set()
    assert "no answer in 0.1 s" in message
    assert time.monotonic() - began < 10


def test_lookup_that_hangs_does_not_hold_up_the_exit():
    code = (
        "import threading\n"
        "from tfmulti.cluster import resolve_cluster\n"
        "hang = lambda host: threading.Event().wait()\n"
        "config = {'cluster': {'worker': ['a:1']}, 'task': {'type': 'worker', 'index': 0}}\n"
        "resolve_cluster(config, network_timeout=0.1, resolve_host=hang)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert "no answer in 0.1 s" in process.stderr


@pytest.mark.parametrize("own_host", ["127.0.0.1", "localhost"])
def test_port_in_use_is_an_error(listener, own_host):
    port = listener.getsockname()[1]
    text = json.dumps(workers(f"{own_host}:{port}", "127.0.0.1:1"))
    message = message_of(resolve_cluster, environ={"TF_CONFIG": text})
    assert message.startswith(f"`{WORKER}[0]` must have a port on which this process can listen")
    assert f"Received: port {port} of worker 0 of 2 ({own_host}:{port})" in message
    assert "in use" in message
    assert "(from the environment variable TF_CONFIG)" in message
    assert "`ss -ltnp`" in message


def test_port_of_another_task_may_be_in_use(listener):
    (own,) = free_ports(1)
    addresses = [f"127.0.0.1:{own}", f"127.0.0.1:{listener.getsockname()[1]}"]
    assert resolve_cluster(workers(*addresses)).num_workers == 2


def test_port_in_use_by_ipv6_is_an_error():
    if not socket.has_ipv6:
        pytest.skip("needs IPv6")
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"needs an IPv6 loopback interface: {error}")
        server.listen()
        with pytest.raises(OSError) as caught:
            network.bind_port(server.getsockname()[1])
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.skipif(os.name != "posix", reason="needs the POSIX meaning of SO_REUSEADDR")
def test_port_in_time_wait_is_free(listener):
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        # The side that closes first is the one that waits; the client's answer ends the closing.
        accepted, _ = listener.accept()
        accepted.close()
        assert client.recv(1) == b""
    listener.close()
    with pytest.raises(OSError), socket.socket() as strict:
        strict.bind(("127.0.0.1", port))
    network.bind_port(port)


def test_port_that_is_not_permitted():
    def bind(port):
        raise PermissionError(errno.EACCES, "Permission denied")

    cluster = Cluster({"worker": ["127.0.0.1:80"]}, "worker", 0)
    message = message_of(network.check_port, cluster, source="TF_CONFIG", bind=bind)
    assert "port 80 of worker 0 of 1" in message
    assert "from 1024 up" in message
