"""Parts of training with parameter servers that need no cluster."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from tfmulti.cluster import Cluster, ClusterError, network, resolve_cluster
from tfmulti.cluster.peers import GONE, SILENT, THERE, Presence, probe
from tfmulti.launch.config import LaunchConfig
from tfmulti.parallel import partitioned
from tfmulti.parallel.remote_step import Answer, add_gradients
from tfmulti.runtime import command_line, processes
from tfmulti.step import clipping
from tfmulti.strategies import factories
from tfmulti.strategies.parameter_server import ServerLost, WorkersLost
from tfmulti.strategies.task_monitor import TaskMonitor
from tfmulti.train import __main__ as command
from tfmulti.train import remote_runs
from tfmulti.train.config import TrainConfig
from tfmulti.train.remote_runs import RemoteRuns, StalenessBound, summarize_staleness


def simulate(bound, workers, seed, steps=400):
    """Workers that compute for random times, one of them slow; returns the staleness of each."""
    chance, limit = random.Random(seed), StalenessBound(bound)
    reading, held, staleness = {}, [], []
    numbers = itertools.count()
    while len(staleness) < steps:
        while len(limit) < min(workers + 1, bound + 1):
            number = next(numbers)
            limit.begin(number)
            reading[number] = limit.updates
        computing = [number for number in reading if number not in held]
        if computing:
            # The first one is computed by the slow worker.
            slow = chance.random() < 0.05 or len(computing) == 1
            held.append(computing[0] if slow else chance.choice(computing[1:]))
        ready = [number for number in held if limit.may_apply(number)]
        assert ready or computing, "all wait for one another"
        for number in ready[:1]:
            held.remove(number)
            staleness.append(limit.updates - reading.pop(number))
            limit.apply(number)
    return staleness


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_no_step_is_staler_than_the_bound_and_nobody_waits_for_ever(bound):
    found = [simulate(bound, workers=4, seed=seed) for seed in range(20)]
    assert max(map(max, found)) <= bound
    # It is reached: a smaller bound would be another rule.
    assert max(map(max, found)) == bound


def test_without_a_bound_any_step_may_be_applied():
    limit = StalenessBound(None)
    for number in range(5):
        limit.begin(number)
    assert all(limit.may_apply(number) for number in range(5)) and limit.limit is None


def test_the_summary_of_staleness():
    summary = summarize_staleness([0] * 19 + [10])
    assert (summary["staleness_mean"], summary["staleness_max"]) == (0.5, 10)
    assert summary["staleness_p95"] == pytest.approx(np.percentile([0] * 19 + [10], 95))


def test_gradients_of_parts_are_weighted_by_their_rows():
    def answer(rows, dense, ids):
        sparse = (np.full((len(ids), 2), dense, "float32"), np.array(ids))
        return Answer(0, 0, 0, rows, [np.float32([dense]), sparse, None], [np.float32([dense])], [])

    gradients, changes = add_gradients([answer(3, 1.0, [0, 1]), answer(1, 5.0, [1])])
    assert gradients[0] == changes[0] == 0.75 * 1 + 0.25 * 5
    np.testing.assert_allclose(gradients[1][0][:, 0], [0.75, 0.75, 1.25])
    assert gradients[1][1].tolist() == [0, 1, 1] and gradients[2] is None


@pytest.mark.parametrize("cuts", [(10,), (4, 6), (1, 5, 4)])
def test_rows_are_looked_up_in_the_parts_of_a_table(cuts):
    table = np.random.RandomState(0).rand(10, 3).astype("float32")
    edges = np.cumsum([0, *cuts])
    parts = [tf.Variable(table[a:b]) for a, b in zip(edges, edges[1:])]
    ids = tf.constant([[3, 9, 0], [3, 4, 5]])
    with tf.GradientTape() as tape:
        found = partitioned.look_up(parts, ids)
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found, table[ids.numpy()])
    counts = [tf.convert_to_tensor(g).numpy()[:, 0] for g in tape.gradient(loss, parts)]
    np.testing.assert_array_equal(np.concatenate(counts), [1, 0, 0, 2, 1, 1, 0, 0, 0, 1])


@pytest.mark.parametrize("sparse", [False, True])
def test_the_norm_of_a_table_is_that_of_all_its_parts(sparse):
    values, gradient = np.arange(12.0).reshape(6, 2), np.arange(12.0, 24.0).reshape(6, 2)

    def slices(rows):
        return tf.IndexedSlices(tf.constant(rows), tf.range(len(rows)), tf.constant(rows.shape))

    other = np.ones(3)

    def train(*cuts):
        variables = [keras.Variable(each) for each in (*np.split(values, cuts), other)]
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5, clipnorm=0.5)
        if cuts:
            clipping.clip_together(optimizer, [variables[:-1]])
        gradients = [slices(each) if sparse else each for each in np.split(gradient, cuts)]
        for _ in range(2):
            optimizer.apply([*gradients, tf.constant(other)], variables)
        return np.concatenate([np.ravel(each) for each in variables])

    np.testing.assert_allclose(train(1, 4), train(), rtol=1e-6)


def test_code_computes_with_the_whole_of_a_table_that_is_cut():
    parts = [keras.Variable(np.full((rows, 2), rows, "float32")) for rows in (3, 1)]
    table = partitioned.PartitionedTable(parts)
    with tf.GradientTape() as tape:
        found = keras.ops.matmul(np.ones((1, 2), "float32"), keras.ops.transpose(table))
    np.testing.assert_array_equal(found, [[6, 6, 6, 2]])
    for gradient in tape.gradient(found, [part.value for part in parts]):
        np.testing.assert_array_equal(gradient, np.ones(gradient.shape))


@pytest.mark.parametrize("seed", [None, 7, "generator"])
def test_a_part_is_drawn_in_pieces_that_differ(monkeypatch, seed):
    monkeypatch.setattr(partitioned, "_PIECE_BYTES", 4 * 8 * 30)

    def draw(part):
        given = keras.random.SeedGenerator(7) if seed == "generator" else seed
        initializer = keras.initializers.RandomNormal(stddev=2.0, seed=given)
        pieces = partitioned.Pieces()
        variable = tf.Variable(pieces.initializer(initializer, part)((1000, 8), "float32"))
        pieces.fill(variable)
        # Only a variable that waits for its values gets them.
        plain = tf.Variable(tf.ones((2, 2)))
        pieces.fill(plain)
        assert (plain.numpy() == 1).all()
        return variable.numpy()

    one, other = draw(0), draw(1)
    assert len(np.unique(one)) > 7900 and len(np.intersect1d(one, other)) < 100
    assert abs(one.mean()) < 0.1 and abs(one.std() - 2) < 0.1
    assert (one == draw(0)).all() == (seed is not None)


def test_a_row_beyond_the_table_is_an_error():
    parts = [tf.zeros([2, 1]), tf.zeros([2, 1])]
    with pytest.raises(tf.errors.InvalidArgumentError, match="input_dim"):
        partitioned.look_up(parts, tf.constant([1, 4]))


def spec(*kinds):
    return {kind: [f"127.0.0.1:{port}"] for port, kind in enumerate(kinds, 20000)}


def test_servers_are_part_of_the_cluster_where_they_are_allowed():
    config = {"cluster": spec("chief", "worker", "ps"), "task": {"type": "ps", "index": 0}}
    cluster = resolve_cluster(config, servers=True, check_network=False)
    assert cluster.has_servers and cluster.task_type == "ps" and not cluster.is_chief
    with pytest.raises(ClusterError, match="parameter_server"):
        resolve_cluster(config, check_network=False)


def test_a_folder_has_files_of_servers_too(tmp_path):
    for kind in ("chief", "worker", "ps"):
        config = {"cluster": spec("chief", "worker", "ps"), "task": {"type": kind, "index": 0}}
        (tmp_path / f"{kind}_0.json").write_text(json.dumps(config))
    settings = {"environ": {"TASK_TYPE": "ps", "TASK_INDEX": "0"}, "check_network": False}
    assert resolve_cluster(tmp_path, servers=True, **settings).task_type == "ps"
    with pytest.raises(ClusterError, match='`TASK_TYPE` must be "chief" or "worker", to choose'):
        resolve_cluster(tmp_path, **settings)


def test_the_network_of_servers_is_checked_too():
    hosts = {kind: [f"{kind}.invalid:1"] for kind in ("chief", "worker", "ps")}
    asked = []
    network.check_hosts(Cluster(hosts, "chief", 0), source="TF_CONFIG", resolve=asked.append)
    assert sorted(asked) == ["chief.invalid", "ps.invalid", "worker.invalid"]
    addresses = {"chief": ["10.0.0.1:1"], "worker": ["10.0.0.2:1"], "ps": ["8.8.8.8:1"]}
    assert network.public_addresses(Cluster(addresses, "chief", 0)) == ["8.8.8.8:1"]


def test_the_variable_that_kubeflow_writes_is_read():
    hosts = {kind: [f"job-{kind}-0.default.svc:2222"] for kind in ("chief", "worker", "ps")}
    task = {"type": "ps", "index": 0}
    config = {"cluster": hosts, "task": task, "environment": "cloud"}
    assert resolve_cluster(config, servers=True, check_network=False).names_come_late


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_a_cluster_without_one_of_the_roles_is_refused(missing):
    kinds = [kind for kind in ("chief", "worker", "ps") if kind != missing]
    config = {"cluster": spec(*kinds), "task": {"type": kinds[0], "index": 0}}
    with pytest.raises(ValueError, match=f"and no {missing}"):
        tfmulti.create_strategy("parameter_server", tf_config=config)


def test_no_cluster_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="--num_ps"):
        tfmulti.create_strategy("parameter_server")


def test_tasks_that_do_not_start_are_named(monkeypatch):
    config = json.loads(processes.tf_configs(1, 1)[0])
    with pytest.raises(RuntimeError, match="nothing from worker 0 .*, ps 0 "):
        tfmulti.create_strategy("parameter_server", tf_config=config, start_timeout=0.2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_staleness": 1}, "parameter_server only"),
        ({"strategy": "parameter_server", "shard": "state"}, "`shard` cannot be used"),
        ({"strategy": "parameter_server", "remainder": "pad"}, "`remainder` cannot be used"),
        ({"strategy": "parameter_server", "per_replica_batch_size": 4}, "`per_replica_batch_size`"),
        ({"strategy": "parameter_server", "max_staleness": -1}, "`max_staleness` must be at least"),
    ],
)
def test_settings_that_servers_do_not_know_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)


@pytest.mark.parametrize("setting", ["--shard=state", "--logical_cpus=2", "--bucket_bytes=8"])
def test_what_servers_do_not_know_is_refused_where_auto_chooses_them(setting, monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", processes.tf_configs(1, 1)[0])
    assert command.main(["train", setting]) == command_line.ERROR
    name = setting.split("=")[0][2:]
    assert f"`{name}` cannot be used with parameter_server, which auto" in capsys.readouterr().err


def test_activations_can_be_checkpointed_with_servers():
    TrainConfig(checkpoint_activations=True).check_with_servers()


def test_the_launcher_starts_servers_on_this_machine_only():
    with pytest.raises(ValueError, match="`num_ps`"):
        LaunchConfig(hosts="hosts.txt", num_ps=1)


def test_a_model_of_another_strategy_is_trained_by_fit():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="model.fit"):
        tfmulti.train_async(model, (np.zeros((4, 1)), np.zeros(4)), batch_size=2)


@pytest.fixture(name="cluster")
def cluster_fixture():
    config = {**spec("chief", "worker", "ps"), "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = {"cluster": config, "task": {"type": "chief", "index": 0}}
    return resolve_cluster(config, servers=True, check_network=False)


@pytest.fixture(name="monitor")
def monitor_fixture(cluster):
    return TaskMonitor(cluster, start_timeout_s=0.001, heartbeat_timeout_s=0.0)


def test_a_lost_server_is_named_in_whatever_reads_a_variable(cluster):
    """As a callback that reads the optimizer's iterations."""
    timeouts = {"start_timeout_s": 0.001, "heartbeat_timeout_s": 10.0}
    strategy = types.SimpleNamespace(cluster=cluster, num_workers=2, **timeouts)
    with pytest.raises(ServerLost, match=r"ps 0 \(127.0.0.1:20002\) is lost"):
        with RemoteRuns(strategy, None, None, print):
            raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")
    with pytest.raises(ZeroDivisionError), RemoteRuns(strategy, None, None, print):
        raise ZeroDivisionError


class Coordinator:
    """Keeps the error of a step until it is asked for anything, as TensorFlow's does."""

    def __init__(self):
        self.error = None

    def schedule(self, error):
        self.done()
        self.error = error

        def wait():
            raise error

        return wait

    def done(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True


def test_the_error_of_a_step_is_not_raised_again_by_the_next_training(cluster):
    timeouts = {"start_timeout_s": 10.0, "heartbeat_timeout_s": 10.0}
    coordinator = Coordinator()
    strategy = types.SimpleNamespace(
        cluster=cluster, num_workers=2, coordinator=coordinator, **timeouts
    )
    step = types.SimpleNamespace(schedule=lambda coordinator, *args: coordinator.schedule(args[0]))

    def train(error):
        with RemoteRuns(strategy, step, None, print) as runs:
            runs.train([error], 0, lambda sent: True, lambda apply: apply())

    for message in ("first", "second"):
        with pytest.raises(ZeroDivisionError, match=message):
            train(ZeroDivisionError(message))
    assert coordinator.error is None


def test_a_failed_training_does_not_wait_for_a_lost_worker(cluster, monkeypatch):
    timeouts = {"start_timeout_s": 10.0, "heartbeat_timeout_s": 10.0}
    never = threading.Event()
    coordinator = types.SimpleNamespace(done=never.wait)
    strategy = types.SimpleNamespace(
        cluster=cluster, num_workers=2, coordinator=coordinator, **timeouts
    )
    monkeypatch.setattr(remote_runs, "_FORGET_S", 0.01)
    step = types.SimpleNamespace(schedule=lambda *args: never.wait)
    with pytest.raises(ZeroDivisionError), RemoteRuns(strategy, step, None, print) as runs:
        runs._send(0, step.schedule)
        raise ZeroDivisionError
    with pytest.raises(WorkersLost), RemoteRuns(strategy, step, None, print) as runs:
        runs._send(0, step.schedule)
        monkeypatch.setattr(runs, "_forget_steps", mock.Mock(side_effect=AssertionError))
        raise WorkersLost
    never.set()


def test_a_lost_server_is_named(monitor):
    monitor.note("ps 0", GONE)
    monitor.check()
    for _ in range(3):
        monitor.note("ps 0", GONE)
    with pytest.raises(ServerLost, match="ps 0 .127.0.0.1:20002: nothing listens there. is lost"):
        monitor.check()


def test_a_frozen_worker_is_named(monitor):
    monitor.note("worker 1", SILENT)
    with pytest.raises(WorkersLost, match="worker 1 .127.0.0.1:2: it does not answer"):
        monitor.check()
    monitor.note("worker 1", THERE)
    monitor.check()


def test_timeouts_are_those_of_the_strategy(cluster, monkeypatch):
    create = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(factories, "create_parameter_server", create)
    monkeypatch.setattr(factories, "_find_cluster", lambda *_: cluster)
    with pytest.raises(ZeroDivisionError):
        tfmulti.create_strategy("parameter_server", start_timeout=7, heartbeat_timeout=3)
    create.assert_called_once_with(cluster, 7, 3)
    timeouts = {"start_timeout_s": 7, "heartbeat_timeout_s": 0.0}
    strategy = types.SimpleNamespace(cluster=cluster, num_workers=2, **timeouts)
    runs = RemoteRuns(strategy, None, None, print)
    runs._monitor.note("worker 1", SILENT)
    with pytest.raises(WorkersLost, match="worker 1"):
        runs._monitor.check()


def test_training_ends_once_no_worker_is_left(monitor):
    for _ in range(3):
        monitor.note("worker 0", GONE)
    monitor.check()
    assert ["worker 0" in line for line in monitor.news()] == [True]
    for _ in range(3):
        monitor.note("worker 1", GONE)
    monitor.check()
    with pytest.raises(WorkersLost, match="no worker for"):
        while True:
            monitor.check()


def test_a_task_is_lost_that_is_silent_for_long_and_is_back_once_it_answers():
    seconds = iter([0, 5, 11, 12, 13, 14, 30])
    presence = Presence("127.0.0.1:1", 10.0, clock=lambda: next(seconds))
    assert [presence.note(seen) for seen in (SILENT, SILENT)] == [None, None]
    assert presence.note(SILENT) == "it does not answer (frozen or cut off)"
    assert not presence.has_been_there
    assert [presence.note(seen) for seen in (THERE, GONE, SILENT, GONE)] == [None] * 4
    assert presence.has_been_there


def test_what_listens_without_an_answer_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert probe(address, timeout_s=0.1) == SILENT
    assert probe(address, timeout_s=0.1) == GONE


PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
task = json.loads(os.environ["TF_CONFIG"])["task"]
kind, index, again = task["type"], task["index"], os.environ["TFMULTI_RESTARTS"] != "0"
here = Path(sys.argv[1])
(here / f"{kind}_{index}_{again}").touch()
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def run_job(tmp_path):
    """Runs a program without TensorFlow on a chief, two workers and a server."""

    def run(code, *options):
        command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--num_ps=1"]
        program = PRELUDE + textwrap.dedent(code)
        command += [*options, "--", sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, env={**os.environ}
        )

    return run


def test_a_killed_worker_is_restarted_alone(run_job, tmp_path):
    code = """
        if kind == "worker" and index == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("worker_1_True")
    """
    done = run_job(code, "--max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert "Restart 1 (of 1) of worker 1" in done.stderr
    assert [path.name for path in tmp_path.glob("*_True")] == ["worker_1_True"]


def test_a_job_goes_on_without_a_worker(run_job):
    code = """
        if kind == "worker" and index == 1:
            (here / "gone").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("gone")
    """
    done = run_job(code)
    assert done.returncode == 0 and "worker 1 was ended by SIGKILL" in done.stderr
    assert "the job continues with" in done.stderr


@pytest.mark.parametrize(("role", "code"), [("ps", 137), ("chief", 3)])
def test_a_job_ends_with_its_server_or_chief(run_job, role, code):
    ends = "os.kill(os.getpid(), signal.SIGKILL)" if role == "ps" else "sys.exit(3)"
    done = run_job(f"""
        if kind == "{role}":
            {ends}
        time.sleep(100)
    """)
    assert done.returncode == code
    assert ("ps 0 was ended by SIGKILL" if role == "ps" else "chief failed with") in done.stderr
