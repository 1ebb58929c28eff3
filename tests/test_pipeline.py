"""Where a pipeline cuts a model, and how the rows pass; the workers are in `multi_worker/`."""

import itertools
import random

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from keras import layers

import tfmulti
from tfmulti import keras_compat
from tfmulti.mpi.all_reduce import MpiAllReduce
from tfmulti.parallel import cutting, layer_costs
from tfmulti.parallel.pipeline import pipeline
from tfmulti.parallel.worker_stages import WorkerStages
from tfmulti.train.config import TrainConfig


def chain(*sizes):
    hidden = [layers.Dense(size, name=f"layer_{i}") for i, size in enumerate(sizes)]
    return keras.Sequential([keras.Input((16,)), *hidden])


def starts_of(model, num_parts):
    return cutting.starts_by_cost(model, layer_costs.estimated_costs(model), num_parts)


def test_stages_compute_about_as_much_as_each_other():
    assert starts_of(chain(16, 16, 16, 16), 2) == [2]
    # The first layer multiplies as many weights as all others.
    assert starts_of(chain(512, 16, 2, 2, 2), 2) == [1]
    assert starts_of(chain(64, 64, 64, 64, 64, 64), 3) == [2, 4]


def test_a_recurrent_layer_computes_each_position_of_its_input():
    tokens = [keras.Input((8,), dtype="int32"), layers.Embedding(60, 48, mask_zero=True)]
    hidden = [layers.Bidirectional(layers.LSTM(24, return_sequences=True)), layers.GRU(32)]
    model = keras.Sequential([*tokens, *hidden, layers.Dense(2)])
    names = [layer.name for layer in keras_compat.layers_of_nodes(model)]
    assert starts_of(model, 2) == [names.index(hidden[1].name)]


def test_of_cuts_that_are_nearly_as_even_the_one_that_sends_least_is_taken():
    model = chain(64, 8, 64, 64)
    # Its calls send 64, 8 and 64 numbers of a row.
    assert cutting.starts_by_cost(model, [50, 50, 50, 50], 2) == [2]
    assert cutting.starts_by_cost(model, [50, 49, 1, 50], 2) == [2]
    assert cutting.starts_by_cost(model, [50, 2, 50, 1], 2) == [2]
    # The cut at 1 would send more, that at 2 has a costlier part.
    assert cutting.starts_by_cost(model, [50, 20, 20, 10], 2) == [1]


def test_the_most_even_cut_is_found_among_all():
    model = chain(*[16] * 8)
    chance = np.random.RandomState(0)
    for num_parts in (2, 3, 4):
        for _ in range(10):
            costs = chance.exponential(size=8).tolist()
            every = itertools.combinations(range(1, 8), num_parts - 1)
            least = min(costliest(costs, starts) for starts in every)
            found = cutting.starts_by_cost(model, costs, num_parts)
            assert costliest(costs, found) <= 1.1 * least + 1e-9


def costliest(costs, starts):
    bounds = [0, *starts, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip(bounds[:-1], bounds[1:]))


def test_layers_are_timed_without_the_model():
    """Estimates take a recurrent layer for one position, and a layer without weights for free."""
    hidden = [layers.LSTM(32), layers.Dense(8), layers.Lambda(lambda x: x)]
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((256, 8)), *hidden])
    before, drawn = [weight.numpy() for weight in model.weights], random.getstate()
    lstm, dense, nothing = layer_costs.measured_costs(model, rows=4)
    assert lstm > 2 * dense and nothing > 0
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    # Worker 0 alone times them, and all workers draw the same seeds afterwards.
    assert random.getstate() == drawn


def test_a_layer_that_cannot_be_copied_counts_as_free():
    class Fixed(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            return super().get_config()

    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Fixed(3)])
    with pytest.warns(UserWarning, match="could not be copied"):
        assert layer_costs.measured_costs(model, rows=2)[1] == 0


@pytest.mark.parametrize(
    "given", [{"measure_rows": 0}, {"measure_rows": True}, {"measure_rows": 4, "stages": "layer_1"}]
)
def test_rows_to_time_layers_on_are_for_cuts_without_names(given):
    with pytest.raises(ValueError, match="without names in `stages`"):
        pipeline(chain(4, 4), **given)


def test_a_table_is_looked_up():
    table = layers.Embedding(10_000, 8)
    model = keras.Sequential([keras.Input((4,)), table, layers.Dense(32), layers.Dense(32)])
    assert starts_of(model, 2) == [2]


def test_stages_begin_at_named_layers():
    assert cutting.starts_at(chain(4, 4, 4, 4), ["layer_1", "layer_3"]) == [1, 3]
    for names in (["layer_0"], ["layer_3", "layer_1"], ["layer_1", "layer_1"], ["other"]):
        with pytest.raises(ValueError, match="in the model's order"):
            cutting.starts_at(chain(4, 4, 4, 4), names)


def test_a_model_of_fewer_layers_than_stages_is_refused():
    with pytest.raises(ValueError, match="at least that many layers"):
        starts_of(chain(4, 4), 3)


def test_one_replica_has_the_whole_model():
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = chain(4, 4)
        assert pipeline(model, stages=2) is model
    assert "call" not in vars(model)


class Clipped(keras.Sequential):
    def call(self, inputs, **settings):
        return keras.ops.clip(super().call(inputs, **settings), -1, 1)


def test_a_call_of_the_models_own_is_refused():
    model = Clipped([keras.Input((16,)), layers.Dense(4), layers.Dense(4)])
    with pytest.raises(ValueError, match="call Clipped.call, which would be left out.*in a layer"):
        pipeline(model)


def test_pipelines_have_a_layer_that_they_share_in_the_same_stage(monkeypatch):
    class Parameters:
        def place(self, weight, stage, stages):
            weight.owner, weight.stages = stage, stages

    monkeypatch.setattr("tfmulti.step.parameters.of_strategy", lambda strategy: Parameters())
    shared, other = layers.Dense(16, name="shared"), layers.Dense(16)

    def place(*hidden, starts=(1,)):
        model = keras.Sequential([keras.Input((16,)), *hidden])
        WorkerStages(model, list(starts), 1, False)._place_weights()

    place(shared, other)
    place(shared, layers.Dense(4))
    with pytest.raises(ValueError, match="shared/kernel, in stage 1 of 2 of .* stage 0 of 2 of"):
        place(first := layers.Dense(16), shared)
    # Nothing of that model has been placed.
    assert not hasattr(first.kernel, "stages")
    with pytest.raises(ValueError, match="shared/kernel, in stage 0 of 3 of .* stage 0 of 2 of"):
        place(shared, layers.Dense(16), layers.Dense(4), starts=(1, 2))


def test_replicas_of_one_worker_are_refused():
    with replicas.create_strategy(2).scope():
        model = chain(4, 4)
        with pytest.raises(ValueError, match="workers with one replica each"):
            pipeline(model)


def test_the_command_line_keeps_weights_with_their_stages():
    assert TrainConfig(pipeline_stages=2).sharded == "parameters"
    assert TrainConfig(shard="state").sharded == "state"
    with pytest.raises(ValueError, match="Leave --shard out"):
        TrainConfig(pipeline_stages=2, shard="state")


class Mailbox:
    """Stands for MPI's communicator between two workers: what is sent waits for its receiver."""

    def __init__(self, rank, boxes):
        self.rank, self.size, self._boxes = rank, 2, boxes

    def Isend(self, piece, dest, tag):
        self._boxes.setdefault((self.rank, dest, tag), []).append(piece.copy())
        return self

    def Test(self):
        return True

    def Iprobe(self, source, tag):
        return bool(self._boxes.get((source, self.rank, tag)))

    def Recv(self, piece, source, tag):
        piece[:] = self._boxes[source, self.rank, tag].pop(0)


@pytest.mark.parametrize("in_graph", [False, True])
def test_tensors_of_any_kind_and_shape_arrive(in_graph):
    boxes: dict = {}
    one, other = (MpiAllReduce(Mailbox(rank, boxes), lambda: None) for rank in range(2))
    sent = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([[True], [False]]),
        np.zeros((0, 5), np.int64),
        np.float64(3.0),
    ]
    specs = [tf.TensorSpec([None] * np.ndim(each), np.asarray(each).dtype) for each in sent]
    specs.append(tf.TensorSpec([None], tf.bfloat16))
    half = tf.constant([1.0, 2.5], tf.bfloat16)

    def exchange():
        one.send([*map(tf.convert_to_tensor, sent), half], 1)
        one.send([tf.constant([7])], 1)
        return other.receive_sent(specs, 0), other.receive_sent([tf.TensorSpec([1], tf.int32)], 0)

    received, more = (tf.function(exchange) if in_graph else exchange)()
    for expected, found in zip([*sent, half.numpy()], received, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected)
        assert found.numpy().dtype == np.asarray(expected).dtype
    assert more[0].numpy().tolist() == [7]


def test_the_graph_tells_what_an_output_has_a_gradient_with_respect_to():
    found = {}

    @tf.function(autograph=False)
    def trace(a, b, c):
        tensors = [a, b, c]

        def note(name, output):
            found[name] = keras_compat.sources_of(output, tensors)

        note("sum", 2.0 * a + tf.nn.gelu(c))
        note("itself", b)
        note("stopped", a * tf.stop_gradient(b))
        note("rounded to numbers", tf.gather(a, tf.cast(b, tf.int32)))
        note("compared", tf.where(b > 0, c, 0.0))
        note("branch", tf.cond(a[0] > 0, lambda: b, lambda: c))
        note("loop", tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * c), (0, a))[1])
        note("function", tf.function(lambda x: x * b, autograph=False)(a))
        note("list", tf.map_fn(lambda x: x * 2.0, b))
        note("nothing", tf.zeros(3))
        return 0

    trace(*tf.ones([3, 3]))
    assert found == {
        "sum": {0, 2},
        "itself": {1},
        "stopped": {0},
        "rounded to numbers": {0},
        "compared": {2},
        "branch": {1, 2},
        "loop": {0, 2},
        "function": {0, 1},
        "list": {1},
        "nothing": set(),
    }


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"stages": ["typo"]}, "`stages` must be names of layers .* Received: stages=.'typo'"),
        ({"micro_batches": 1.5}, "`micro_batches` must be a whole number from 1. Received: .*1.5"),
    ],
)
def test_on_one_device_too_wrong_arguments_are_told(settings, rule):
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(3))])
    assert tfmulti.pipeline(model, np.int64(2), micro_batches=np.int64(2)) is model
    with pytest.raises(ValueError, match=rule):
        tfmulti.pipeline(model, **settings)
