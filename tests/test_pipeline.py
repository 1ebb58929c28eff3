"""Where a pipeline cuts a model, and how the rows pass; the workers are in `multi_worker/`."""

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from keras import layers

import tfmulti
from tfmulti import keras_compat
from tfmulti.mpi.all_reduce import MpiAllReduce
from tfmulti.parallel import cutting
from tfmulti.parallel.pipeline import pipeline
from tfmulti.train.config import TrainConfig


def chain(*sizes):
    hidden = [layers.Dense(size, name=f"layer_{i}") for i, size in enumerate(sizes)]
    return keras.Sequential([keras.Input((16,)), *hidden])


def test_stages_compute_about_as_much_as_each_other():
    assert cutting.costly_starts(chain(16, 16, 16, 16), 2) == [2]
    # The first layer multiplies as many weights as all others.
    assert cutting.costly_starts(chain(512, 16, 2, 2, 2), 2) == [1]
    assert cutting.costly_starts(chain(64, 64, 64, 64, 64, 64), 3) == [2, 4]


def test_of_cuts_that_are_as_even_the_one_that_sends_least_is_taken():
    given = keras.Input((8,))
    x = layers.Dense(8)(given)
    x = layers.Concatenate()([layers.Activation("relu")(x), layers.Activation("tanh")(x)])
    model = keras.Model(given, layers.Dense(4)(layers.Activation("linear")(x)))
    [start] = cutting.costly_starts(model, 2)
    nodes = keras_compat.nodes_of(model)
    assert sum(size for x in nodes[start - 1][1] for size in x.shape[1:]) <= 16


def test_a_table_is_looked_up():
    table = layers.Embedding(10_000, 8)
    model = keras.Sequential([keras.Input((4,)), table, layers.Dense(32), layers.Dense(32)])
    assert cutting.costly_starts(model, 2) == [2]


def test_stages_begin_at_named_layers():
    assert cutting.starts_at(chain(4, 4, 4, 4), ["layer_1", "layer_3"]) == [1, 3]
    for names in (["layer_0"], ["layer_3", "layer_1"], ["layer_1", "layer_1"], ["other"]):
        with pytest.raises(ValueError, match="in the model's order"):
            cutting.starts_at(chain(4, 4, 4, 4), names)


def test_a_model_of_fewer_layers_than_stages_is_refused():
    with pytest.raises(ValueError, match="as many layers"):
        cutting.costly_starts(chain(4, 4), 3)


def test_one_replica_has_the_whole_model():
    model = chain(4, 4)
    call = model.call
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        assert pipeline(chain(4, 4), stages=2) is not None
    assert model.call == call


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
