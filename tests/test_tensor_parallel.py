"""How a layout splits weights, and what cannot be split; the workers are in `multi_worker/`."""

import types

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from keras import layers
from test_pipeline import Mailbox

import tfmulti
from tfmulti.mpi.all_reduce import MpiAllReduce
from tfmulti.parallel import tensor, tensor_attention, tensor_layers
from tfmulti.parallel.group_rows import Group
from tfmulti.parallel.tensor import tensor_parallel
from tfmulti.step import owners, split_weights
from tfmulti.step.split_weights import Split
from tfmulti.train.config import TrainConfig


def built(model):
    model.built = True
    return model


def block():
    given = keras.Input((4,), dtype="int32")
    one = layers.Embedding(10, 6, name="table")(given)
    two = layers.MultiHeadAttention(2, 3, name="attention")(one, one)
    return keras.Model(given, layers.Dense(5, name="wide")(two))


def test_one_replica_has_whole_layers():
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = block()
        call = model.get_layer("wide").call
        assert tensor_parallel(model, {"wide/kernel": "column"}) is model
    assert model.get_layer("wide").call == call


def test_replicas_of_one_worker_are_refused():
    with replicas.create_strategy(2).scope():
        with pytest.raises(
            ValueError, match="`tensor_parallel` needs workers with one replica each.*--mpi"
        ):
            tensor_parallel(block(), {"wide/kernel": "column"})


@pytest.mark.parametrize(
    "layout, told",
    [
        ({}, "layout={}"),
        ("wide", "layout='wide'"),
        ({"wide": "diagonal"}, "Received: layout={'wide': 'diagonal'}"),
        ({"nothing": "row"}, "Received: 'nothing', which matches nothing"),
        ({"wide/bias": "column"}, "'wide/bias', which matches wide/bias"),
        ({"wide": "vocabulary"}, "Received: 'vocabulary' for wide/kernel, of a Dense"),
        ({"table": "row"}, "Received: 'row' for table/embeddings, of a Embedding"),
        ({"wide": "row", "w": "column"}, "'wide' and 'w', which both match wide/kernel"),
    ],
)
def test_layouts_that_fit_no_layer_are_told_on_one_device_too(layout, told):
    with pytest.raises(ValueError, match=".*" + told.replace("{", r"\{")):
        tensor_parallel(block(), layout)


def test_models_and_layers_that_cannot_be_split_are_told():
    def constrained():
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, kernel_constraint="max_norm", name="wide")]
        )

    def adapted():
        model = block()
        model.get_layer("wide").enable_lora(2)
        return model

    def in_a_loop():
        wide = layers.TimeDistributed(layers.Dense(4, name="wide"), name="each")
        return keras.Sequential([keras.Input((3, 4)), wide])

    def compiled():
        model = block()
        model.compile("sgd", "mse")
        return model

    for create, told in (
        (constrained, "wide/kernel, with a constraint"),
        (adapted, "wide/kernel, with LoRA"),
        (in_a_loop, "with the layer each around it"),
        (compiled, "must be called before `compile`"),
        (lambda: keras.Sequential([layers.Dense(3)]), "has not been built"),
        (lambda: built(keras.Model()), "no weights"),
    ):
        with pytest.raises(ValueError, match=told):
            tensor_parallel(create(), {"wide/kernel": "column"})


def test_a_pattern_must_be_a_regular_expression():
    with pytest.raises(ValueError, match=r"Received: 'wide/\(kernel': missing \)"):
        tensor_parallel(block(), {"wide/(kernel": "column"})


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_make_the_whole(parts, axis):
    whole = np.arange(35.0).reshape(5, 7)
    splits = [Split((5, 7), axis, parts, worker) for worker in range(parts)]
    found = [split.take(whole) for split in splits]
    assert [each.shape for each in found] == [split.shape_of() for split in splits]
    np.testing.assert_array_equal(np.concatenate(found, axis), whole)
    padded = sum(split.pad(tf.constant(each)) for split, each in zip(splits, found))
    np.testing.assert_array_equal(padded, whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_of_sparse_gradients_make_the_whole(axis):
    rows = tf.constant([4, 0, 4])
    whole = tf.IndexedSlices(tf.reshape(tf.range(21.0), [3, 7]), rows, tf.constant([5, 7]))
    parts = [Split((5, 7), axis, 2, worker) for worker in (0, 1)]
    padded = [split.pad(split.take(whole)) for split in parts]
    assert [each.shape for each in padded] == [(5, 7), (5, 7)]
    both = sum(tf.convert_to_tensor(each) for each in padded)
    np.testing.assert_array_equal(both, tf.convert_to_tensor(whole))


def test_a_split_weight_has_no_owner():
    class Variable:
        shape, dtype, split = (4, 4), "float32", None

    one, other = Variable(), Variable()
    other.split = Split((4, 4), 0, 2, 0)
    assert [owners.owned_bytes(each) for each in (one, other)] == [64, 0]


@pytest.mark.parametrize(
    "equation, shape, kind, axes",
    [
        ("abc,cde->abde", (None, 2, 3), "column", (1, -2)),
        ("abcd,cde->abe", (None, 4), "row", (0, -2)),
        ("...x,xy->...y", 4, "column", (1, -1)),
        ("...x,xy->...y", 4, "row", (0, -1)),
        ("ab,ab->ab", (4,), "row", None),
        ("ab,cb->ca", (4,), "column", None),
        # The axis, counted from either end, depends on the rank of the inputs.
        ("ab...,bc->ac...", (4, 5), "column", None),
        ("ab...,bc->ac...", (4, 5), "row", None),
    ],
)
def test_equations_tell_where_the_features_are(equation, shape, kind, axes):
    found = tensor_layers.axes_of(layers.EinsumDense(equation, shape), kind)
    assert found == (None if axes is None else tensor_layers.Axes(*axes))


class Strategy:
    """Stands for one of two workers."""

    def __init__(self, rank, boxes):
        self.extended = MpiAllReduce(Mailbox(rank, boxes), lambda: None)
        self.rank = rank


def test_two_workers_exchange_tensors_of_different_sizes():
    boxes: dict = {}
    one, other = (MpiAllReduce(Mailbox(rank, boxes), lambda: None) for rank in range(2))
    # The mailbox of one worker has what the other one has sent before it asks.
    one.send([tf.constant([[1.0, 2.0]])], 1)
    [received] = other.exchange_among([tf.constant([[3.0], [4.0]])], [0])
    np.testing.assert_array_equal(received, [[1.0, 2.0]])
    [back] = one.receive_sent([tf.TensorSpec([None, None], tf.float32)], 1)
    np.testing.assert_array_equal(back, [[3.0], [4.0]])


def test_a_group_is_of_neighbors(monkeypatch):
    monkeypatch.setattr("tfmulti.topology.worker_index", lambda strategy: strategy.rank)
    assert [Group(Strategy(rank, {}), 2).me for rank in range(4)] == [0, 1, 0, 1]


def test_a_group_is_any_whole_number(monkeypatch):
    monkeypatch.setattr("tfmulti.topology.num_workers", lambda strategy: 4)
    monkeypatch.setattr("tfmulti.step.parameters.refuse_several_replicas", lambda *args: None)
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(exchange_among=print))
    assert type(tensor._number_in_group(strategy, np.int64(2))) is int
    with pytest.raises(ValueError, match="Received: group=2.0, 4 workers"):
        tensor._number_in_group(strategy, 2.0)


def paired(*hidden, outputs=None, layout=None):
    """The pairs that a chain of layers has."""
    model = keras.Sequential([keras.Input((4,)), *hidden])
    if outputs is not None:
        model = keras.Model(model.inputs, [model.get_layer(name).output for name in outputs])
    layout = layout or {"wide": "column", "back": "row"}
    chosen = [(each, layout[each.name]) for each in model.layers if each.name in layout]
    return [[each.name for each in both] for _, both in tensor_layers.pairs_of(model, chosen)]


def test_features_stay_split_between_a_column_split_and_the_row_split_that_alone_takes_them():
    def wide(activation=None, **more):
        return layers.Dense(6, activation, name="wide", **more)

    def back():
        return layers.Dense(5, name="back")

    assert paired(wide("gelu"), back(), layers.Dense(2)) == [["wide", "back"]]
    assert paired(wide(), back()) == [["wide", "back"]]
    assert not paired(wide("softmax"), back())
    assert not paired(wide(layers.Softmax()), back())
    assert not paired(wide(lambda x: x), back())
    assert not paired(wide(activity_regularizer="l2"), back())
    assert not paired(wide(), layers.Dropout(0.5), back())
    assert not paired(wide(), back(), outputs=["wide", "back"])
    assert not paired(wide(), back(), layout={"wide": "column"})
    assert not paired(wide(), back(), layout={"wide": "row", "back": "row"})


def test_features_are_whole_in_a_model_with_a_call_of_its_own():
    class Between(keras.Model):
        def call(self, x):
            return self.get_layer("back")(keras.ops.softmax(self.get_layer("wide")(x)))

    wide, back = layers.Dense(6, name="wide"), layers.Dense(5, name="back")
    given = keras.Input((4,))
    model = Between(given, back(wide(given)))
    assert not tensor_layers.pairs_of(model, [(wide, "column"), (back, "row")])


def test_features_are_whole_once_another_layer_comes_between_the_two():
    wide, back = layers.Dense(6, name="wide"), layers.Dense(5, name="back")
    model = keras.Sequential([keras.Input((4,)), wide, back])
    [(pair, _)] = tensor_layers.pairs_of(model, [(wide, "column"), (back, "row")])
    pair.set_calls()
    with tensor_layers._calling.set_to(model):
        assert pair.is_open()
        model.pop()
        assert not pair.is_open()
        model.add(layers.Softmax())
        model.add(back)
        assert not pair.is_open()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_whole_numbers_are_multiplied_with_the_fractions_of_weights(policy):
    rows = tf.constant([[1, 2], [3, 4]])
    for layer in (
        layers.Dense(3, dtype=policy),
        layers.EinsumDense("ab,bc->ac", (3,), dtype=policy),
    ):
        expected = layer(rows)
        found = tensor_layers._product(layer, rows, layer.kernel.value)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(tf.cast(found, "float32"), tf.cast(expected, "float32"))


def test_features_are_whole_between_the_parts_of_a_checkpointed_model():
    hidden = [layers.Dense(64, name=f"dense_{i}") for i in range(9)]
    model = keras.Sequential([keras.Input((64,)), *hidden])
    chosen = [(hidden[1], "column"), (hidden[2], "row")]
    assert len(tensor_layers.pairs_of(model, chosen)) == 1
    tfmulti.checkpoint_activations(model)
    assert not tensor_layers.pairs_of(model, chosen)


def test_a_mask_of_one_row_is_for_the_rows_of_its_worker_alone():
    query, mask = tf.zeros([3, 2, 4]), np.array([[[True, False], [False, True]]])
    every = tensor_attention._for_each_row(mask, query)
    np.testing.assert_array_equal(every, np.repeat(mask, 3, axis=0))
    np.testing.assert_array_equal(tensor_attention._for_each_row(every, query), every)
    assert tensor_attention._for_each_row(mask[0], query).shape == (2, 2)


def test_a_value_for_a_split_weight_must_have_the_shape_of_the_whole():
    class Weight:
        path, shape, split = "table/embeddings", (51, 16), Split((51, 16), 0, 2, 0)
        value = tf.Variable(np.zeros((25, 16)))

    class Values:
        kept = None

        def keep_value(self, variable, value):
            self.kept = value

    values = Values()
    with pytest.raises(ValueError, match=r"(?s)Received: a value of shape \(60, 16\).*table"):
        split_weights._assign(Weight, np.ones((60, 16)), values)
    assert values.kept is None and not Weight.value.numpy().any()
    split_weights._assign(Weight, np.ones((51, 16)), values)
    assert values.kept.shape == (51, 16) and Weight.value.numpy().all()


def test_the_command_line_splits_layers():
    config = TrainConfig(tensor_parallel="dense/kernel=column,(a=b)/kernel=row")
    assert config.layout == {"dense/kernel": "column", "(a=b)/kernel": "row"}
    assert config.sharded == "parameters" and TrainConfig().layout == {}
    for wrong in ({"shard": "state"}, {"pipeline_stages": 2}):
        with pytest.raises(ValueError, match="Leave --"):
            TrainConfig(tensor_parallel="dense/kernel=column", **wrong)
    with pytest.raises(ValueError, match="PATTERN=KIND"):
        TrainConfig(tensor_parallel="dense/kernel")
