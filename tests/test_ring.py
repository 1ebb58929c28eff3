"""Sums for owners, and tensors of owners, over TensorFlow's ring; workers take turns here."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfmulti import keras_compat, topology
from tfmulti.step import owners
from tfmulti.strategies import multi_worker, ring

# As TensorFlow orders twelve workers, which is by the texts of their names.
ORDER = [0, 2, 1]
SHAPES = [[7], [2, 50], [], [30], [3, 0], [1]]
OWNED_BY = [2, 0, 1, 2, 1, 2]


@pytest.fixture(name="calls")
def calls_fixture(monkeypatch):
    """The calls of three workers of one process."""
    created, strategy = [], tf.distribute.get_strategy()
    monkeypatch.setattr(keras_compat, "order_of_workers", lambda *_: ORDER)
    for worker in range(3):
        monkeypatch.setattr(topology, "worker_index", lambda _, worker=worker: worker)
        created.append(ring.RingCalls(strategy))
    return created


def in_turns(monkeypatch, calls, run):
    """Returns the results of all workers, and the rows that each has exchanged."""
    sent, results = {}, []

    def exchange(_, rows):
        place = ORDER.index(worker)
        number = len(received)
        sent.setdefault((worker, number), rows)
        others = [sent.get((other, number), rows) for other in ORDER]
        received.append(tf.stack([other[place] for other in others]))
        return received[-1]

    monkeypatch.setattr(keras_compat, "exchange_rows", exchange)
    # What a worker receives is known once all have sent.
    for _ in range(2):
        results = []
        for worker, call in enumerate(calls):
            received: list = []
            results.append(run(worker, call))
    return results, sent


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("most_bytes", [1, 100, 2**20])
def test_each_sum_arrives_at_its_owner(monkeypatch, calls, dtype, most_bytes):
    monkeypatch.setattr(ring, "_ROUND_BYTES", most_bytes)
    draws = np.random.default_rng(0)
    values = [[draws.normal(size=shape).astype(dtype) for shape in SHAPES] for _ in calls]

    def run(worker, call):
        return call.reduce_to_owners([tf.constant(v) for v in values[worker]], OWNED_BY)

    sums, sent = in_turns(monkeypatch, calls, run)
    for place, (each, owner) in enumerate(zip(zip(*values), OWNED_BY)):
        for worker, found in enumerate(sums):
            expected = sum(each) if worker == owner else np.zeros(SHAPES[place])
            np.testing.assert_allclose(found[place], expected, rtol=1e-6, atol=1e-6)
            assert found[place].dtype == dtype
    size = np.dtype(dtype).itemsize
    # A worker sends a row to each worker; no row is empty for all.
    assert all(rows.shape[0] == 3 and rows.shape[1] > 0 for rows in sent.values())
    assert all(tf.size(rows) * size <= max(most_bytes, 3 * size) for rows in sent.values())


def test_sums_wait_so_that_two_rounds_are_in_memory_at_a_time(monkeypatch, calls):
    monkeypatch.setattr(ring, "_ROUND_BYTES", 3 * 4 * 10)
    monkeypatch.setattr(keras_compat, "exchange_rows", lambda _, rows: tf.abs(rows))

    @tf.function
    def reduce(value):
        return calls[0].reduce_to_owners([value], [0])

    graph = reduce.get_concrete_function(tf.TensorSpec([50])).graph
    exchanges = [op for op in graph.get_operations() if op.type == "Abs"]

    def needed_by(op):
        # TensorFlow leaves the waiting to the inputs where all of them wait.
        before = {*op.control_inputs, *(tensor.op for tensor in op.inputs)}
        found = [each for each in before if each in exchanges]
        return set(map(exchanges.index, found)).union(*map(needed_by, before - set(found)))

    assert [needed_by(op) for op in exchanges] == [set(), set(), {0}, {1}, {2}]


@pytest.mark.parametrize("shape", [[5], [2, 1000], []])
def test_a_tensor_of_its_owner_arrives_in_pieces(monkeypatch, calls, shape):
    monkeypatch.setattr(ring, "_PIECE_BYTES", 300)
    value = tf.random.normal(shape, seed=1)
    sent: list = []

    def broadcast(_, piece, shape, is_owner):
        if is_owner:
            sent.append(piece)
            return piece
        return tf.ensure_shape(next(arriving), shape)

    monkeypatch.setattr(keras_compat, "broadcast_from", broadcast)
    np.testing.assert_array_equal(calls[1].receive(value, 1, value.shape), value)
    arriving = iter(sent)
    received = calls[0].receive(tf.zeros([0]), 1, value.shape)
    np.testing.assert_array_equal(received, value)
    assert max(map(tf.size, sent)) * 4 <= 300


@pytest.mark.parametrize("is_owner", [False, True])
def test_a_broadcast_runs_whose_result_nothing_needs(is_owner):
    """Another worker may need it: where one has a weight, and assigns it, the others do not."""
    launcher = types.SimpleNamespace(
        _device="CPU:0", _group_size=2, _group_key=1, _next_instance_key=lambda: 1
    )
    operations = types.SimpleNamespace(_launchers=[launcher])
    extended = types.SimpleNamespace(_cross_device_ops=operations)

    @tf.function
    def step(value):
        keras_compat.broadcast_from(types.SimpleNamespace(extended=extended), value, [3], is_owner)
        return value + 1.0

    graph = step.get_concrete_function(tf.TensorSpec([3])).graph
    [broadcast] = [op for op in graph.get_operations() if "Bcast" in op.type]
    assert broadcast in graph.control_outputs


@pytest.mark.parametrize(
    ("value", "shape", "sent_as"),
    [
        (tf.constant([True, False]), [2], "int32"),
        (tf.constant([7, 2**32 - 1], "uint32"), [2], "int64"),
        (tf.zeros([0, 4]), [0, 4], "float32"),
    ],
)
def test_what_a_broadcast_cannot_send_is_added(monkeypatch, calls, value, shape, sent_as):
    added = []
    monkeypatch.setattr(owners, "all_reduce", lambda _, own: added.append(own) or own)
    monkeypatch.delattr(keras_compat, "broadcast_from")
    for worker, given in ((1, value), (0, value[:0])):
        monkeypatch.setattr(topology, "worker_index", lambda _, worker=worker: worker)
        received = calls[worker].receive(given, 1, tf.TensorShape(shape))
        assert received.dtype == value.dtype
        np.testing.assert_array_equal(received, value if worker == 1 else tf.zeros_like(value))
    assert [(each.shape, each.dtype) for each in added] == [(shape, sent_as)] * 2


def test_gradients_are_sent_in_buckets_over_the_ring_unless_the_user_chose_others():
    def bytes_of(*given):
        return multi_worker._collective_options(*given).bytes_per_pack

    assert bytes_of("ring", None) == 16 * 2**20
    assert (bytes_of("nccl", None), bytes_of("ring", 8)) == (0, 8)


def test_a_gather_sends_the_largest_tensors_of_all_owners_together():
    """Each owner sends as much as that with the most: small beside large ones would cost double."""
    large = owners._ROUND_BYTES // 4
    sizes, owned_by = [large, 3, large, 4, 5, large], [0, 1, 1, 1, 1, 0]
    values = [tf.TensorSpec([size]) for size in sizes]
    sent = [
        [[sizes[place] for place in part] for part in parts]
        for parts in owners._all_rounds(values, owned_by, (), 2, by_mpi=False)
    ]
    assert sent == [[[large], [large]], [[large], [5, 4, 3]]]
