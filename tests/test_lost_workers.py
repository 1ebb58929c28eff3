"""What TensorFlow says when another worker is gone, and what we make of it."""

import dataclasses
import threading
import time
import types
from concurrent.futures import Future

import pytest
import tensorflow as tf

from tfmulti.cluster import Cluster
from tfmulti.cluster.peers import find_peer_error
from tfmulti.keras_compat import coordination

CLUSTER = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"]}, "worker", 1)
# Shortened from TensorFlow 2.21's own.
TEXTS = {
    "silent": (
        "Collective ops is aborted by: Error reported from /job:worker/task:2: The following "
        "tasks are unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:2\n",
        "worker 2 at 10.0.0.3:2222 is lost: it has stopped sending heartbeats",
    ),
    "closed": (
        "Collective ops is aborted by: Socket closed\nAdditional GRPC error information from "
        "remote target /job:worker/replica:0/task:0 while calling RecvBuf",
        "worker 0 at 10.0.0.1:2222 is lost: its connection has closed",
    ),
    "silent chief": (
        "Collective ops is aborted by: Deadline Exceeded\nAdditional GRPC error information "
        "while calling /tensorflow.CoordinationService/Heartbeat",
        "worker 0 at 10.0.0.1:2222 is lost: it no longer answers heartbeats",
    ),
    "unreachable chief": (
        "the chief's CoordinationService gives no answer in 30 s",
        "worker 0 at 10.0.0.1:2222 is lost: it no longer answers (frozen or cut off)",
    ),
    "gone": (
        "Graph execution error:\nfailed to connect to all addresses; last error: UNKNOWN: "
        "ipv4:10.0.0.1:2222: Failed to connect to remote host: Connection refused",
        "worker 0 at 10.0.0.1:2222 is lost: its connection has closed",
    ),
    "gone, over MPI": (
        "RuntimeError: /job:worker/replica:0/task:2 is gone: failed to connect: no route\n"
        "Traceback (most recent call last):\n  File",
        "worker 2 at 10.0.0.3:2222 is lost: its connection has closed",
    ),
    "closed, over MPI": (
        "RuntimeError: Broken pipe to another worker: no route\nTraceback (most recent call last):",
        "worker 0 at 10.0.0.1:2222 is lost: its connection has closed",
    ),
    "told": (
        "Error reported from /job:worker/task:2: this worker failed: ValueError: bad record 7\n"
        "The error could be from a previous operation.",
        "worker 2 at 10.0.0.3:2222 failed, and this worker with it: ValueError: bad record 7",
    ),
    "told without a name": (
        "Graph execution error:\nCollective ops is aborted by: this worker failed: ValueError: bad",
        "another worker failed, and this worker with it: ValueError: bad",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_lost_worker_is_named(name):
    text, words = TEXTS[name]
    ending = find_peer_error(tf.errors.UnavailableError(None, None, text), CLUSTER)
    assert ending.exit_code == 144
    assert ending.text.startswith(words)


def test_the_first_task_does_not_name_itself():
    first = dataclasses.replace(CLUSTER, task_index=0)
    error = tf.errors.UnavailableError(None, None, "Collective ops is aborted by: Socket closed")
    assert find_peer_error(error, first).text.startswith("another worker is lost: its connection")


def test_workers_that_do_different_things_are_told_so():
    text = "Graph execution error:\nShape mismatch in the collective instance 131. [3,1] but [3,2]"
    ending = find_peer_error(tf.errors.InternalError(None, None, text), CLUSTER)
    assert ending.exit_code == 1
    assert "Workers must do the same steps with the same model. Received: Shape mis" in ending.text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Socket closed"),
        tf.errors.InvalidArgumentError(None, None, "bad record"),
        RuntimeError("`x` must be y. Received: z."),
        RuntimeError("failed to connect to feature store"),
        RuntimeError("the sensor sends no heartbeat: Broken pipe"),
        # As TensorFlow 2.21 tells of a generator's own error, in a step on this worker.
        tf.errors.UnknownError(
            None,
            None,
            "Graph execution error:\n\nDetected at node PyFunc\nConnectionResetError: [Errno 104] "
            "Connection reset by peer\nTraceback (most recent call last):\n  File\n\n\t "
            "[[{{node PyFunc}}]] [[/job:worker/replica:0/task:1/device:CPU:0]]",
        ),
        tf.errors.UnknownError(
            None,
            None,
            "_InactiveRpcError: failed to connect to all addresses; Connection refused\n"
            "Traceback (most recent call last):\n  File",
        ),
        tf.errors.UnavailableError(None, None, "libcurl code 56: Connection reset by peer"),
    ],
)
def test_an_error_of_this_worker_is_its_own(error):
    assert find_peer_error(error, CLUSTER) is None
    assert find_peer_error(error, None) is None


def test_a_silent_worker_counts_as_lost_after_the_timeout_that_was_given(monkeypatch):
    seen = []
    runtime = types.SimpleNamespace(
        configure_coordination_service=lambda **settings: seen.append(settings)
    )
    monkeypatch.setattr(coordination.context, "context", lambda: runtime)
    with coordination.heartbeats(2.5):
        runtime.configure_coordination_service(service_type="standalone")
    assert seen == [{"service_type": "standalone", "heartbeat_timeout_in_ms": 2500}]


class Service:
    """A coordination service in which nobody publishes but this process."""

    def __init__(self):
        self.texts, self.check_collective_ops_peer_health = {}, lambda *_, **__: None
        self.set_config_key_value = self.texts.__setitem__
        self.abort_collective_ops = lambda *_: None

    def get_config_key_value(self, key, timeout_in_ms=0):
        if key not in self.texts:
            raise tf.errors.DeadlineExceededError(None, None, key)
        return self.texts[key]


@pytest.fixture(name="service")
def service_fixture(monkeypatch):
    service = Service()
    monkeypatch.setattr(coordination.context, "context", lambda: service)
    monkeypatch.setattr(coordination, "_failure_of_another", Future)
    for name, value in (("_aborted", []), ("_first_ended", []), ("_ENDED_S", 0.0)):
        monkeypatch.setattr(coordination, name, value)
    return service


def test_a_worker_that_has_ended_is_waited_for_no_more(service):
    zero, one, two = (f"/job:worker/replica:0/task:{index}" for index in range(3))
    for task in (two, zero):
        coordination.report_end(task)
    coordination.listen_for_ends()
    while not coordination._first_ended:
        time.sleep(0.01)
    coordination.check_peers([one])
    for task in (zero, two):
        with pytest.raises(RuntimeError) as error:
            coordination.check_peers([one, task])
        ending = find_peer_error(error.value, CLUSTER)
        assert ending.exit_code == 144 and "lost: its program has ended" in ending.text


def test_no_text_is_waited_for_once_a_call_has_failed_elsewhere(service):
    coordination.abort_collectives("a call failed")
    with pytest.raises(RuntimeError, match="a call failed"):
        coordination.read_published("key", "worker", 0, timeout_s=1.0)


def test_a_service_that_cannot_be_reached_delays_no_error(monkeypatch):
    never = threading.Event()
    unreachable = types.SimpleNamespace(set_config_key_value=lambda key, value: never.wait())
    monkeypatch.setattr(coordination, "_LAST_WORDS_S", 0.1)
    monkeypatch.setattr(coordination.context, "context", lambda: unreachable)
    with pytest.raises(tf.errors.UnavailableError, match="gives no answer in 0.1 s"):
        coordination.publish_failure("key", "text")
    never.set()


def test_a_service_that_cannot_be_reached_has_published_nothing(monkeypatch):
    never = threading.Event()
    unreachable = types.SimpleNamespace(
        get_config_key_value=lambda key, timeout_in_ms: never.wait(5.0) or "late"
    )
    monkeypatch.setattr(coordination, "_ANSWER_S", 0.1)
    monkeypatch.setattr(coordination.context, "context", lambda: unreachable)
    assert coordination.read_if_published("key", 10) is None
    never.set()
