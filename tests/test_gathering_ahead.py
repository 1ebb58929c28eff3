"""Gathering ahead: what the graph of a step lets a gather wait for, and in which order they are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.cluster import mpi
from tfmulti.parallel import activations, prefetch
from tfmulti.step.rows import ReplicaBatch, as_current


class Held(keras.Variable):
    """A weight whose whole value this process has, and gathers all the same."""

    reads = (None, 0)

    def held(self):
        return tf.convert_to_tensor(self.value)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(prefetch, "is_enabled", lambda: True)
    monkeypatch.setattr(activations, "in_replica", lambda: True)
    monkeypatch.setattr(activations, "receive", received)
    monkeypatch.setattr(activations, "gather", lambda weight, held, whole: added(held, whole))


def received(weight, held):
    return tf.identity(held, name=f"gather_{weight.name}")


@tf.custom_gradient
def added(held, whole):
    return whole, lambda upstream: (tf.identity(upstream, name="sum_to_owner"), None)


def layer(name, trainable=True):
    weight = Held(np.eye(3, dtype="float32"), name=name, trainable=trainable)

    def call(x):
        return tf.tanh(tf.matmul(x, weight), name=f"call_{name}")

    return activations.recomputed(None, call, gathered=lambda: [weight]), weight


def trace(model, *weights):
    """The graph of a step: the loss of a model, and its gradients."""

    @tf.function
    def step(x):
        batch = ReplicaBatch(tf.constant(2), tf.constant(2))
        with as_current(batch), tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        with as_current(batch):
            return loss, tape.gradient(loss, [weight.value for weight in weights])

    x = tf.constant(np.linspace(-1, 1, 6).reshape(2, 3), tf.float32)
    return step.get_concrete_function(x).graph, step(x)


def ancestors(op):
    """The names of all that an operation waits for."""
    found, waiting = set(), [op]
    while waiting:
        new = waiting.pop()
        if new.name not in found:
            found.add(new.name)
            waiting += [*(tensor.op for tensor in new.inputs), *new.control_inputs]
    return found


def gathers(graph):
    return [op for op in graph.get_operations() if op.name.startswith("gather_")]


def waits_for(op):
    """Which layers' calls an operation waits for."""
    return {name for name in ancestors(op) if name.startswith("call_")}


def chain(*names):
    layers, weights = zip(*(layer(name) for name in names))

    def model(x):
        for each in layers:
            x = each(x)
        return x

    return model, weights


@pytest.mark.slow
def test_a_layer_gathers_while_the_one_before_it_computes_and_no_earlier():
    model, weights = chain("a", "b", "c", "d")
    graph, _ = trace(model, *weights)
    forward = gathers(graph)[:4]
    assert [op.name for op in forward] == ["gather_a", "gather_b", "gather_c", "gather_d"]
    seen = [waits_for(op) for op in forward]
    assert seen == [set(), set(), {"call_a"}, {"call_a", "call_b"}]


@pytest.mark.slow
def test_backward_the_next_gathers_before_the_sum_of_this_ones_gradients():
    model, weights = chain("a", "b", "c", "d")
    graph, _ = trace(model, *weights)
    order = [
        op.name for op in graph.get_operations() if op.name.startswith(("gather_", "sum_to_owner"))
    ]
    assert [name.split("_")[1] for name in order[4:]] == [
        "d",
        "c",
        "to",
        "b",
        "to",
        "a",
        "to",
        "to",
    ]
    second = {op.name: op for op in gathers(graph)[4:]}
    # c's gather waits for the gradient of what d returned, b's for what d's second run made of it.
    assert "call_d_1" not in waits_for(second["gather_c_1"])
    assert "call_d_1" in waits_for(second["gather_b_1"])
    assert "call_c_1" not in waits_for(second["gather_b_1"])


@pytest.mark.slow
def test_branches_gather_one_ahead_of_the_program():
    (one, a), (two, b), (three, c) = layer("a"), layer("b"), layer("c")
    graph, _ = trace(lambda x: one(x) + two(x) + three(x), a, b, c)
    assert [waits_for(op) for op in gathers(graph)[:3]] == [set(), set(), {"call_a"}]
    assert len(gathers(graph)) == 6


def test_what_needs_no_gradient_is_not_gathered_again():
    (frozen, _), (trained, b) = layer("a", trainable=False), layer("b")
    graph, _ = trace(lambda x: trained(frozen(x)), b)
    assert [op.name for op in gathers(graph)] == ["gather_a", "gather_b", "gather_b_1"]


def test_layers_within_a_block_that_runs_again_gather_for_it():
    (one, a), (two, b), (last, c) = layer("a"), layer("b"), layer("c")
    block = activations.recomputed(None, lambda x: two(one(x)))
    graph, _ = trace(lambda x: last(block(x)), a, b, c)
    names = [op.name.split("_")[1] for op in gathers(graph)]
    # The block's second run is a pass of its own, with a backward pass behind it.
    assert names == ["a", "b", "c", "c", "a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("cores", "spare"),
    [([{0, 1}] * 2, False), ([{0, 1, 2, 3}] * 2, True), ([{0, 1}, {2, 3}], True), ([{0}], False)],
)
def test_each_worker_needs_two_cores_of_its_host(cores, spare):
    class Communicator:
        def allgather(self, mine):
            return [(mine[0], each) for each in cores]

    assert mpi.have_spare_cores(Communicator()) == spare


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_are_those_of_layers_that_gather_as_needed(monkeypatch, seed):
    def result():
        keras.utils.set_random_seed(seed)
        model, weights = chain("a", "b", "c")
        return trace(model, *weights)[1]

    loss, gradients = result()
    monkeypatch.setattr(prefetch, "is_enabled", lambda: False)
    other, others = result()
    assert float(loss) == float(other)
    for one, two in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(one, two)
