"""What stands for a model's configuration and for data, by which workers compare theirs."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti import marks
from tfmulti.strategies import alike, program_order


def create(units=3, activation="relu", seed=None, loss="mse", rate=0.1, penalty=None):
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(units, activation, kernel_regularizer=penalty),
        keras.layers.Dropout(0.2, seed=seed),
        keras.layers.Lambda(lambda x: 2 * x),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(rate), loss, metrics=["mae"])
    return model


def test_names_and_seeds_are_left_out():
    assert alike._descriptions(create()) == alike._descriptions(create(seed=3))


@pytest.mark.parametrize(
    "change, part",
    [
        ({"units": 4}, "layer 2 (Dense)"),
        ({"activation": "tanh"}, "layer 2 (Dense)"),
        ({"penalty": keras.regularizers.L2(0.3)}, "layer 2 (Dense)"),
        ({"loss": "mae"}, "loss"),
        ({"rate": 0.2}, "optimizer"),
    ],
)
def test_each_part_has_a_number_of_its_own(change, part):
    one, other = alike._descriptions(create()), alike._descriptions(create(**change))
    assert [name for name in one if one[name] != other[name]] == [part]


@pytest.mark.parametrize(
    "setting, value",
    [
        ("COMPRESSION", "bfloat16"),
        ("SYNCHRONIZE_EVERY", 4),
        ("SHARDS", types.SimpleNamespace(shards_parameters=False)),
    ],
)
def test_settings_of_distributed_optimizers_are_compared(setting, value):
    one, other = create(), create()
    getattr(marks, setting).set(other.optimizer, value)
    one, other = alike._descriptions(one), alike._descriptions(other)
    differing = [name for name in one if one[name] != other[name]]
    assert differing == ["settings of DistributedOptimizer"]


def test_parts_without_a_configuration_are_left_out():
    class Own(keras.layers.Layer):
        def __init__(self, thing):
            super().__init__()

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((4,)), Own(object()), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert "layer 3 (Dense)" in alike._descriptions(model)
    assert "layer 2 (Own)" not in alike._descriptions(model)


def of_code(text, file):
    """The description of a model with a function as a layer."""
    function = eval(compile(f"lambda x: {text}", file, "eval"))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(function)])
    return alike._descriptions(model)


def test_functions_are_compared_without_the_files_that_they_stand_in():
    text = "[x * each for each in (1.0, 2.0)][0] if x is not None else 'a' in {'a', 'b'}"
    one, other = of_code(text, "/a/train.py"), of_code(text.replace("2.0", "3.0"), "/a/train.py")
    assert one == of_code(text, "/b/train.py")
    assert {name for name in one if one[name] != other[name]} == {"layer 2 (Lambda)"}


ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")


@pytest.mark.parametrize(
    "other",
    [ROWS[:20], ROWS[::-1], ROWS + 1, ROWS.astype("int32"), {"x": ROWS, "y": ROWS}],
    ids=["fewer", "reversed", "other numbers", "rounded", "two parts"],
)
def test_other_data_are_seen(other):
    assert not alike.are_same_data(alike.describe_data(ROWS), alike.describe_data(other))


@pytest.mark.parametrize("change", [lambda x: x * np.float32(1 + 1e-6), tf.constant])
def test_the_same_data_are_the_same(change):
    assert alike.are_same_data(alike.describe_data(ROWS), alike.describe_data(change(ROWS)))


def test_numbers_that_are_not_finite_hide_no_others():
    gaps, spikes = ROWS.copy(), ROWS.copy()
    gaps[3, 0], spikes[3, 0] = np.nan, np.inf
    for each in (gaps, spikes):
        given = alike.describe_data(each)
        assert alike.are_same_data(given, alike.describe_data(each * np.float32(1 + 1e-6)))
        assert not alike.are_same_data(given, alike.describe_data(each + 1))
        assert not alike.are_same_data(given, alike.describe_data(ROWS))


def test_texts_are_compared_and_other_data_are_not():
    texts = np.array(["a", "b"])
    assert not alike.are_same_data(alike.describe_data(texts), alike.describe_data(texts[::-1]))
    assert alike.describe_data(x for x in [1]) == []


def test_what_streams_are_made_of_is_compared():
    def describe(files, folder="a", seed=1):
        names = [f"/{folder}/{file}.png" for file in files]
        stream = tf.data.Dataset.from_tensor_slices((names, ROWS)).map(lambda name, row: row)
        stream = stream.shuffle(9, seed, reshuffle_each_iteration=False)
        return alike.describe_data(tfmulti.distribute_train(stream, create_strategy(1), 8))

    files = [f"{number:02}" for number in range(40)]
    assert describe(files) == describe(files, "b")
    for other in (describe(files[::-1]), describe(files, seed=2)):
        assert not alike.are_same_data(describe(files), other)


def of_files(files, folder="a", seed=1, within=1, shard=None, count=1):
    data = tf.data.TextLineDataset([f"/{folder}/{file}" for file in files]).take(count)
    data = data.shuffle(9, seed).interleave(lambda x: tf.data.Dataset.range(3).shuffle(3, within))
    return (data.shard(*shard) if shard else data).batch(4).prefetch(count)


@pytest.mark.parametrize(
    "other",
    [dict(files="ba"), dict(seed=2), dict(within=2), dict(shard=(2, 0)), dict(count=2)],
    ids=lambda other: next(iter(other)),
)
def test_what_plain_datasets_are_made_of_is_compared(other):
    described = alike.describe_data(of_files("ab"))
    assert described == alike.describe_data(of_files("ab", "b"))
    differing = alike.describe_data(of_files(**{"files": "ab"} | other))
    assert not alike.are_same_data(described, differing)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert alike.describe_data(of_files("ab").with_options(options)) == []


def test_settings_that_depend_on_the_host_are_no_difference():
    def describe(cores):
        data = tf.data.Dataset.range(9).map(lambda x: x, num_parallel_calls=cores)
        return alike.describe_data(data.prefetch(cores))

    assert describe(2) == describe(4)


CLASSES = np.arange(40) % 10


@pytest.mark.parametrize(
    "name, value",
    [
        ("y", np.where(CLASSES == 3, 7, np.where(CLASSES == 7, 3, CLASSES))),
        ("y", CLASSES + 900),
        ("sample_weight", np.linspace(1, 2, 40)),
        ("validation_data", (ROWS, CLASSES[::-1])),
    ],
    ids=["two classes swapped", "next class", "weights", "validation"],
)
def test_other_labels_and_weights_are_seen(name, value):
    given = {"x": ROWS, "y": CLASSES, "sample_weight": np.ones(40), "batch_size": 8}
    given["validation_data"] = (ROWS, CLASSES, None)
    if name == "y" and value.max() > 900:
        given["y"] = CLASSES + 899
    here, there = (alike.describe_arguments(each) for each in (given, given | {name: value}))
    unlike = [each for each in here if not alike.are_same_data(here[each], there[each])]
    assert unlike == [name]


class Table:
    """As of pandas: brackets take columns."""

    def __init__(self, values):
        self.iloc, self.shape = values, values.shape

    def __array__(self, dtype=None, copy=None):
        return self.iloc


def test_tables_and_empty_arrays_are_compared():
    assert alike.describe_data(Table(ROWS)) == alike.describe_data(ROWS)
    assert alike.describe_data(np.zeros((0, 3))) == [[[0, 3], 0, []]]


def test_fit_compares_all_its_data(monkeypatch):
    seen = []
    monkeypatch.setattr(alike, "compare", lambda model, name, given: seen.append(given))
    with create_strategy(1).scope():
        model = create()
    weights = np.ones(40)
    model.fit(ROWS[:, [0, 0, 1, 2]], ROWS, 40, 1, 0, sample_weight=weights, validation_split=0.5)
    assert set(alike.describe_arguments(seen[0])) == {"x", "y", "sample_weight"}


@pytest.mark.parametrize(
    "given, settings",
    [
        ({"x": [1.0, 2.0], "batch_size": 8, "verbose": 1, "y": None}, "batch_size=8"),
        ({"epochs": 1, "shuffle": True, "validation_freq": 1}, ""),
        ({"epochs": 2, "class_weight": {0: 1.0}}, "class_weight={0: 1.0}, epochs=2"),
        ({"callbacks": [], "validation_data": (ROWS, ROWS)}, "validation_data=..."),
        ({"validation_freq": [1, 5], "steps": np.int64(3)}, "steps=3, validation_freq=[1, 5]"),
    ],
)
def test_a_call_is_described_by_what_all_workers_must_give_alike(given, settings):
    assert program_order.describe_call("fit", given) == f"fit({settings})"


def test_a_call_is_described_by_the_callbacks_that_all_workers_must_have():
    logger, saver = keras.callbacks.CSVLogger("log"), tfmulti.callbacks.Checkpoint("folder")
    for callbacks in (saver, [logger, saver], keras.callbacks.CallbackList([logger, saver])):
        told = program_order.describe_call("fit", {"callbacks": callbacks})
        assert told == "fit(callbacks=[Checkpoint, ...])"
