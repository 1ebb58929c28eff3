"""Steps are verified with numbers of rows that are related as in the data."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import verification_cases as cases
from keras import layers

import tfmulti
from tfmulti.keras_compat import batch_sizes_of_dataset
from tfmulti.verification import case, rows

UNLIKE = "parts of a batch of which replicas get unequal shares, in train_step"


def trained(data, num_replicas, make=cases.TwoParts, verify="auto", **arguments):
    """Trains one epoch; a warning of verification is an error. Returns the weights and the logs."""
    keras.utils.set_random_seed(3)
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    with tfmulti.create_strategy(
        "mirrored", devices=devices, verify=verify, on_difference="error"
    ).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1), **arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(not verified|of every part)")
        history = model.fit(**data, verbose=0, shuffle=False)
    return np.concatenate([w.ravel() for w in model.get_weights()]), history.history


def gathered():
    return cases.TwoParts(tfmulti.gather_batch)


def is_exact(data, num_replicas, make=cases.TwoParts):
    one, many = trained(data, 1, make), trained(data, num_replicas, make)
    np.testing.assert_allclose(many[0], one[0], atol=1e-6)
    for name in one[1]:
        np.testing.assert_allclose(many[1][name], one[1][name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_replicas, data, make",
    [
        (2, cases.two_parts(12, 4), cases.TwoParts),
        (2, cases.two_parts(12, 5), gathered),
        (3, cases.two_parts(12, 6, drop_remainder=True), cases.TwoParts),
        (3, cases.two_parts(12, 6, 30, 15), cases.TwoParts),
        (2, cases.two_parts(12, 4).repeat(2).prefetch(1), cases.TwoParts),
    ],
)
def test_equal_shares_of_unequal_parts_are_exact(num_replicas, data, make):
    is_exact({"x": data}, num_replicas, make)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "num_replicas, data",
    [
        (3, cases.two_parts(12, 4)),
        (2, cases.two_parts(12, 5)),
        # Only the last batch cannot be shared alike.
        (2, cases.two_parts(12, 4, 30, 11)),
        (2, cases.two_parts(5, 12)),
        (2, cases.two_parts(12, 5, drop_remainder=True)),
        (3, cases.two_parts(120, 40)),
    ],
)
def test_unlike_shares_of_parts_are_told(num_replicas, data):
    with pytest.raises(ValueError, match="nothing has been trained yet") as told:
        trained({"x": data}, num_replicas)
    assert UNLIKE in str(told.value) and "drop_remainder=True" in str(told.value)


@pytest.mark.slow
def test_parts_of_later_batches_that_are_not_known_are_warned_of():
    data = cases.two_parts(12, 4, 30, 10).map(lambda *batch: batch)
    with pytest.raises(UserWarning, match="same share of every part of each batch.* of 12"):
        trained({"x": data}, 2)


@pytest.mark.slow
def test_a_part_of_which_a_replica_gets_no_row_is_told_or_warned_of():
    def last_of_one():
        return cases.two_parts(12, 5, 23, 6)

    # Rows that are gathered need a row on each replica.
    with pytest.raises(ValueError, match=UNLIKE):
        trained({"x": last_of_one()}, 2, gathered)
    with pytest.raises(UserWarning, match="gets a row of every part of each batch.* a first batch"):
        trained({"x": last_of_one().map(lambda *batch: batch)}, 2, gathered)


@pytest.mark.slow
def test_random_numbers_of_unequal_parts_raise_no_alarm():
    def noisy():
        return cases.TwoParts(lambda rows: rows, layers.Dropout(0.5), cases.Noise())

    trained({"x": cases.two_parts(12, 4)}, 2, noisy)


@pytest.mark.slow
def test_evaluate_and_train_on_batch_of_unequal_parts_are_told():
    with tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    ).scope():
        model = cases.TwoParts()
        model.compile("sgd")
    even, odd = ([*cases.two_parts(12, number)][0] for number in (4, 5))
    model.evaluate(cases.two_parts(12, 4), verbose=0)
    with pytest.raises(ValueError, match="`test_step` must give"):
        model.evaluate(cases.two_parts(12, 5), verbose=0)
    model.train_on_batch(*even)
    with pytest.raises(ValueError, match=UNLIKE):
        model.train_on_batch(*odd)


def two_heads(num_replicas):
    """A model of Keras's own parts, with a head for each of two inputs."""
    keras.utils.set_random_seed(3)
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    with tfmulti.create_strategy("mirrored", devices=devices).scope():
        inputs = {name: keras.Input((1,), name=name) for name in "ab"}
        outputs = {f"to_{name}": layers.Dense(1, name=f"to_{name}")(inputs[name]) for name in "ab"}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"to_a": "mse", "to_b": "mse"}, metrics={"to_b": ["mae"]})
    return model


def of_two_heads(number):
    def part(size):
        values = np.random.RandomState(size).rand(2 * size, 1).astype("float32")
        return tf.data.Dataset.from_tensor_slices(values).batch(size)

    labels = {"to_a": part(12), "to_b": part(number)}
    return tf.data.Dataset.zip(({"a": part(12), "b": part(number)}, labels))


FEEDS = {
    "zip": lambda model, data: model.fit(data, verbose=0),
    "map": lambda model, data: model.fit(data.map(lambda x, y: (x, y)), verbose=0),
    "generator": lambda model, data: model.fit((each for each in data), verbose=0),
    "batch": lambda model, data: [model.train_on_batch(*each) for each in data],
}


@pytest.mark.slow
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.filterwarnings("ignore:Your input ran out", "ignore:`shuffle=True` was passed")
def test_a_model_of_kerass_own_with_unequal_parts_gives_one_devices_result(feed):
    models = [two_heads(number) for number in (1, 3)]
    FEEDS[feed](models[0], of_two_heads(5))
    with pytest.warns(UserWarning, match="Every replica computes `train_step`"):
        FEEDS[feed](models[1], of_two_heads(5))
    with pytest.warns(UserWarning, match="Every replica computes `predict_step`"):
        # Of which the last replica would get no row.
        predicted = models[1].predict(of_two_heads(4).map(lambda x, y: x), verbose=0)
    pairs = zip(models[0].get_weights(), models[1].get_weights())
    assert max(np.abs(one - other).max() for one, other in pairs) < 1e-6
    assert predicted["to_b"].shape == (8, 1)


@pytest.mark.slow
def test_such_a_model_is_not_replicated_where_shares_are_equal():
    models = [two_heads(number) for number in (1, 2)]
    for model in models:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.fit(of_two_heads(4), verbose=0, shuffle=False)
    pairs = zip(models[0].get_weights(), models[1].get_weights())
    assert max(np.abs(one - other).max() for one, other in pairs) < 1e-6


def arrays(num_rows, batch_size):
    x, y = cases.rows(num_rows)
    return {"x": x, "y": y, "batch_size": batch_size}


def dataset(num_rows, batch_size, **arguments):
    data = tf.data.Dataset.from_tensor_slices(cases.rows(num_rows))
    return {"x": data.batch(batch_size, **arguments)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_replicas, data",
    [(3, arrays(40, 16)), (2, dataset(18, 8)), (2, dataset(17, 8, drop_remainder=True))],
)
def test_no_replica_is_empty_where_none_will_be(num_replicas, data):
    is_exact(data, num_replicas, cases.Matches)


@pytest.mark.slow
def test_no_replica_is_empty_in_distributed_data_either():
    keras.utils.set_random_seed(3)
    strategy = tfmulti.create_strategy(
        "mirrored", devices=["CPU:0", "CPU:1"], on_difference="error"
    )
    with strategy.scope():
        model = cases.Matches()
        model.compile("sgd")
    train = tfmulti.distribute_train(cases.rows(18), strategy, global_batch_size=8, seed=1)
    model.fit(train, verbose=0)
    with pytest.raises(ValueError, match="fewer rows than replicas"):
        model.fit(
            tfmulti.distribute_train(cases.rows(17), strategy, global_batch_size=8, seed=1),
            verbose=0,
        )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", [dataset(17, 8), dict(x=dataset(18, 8)["x"].map(lambda *b: b))])
def test_a_replica_that_may_be_empty_is_told_with_that_reason(data):
    with pytest.raises(ValueError, match="in a batch with fewer rows than replicas") as told:
        trained(data, 2, cases.Matches)
    is_known = batch_sizes_of_dataset(data["x"]) is not None
    assert ("A batch of your data leaves a replica" in str(told.value)) == is_known


@pytest.mark.slow
def test_sizes_of_batches_are_those_that_are_read():
    def count(batch):
        return tuple(part.shape[0] for part in tf.nest.flatten(batch))

    one, two = tf.data.Dataset.range(19), tf.data.Dataset.range(7)
    for first, second, drop in itertools.product((3, 4, 19, 20), (1, 2, 3), (False, True)):
        data = tf.data.Dataset.zip((one.batch(first, drop_remainder=drop), two.batch(second)))
        for each in (data, data.repeat(2), data.prefetch(1), data.shuffle(9)):
            read = {count(batch) for batch in each}
            assert set(batch_sizes_of_dataset(each) or ()) == read
    assert batch_sizes_of_dataset(one.batch(4).map(lambda x: x)) is None
    assert batch_sizes_of_dataset(one.batch(4).repeat()) == [(4,), (3,)]


@pytest.mark.parametrize(
    "part",
    [
        tf.ragged.constant([[1, 2], [3], [4, 5, 6]] * 4),
        tf.sparse.from_dense(np.eye(12)),
        tf.eye(12),
    ],
    ids=["ragged", "sparse", "dense"],
)
def test_workers_get_the_chiefs_rows_of_every_kind(part):
    def received(strategy, data):
        return data

    chosen = rows.Rows((part, tf.range(12)))
    chosen.keep_all()
    chosen.parts = chosen.spread([4, 4])
    assert rows.of_the_chief(chosen, ("known",), tf.distribute.get_strategy(), received) == (
        "known",
    )
    assert [int(rows.rows.count_rows(each)) for each in chosen.parts] == [4, 4]
    pairs = zip(*(tf.nest.flatten(x, expand_composites=True) for x in (part, chosen.all_parts[0])))
    for sent, kept in pairs:
        np.testing.assert_array_equal(sent, kept)


def test_few_rows_keep_their_shares():
    for number, in_chunks in itertools.product((2, 3, 5), (True, False)):
        for counts in itertools.product((0, 1, 4, 6, 7, 12, 60, 127), repeat=2):
            if len(set(counts)) == 2 and max(counts) >= number:
                alike = case.are_alike(counts, number, in_chunks)
                assert case.are_alike(case.few_rows(counts, number), number, in_chunks) == alike
                unlike = case.few_rows_unlike(counts, number, in_chunks)
                if alike and 0 not in counts:
                    assert not case.are_alike(unlike, number, in_chunks)
