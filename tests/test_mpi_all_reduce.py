"""Sums over workers through MPI: buckets, order, errors; and real jobs that MPI has started."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfmulti import topology
from tfmulti.cluster import Cluster, mpi, peers, resolve_cluster
from tfmulti.mpi import all_reduce, calls, order
from tfmulti.step import owners

SCRIPT = Path(__file__).parent / "multi_worker" / "mpi_worker.py"


class Communicator:
    """mpi4py's, as one of two workers sees it whose other one sends the same."""

    size, rank = 2, 0

    def __init__(self, hold=None):
        self.sent, self.hold = [], hold

    def _note(self, array):
        if self.hold is not None:
            self.hold.wait()
        self.sent.append(array.nbytes)

    def Allreduce(self, array, result):  # noqa: N802
        self._note(array)
        result[...] = array * 2

    def Alltoall(self, array, result):  # noqa: N802
        self._note(array)
        result[...] = array[[0, 0]]

    def Reduce(self, array, result, root):  # noqa: N802
        self._note(array)
        if root == self.rank:
            result[...] = array * 2

    def Allgather(self, array, result):  # noqa: N802
        self._note(array)
        result[...] = array


def values():
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (), (1000, 50), (7,), (2, 2)]
    return [tf.constant(rng.normal(size=shape).astype("float32")) for shape in shapes]


def test_sums_for_owners_of_tensors_whose_shape_no_graph_knows():
    """As gradients of a `Dense` layer's kernel for inputs with three axes."""
    sender = all_reduce.MpiAllReduce(Communicator(), lambda: None)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])] * 2)
    def reduce(mine, other):
        return sender.reduce_to_owners([mine, other], [0, 1])

    mine, other = reduce(tf.ones([3, 4]), tf.ones([2, 4]))
    np.testing.assert_array_equal(mine, 2 * np.ones([3, 4]))
    np.testing.assert_array_equal(other, np.zeros([2, 4]))


@pytest.mark.parametrize("bucket_bytes", [1, 100, 4 * 2**20])
@pytest.mark.parametrize("eager", [True, False])
def test_sums_have_the_values_and_shapes_of_what_was_sent(bucket_bytes, eager):
    sender = all_reduce.MpiAllReduce(Communicator(), lambda: None, bucket_bytes)
    add = sender.add if eager else tf.function(sender.add)
    for _ in range(2):
        for added, value in zip(add(values()), values()):
            assert added.shape == value.shape
            np.testing.assert_array_equal(added, value * 2)


def test_small_tensors_are_packed_and_large_ones_go_alone_the_last_first():
    communicator = Communicator()
    all_reduce.MpiAllReduce(communicator, lambda: None, bucket_bytes=400_000).add(values())
    assert communicator.sent == [200_000, 4 * (12 + 1 + 7 + 4)]
    communicator.sent.clear()
    all_reduce.MpiAllReduce(communicator, lambda: None, bucket_bytes=1).add(values())
    assert communicator.sent == [4 * 4, 4 * 7, 200_000, 4, 4 * 12]


def test_sums_for_owners_are_made_in_the_order_of_the_backward_pass():
    """One owner after the other, they would wait for the gradients of the first layer."""
    communicator = Communicator()
    sender = all_reduce.MpiAllReduce(communicator, lambda: None, bucket_bytes=1)
    sums = sender.reduce_to_owners(values(), [0, 1, 1, 0, 1])
    assert communicator.sent == [4 * 4, 4 * 7, 200_000, 4, 4 * 12]
    for place, (added, value) in enumerate(zip(sums, values())):
        np.testing.assert_array_equal(added, value * 2 if place in (0, 3) else value * 0)


def test_new_weights_come_from_one_owner_after_the_other_and_free_what_mpi_has_filled(monkeypatch):
    """Else a worker would hold as many received weights as there are owners, besides the old."""
    monkeypatch.setattr(topology, "num_workers", lambda strategy: 3)
    monkeypatch.setattr(topology, "worker_index", lambda strategy: 0)
    filled, received = {}, []

    def broadcast(tensors, owned_by):
        received.append(owned_by)
        for tensor in tensors:
            filled[tensor.shape[0]] = np.arange(tensor.shape[0], dtype="float32")
        return [tf.convert_to_tensor(filled[tensor.shape[0]]) for tensor in tensors]

    extended = SimpleNamespace(worker_devices=("CPU:0",), broadcast=broadcast)
    large = [5_000_000, 5_000_001, 5_000_002, 3, 4]
    weights = [tf.zeros([size]) for size in large]
    new = owners.from_owners(SimpleNamespace(extended=extended), weights, [2, 0, 1, 1, 0])
    for place, value in new:
        assert place in (0, 2, 3)
        np.testing.assert_array_equal(value, filled[large[place]])
        assert not np.shares_memory(value.numpy(), filled[large[place]])
    assert received == [[2], [0], [1], [1, 0]]


def test_large_tensors_go_in_pieces_where_that_is_asked_for():
    communicator = Communicator()
    sender = all_reduce.MpiAllReduce(communicator, lambda: None, 1, piece_bytes=80_000)
    for added, value in zip(sender.add(values()), values()):
        np.testing.assert_array_equal(added, value * 2)
    assert communicator.sent == [16, 28, 80_000, 80_000, 40_000, 4, 48]


def test_no_piece_is_larger_than_mpi_can_count():
    # Nothing writes to it, so it takes no memory.
    large = np.empty([3, 2**28], np.float32)
    sender = all_reduce.MpiAllReduce(Communicator(), lambda: None)
    assert [piece.nbytes for piece in sender._pieces(large)] == [2**30] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_sent_as_halves_and_added_in_full_precision(dtype):
    communicator = Communicator()
    sender = all_reduce.MpiAllReduce(communicator, lambda: None)
    # The other worker sends the first half of what this one does.
    value = tf.cast(tf.tile(tf.random.normal([51], seed=1), [2]), dtype)
    [added] = tf.function(sender.add)([value])
    assert added.dtype == value.dtype
    np.testing.assert_array_equal(tf.cast(added, "float32"), tf.cast(value, "float32") * 2)
    assert communicator.sent == [2 * 102, 102]


class OfWideNumbers(Communicator):
    """Adds as most MPIs do, which do not know half precision; its groups are of both workers."""

    group = SimpleNamespace(Incl=list)

    def Create_group(self, group):  # noqa: N802
        return self

    def _note(self, array):
        assert array.itemsize >= 4
        super()._note(array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["add_among", "reduce_to_owners"])
def test_halves_are_added_in_full_precision_for_some_workers_too(method, dtype):
    sender = all_reduce.MpiAllReduce(OfWideNumbers(), lambda: None)
    values = [tf.constant([1.5, 2.0], dtype), tf.constant([3.0]), tf.constant([0.5], dtype)]
    workers = [0, 1] if method == "add_among" else [0] * len(values)
    added = tf.function(getattr(sender, method))(values, workers)
    for new, old in zip(added, values, strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(tf.cast(new, "float32"), 2 * tf.cast(old, "float32"))


def test_odd_numbers_of_halves_are_filled_up():
    sender = all_reduce.MpiAllReduce(Communicator(), lambda: None)
    [added] = sender.add([tf.ones([1], tf.bfloat16)])
    assert added.shape == (1,)
    assert float(added[0]) == 2


def test_integers_are_added():
    sender = all_reduce.MpiAllReduce(Communicator(), lambda: None)
    [added] = sender.add([tf.constant([1, 2**40], tf.int64)])
    np.testing.assert_array_equal(added, [2, 2**41])


def test_whoever_waits_asks_whether_the_others_are_there():
    never = threading.Event()

    def check():
        raise RuntimeError("worker 1 does not answer heartbeats")

    sender = all_reduce.MpiAllReduce(Communicator(hold=never), check)
    with pytest.raises(tf.errors.OpError, match="does not answer heartbeats"):
        tf.function(sender.add)([tf.ones([2])])
    never.set()


class Broken(Communicator):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def Allreduce(self, array, result):  # noqa: N802
        raise self.error


def test_an_error_of_mpi_reaches_the_step():
    kind = type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})
    sender = all_reduce.MpiAllReduce(Broken(kind("no route")), lambda: None)
    with pytest.raises(tf.errors.OpError, match="Broken pipe to another worker: no route"):
        tf.function(sender.add)([tf.ones([2])])


def test_an_error_of_this_worker_alone_is_not_called_a_loss_of_another():
    cluster = Cluster({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "worker", 0)
    sender = all_reduce.MpiAllReduce(Broken(MemoryError("no 8 GiB")), lambda: None)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no 8 GiB") as caught:
        tf.function(sender.add)([tf.ones([2])])
    assert peers.find_peer_error(caught.value, cluster) is None


class Sends(Communicator):
    """One whose messages are at once under way, and fail as they are told to."""

    def __init__(self, at_send=None, at_test=None):
        super().__init__()
        self.at_send, self.at_test, self.tested = at_send, at_test, threading.Event()

    def Isend(self, array, dest, tag):  # noqa: N802
        self._note(array)
        if self.at_send is not None:
            raise self.at_send
        return self

    def Test(self):  # noqa: N802
        self.tested.set()
        if self.at_test is not None:
            raise self.at_test
        return True


def test_what_is_sent_is_not_kept():
    communicator = Sends()
    sender = all_reduce.MpiAllReduce(communicator, lambda: None)
    for _ in range(3):
        sender.send([tf.ones([4])], 1)
    sender.add([tf.ones([2])])
    assert len(communicator.sent) == 7
    assert not sender._calls._calls


@pytest.mark.parametrize("when", ["at_send", "at_test"])
def test_an_error_of_a_message_reaches_the_next_call(when):
    kind = type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})
    communicator = Sends(**{when: kind("no route")})
    sender = all_reduce.MpiAllReduce(communicator, lambda: None)
    sender.send([tf.ones([4])], 1)
    if when == "at_test":
        assert communicator.tested.wait(10)
    for _ in range(2):
        with pytest.raises(tf.errors.OpError, match="Broken pipe to another worker: no route"):
            tf.function(sender.add)([tf.ones([2])])


def told_while_mpi_waits(monkeypatch, sizes):
    """What each of two workers is told that adds so many numbers, until both have compared."""
    monkeypatch.setattr(calls, "COMPARE_S", 0.1)
    hold, texts, told = threading.Event(), {}, {}

    def add(rank):
        def exchange(text):
            texts[rank] = text
            if len(texts) == 2 and sizes[0] == sizes[1]:
                hold.set()
            return {other: text for other, text in texts.items() if other != rank}

        made = order.CollectiveOrder(rank, exchange)
        sender = all_reduce.MpiAllReduce(Communicator(hold), lambda: None, order=made)
        try:
            sender.add([tf.ones([sizes[rank]])])
        except (RuntimeError, tf.errors.OpError) as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=add, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    hold.set()
    assert len(texts) == 2
    return told


def test_workers_that_wait_in_different_collectives_are_told_which(monkeypatch):
    told = told_while_mpi_waits(monkeypatch, (2, 3))
    received = "as collective 1, all-reduce of shape ({},) on worker {}, all-reduce of shape ({},)"
    assert received.format(2, 0, 3) in told[0]
    assert received.format(3, 1, 2) in told[1]


def test_workers_that_wait_for_long_in_the_same_collective_go_on(monkeypatch):
    assert told_while_mpi_waits(monkeypatch, (2, 2)) == {}


def test_an_environment_that_is_given_is_not_mpis():
    assert resolve_cluster(environ={"PMI_SIZE": "2"}) is None
    assert mpi.size_in_environment({"OMPI_COMM_WORLD_SIZE": "3"}) == 3


def test_mpiexec_does_not_kill_who_still_works_after_another_is_done(mpiexec):
    program = """
import time
from tfmulti.cluster import mpi
from tfmulti.runtime import command_line

def main():
    if mpi.world().Get_rank() == 1:
        time.sleep(1)
        print("saved")
    return 0

command_line.run_and_exit(main)
"""
    assert mpiexec("-c", program) == "saved\n"


@pytest.mark.slow
def test_mpiexec_needs_no_tf_config(mpiexec):
    """Two processes; the digest of the weights is the same on both, and one device's."""
    train = ["-m", "tfmulti.train", "--epochs=1", "--steps_per_epoch=4"]
    output = mpiexec(*train, "--strategy=multi_worker")
    assert "over mpi (MPI has started the job): 2 replicas" in output
    # The lines of the two can run into one another.
    digests = re.findall(r"weights_sha256=([0-9a-f]{64})", output)
    assert len(digests) == 2 and len(set(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing", "expected"),
    [
        ("kill", 1, "is lost"),
        ("raise", 1, "its own mistake"),
        ("raise", 0, "its own mistake"),
        ("exit", 1, "is lost"),
    ],
)
def test_a_launched_job_speaks_mpi_and_tells_who_is_lost(tmp_path, how, failing, expected):
    launch = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--mpi"]
    command = [*launch, f"--log_dir={tmp_path}", "--", sys.executable, str(SCRIPT)]
    done = subprocess.run(
        [*command, how, str(failing)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode not in (0, 2), done.stdout
    # A worker that waits in MPI's end for the others would never come to its own.
    assert how != "exit" or "worker 1 failed with exit code 3" in done.stderr
    text = (tmp_path / f"worker_{1 - failing}.log").read_text()
    assert "over mpi" in text
    assert expected in [line for line in text.splitlines() if line.startswith("error: ")][-1]


def test_a_process_that_waits_in_intel_mpi_lets_others_have_its_core(monkeypatch):
    """With four workers on two cores a step took six times as long."""
    monkeypatch.delenv("I_MPI_THREAD_YIELD", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=0)))
    mpi.world.__wrapped__()
    assert os.environ["I_MPI_THREAD_YIELD"] == "2"
    monkeypatch.setenv("I_MPI_THREAD_YIELD", "0")
    mpi.world.__wrapped__()
    assert os.environ["I_MPI_THREAD_YIELD"] == "0"
