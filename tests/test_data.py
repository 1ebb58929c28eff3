import contextlib
import itertools
import warnings

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf

import tfmulti
from tfmulti.data import distribute_eval, distribute_train
from tfmulti.data.audit import compare
from tfmulti.sharding import ShardPlan, epoch_order


def create_strategy(num_replicas):
    # The model below tells each replica's rows, which verification would refuse.
    return replicas.create_strategy(num_replicas, verify="never")


def numbered(num_examples):
    rows = np.arange(num_examples)
    return rows[:, None].astype("float32"), rows


class Watcher(keras.Model):
    """Notes the row numbers of every step that it trains on."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[0], data[1]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group

        def note(replica, y):
            self.seen.append((int(replica), y.tolist()))
            return np.int64(0)

        with tf.control_dependencies([tf.numpy_function(note, [replica, y], tf.int64)]):
            return {"rows": tf.reduce_sum(tf.cast(tf.size(y), tf.float32)) + 0 * tf.reduce_sum(x)}

    def test_step(self, data):
        return {"rows": tf.reduce_sum(data[0])}


def steps_seen(strategy, fit):
    """Runs `fit(model)` and returns the row numbers of each step, in the order of the replicas."""
    with strategy.scope():
        model = Watcher()
        model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model)
    size = strategy.num_replicas_in_sync
    per_replica = [[rows for r, rows in model.seen if r == replica] for replica in range(size)]
    return [sum(rows, []) for rows in zip(*per_replica)]


def expected_steps(num_examples, batch, seed, epochs):
    orders = [epoch_order(num_examples, seed, epoch).tolist() for epoch in epochs]
    return [order[i : i + batch] for order in orders for i in range(0, num_examples, batch)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_fit_sees_the_order_of_seed_and_epoch(num_replicas):
    strategy = create_strategy(num_replicas)
    train = distribute_train(numbered(43), strategy, 16, seed=7)
    test = distribute_eval(numbered(5), strategy, 4)
    seen = steps_seen(
        strategy, lambda model: model.fit(train, epochs=3, verbose=0, validation_data=test)
    )
    assert seen == expected_steps(43, 16, 7, range(3))
    assert train.position == (2, 3)


def test_a_second_fit_goes_on_with_the_next_epoch():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)

    def fit(model):
        model.fit(train, epochs=1, verbose=0)
        model.fit(train, epochs=3, initial_epoch=1, verbose=0)

    assert steps_seen(strategy, fit) == expected_steps(10, 4, 1, range(3))


def test_the_position_can_be_set_for_initial_epoch():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)
    train.set_position(epoch=2)

    def fit(model):
        model.fit(train, epochs=4, initial_epoch=2, verbose=0)

    assert steps_seen(strategy, fit) == expected_steps(10, 4, 1, [2, 3])
    with pytest.raises(ValueError, match="Received: epoch=0, step=4, with 3 steps per epoch"):
        train.set_position(0, 4)


def test_the_position_can_be_set_within_an_epoch():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)
    train.set_position(epoch=1, step=2)
    seen = steps_seen(strategy, lambda model: model.fit(train, epochs=2, verbose=0))
    assert seen == [*expected_steps(10, 4, 1, [1])[2:], *expected_steps(10, 4, 1, [2])]


def test_steps_per_epoch_walks_through_endless_passes():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1, steps_per_epoch=2)
    seen = steps_seen(strategy, lambda model: model.fit(train, epochs=3, verbose=0))
    assert seen == expected_steps(10, 4, 1, range(2))


def test_several_steps_a_call_take_the_same_steps():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)

    def fit(model):
        model.steps_per_execution = 2
        model.fit(train, epochs=2, verbose=0)

    seen, expected = steps_seen(strategy, fit), expected_steps(10, 4, 1, range(2))
    # Within one call TensorFlow may tell Python of the second step first.
    for call in (slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6)):
        assert sorted(sum(seen[call], [])) == sorted(sum(expected[call], []))
    assert train.position == (1, 3)


def test_fit_does_not_warn_of_its_own_default():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = create_strategy(1)
        train = distribute_train(numbered(20), strategy, 16)
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(train, verbose=0)
    assert not [str(each.message) for each in caught if "shuffle" in str(each.message)]


def test_by_hand_it_gives_global_batches_epoch_by_epoch():
    train = distribute_train(numbered(10), create_strategy(3), 4, seed=1)
    rows = [y.numpy().tolist() for _ in range(2) for _, y in train]
    assert rows == expected_steps(10, 4, 1, range(2))


def test_looking_at_batches_does_not_move_training():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)

    def look(*_, **__):
        next(iter(train))
        next(iter(train.take(1)))

    def fit(model):
        look()
        looking = keras.callbacks.LambdaCallback(on_epoch_end=look, on_train_batch_end=look)
        model.fit(train, epochs=2, verbose=0, callbacks=[looking])

    assert steps_seen(strategy, fit) == expected_steps(10, 4, 1, range(2))
    assert train.position == (1, 3)


BEHIND_OTHERS = {
    "repeat": lambda data: data.repeat(),
    "options": lambda data: data.with_options(tf.data.Options()),
    "cache": lambda data: data.cache(),
    "take": lambda data: data.map(lambda x, y: (x, y)).take(2),
}


@pytest.mark.parametrize("call", ["fit", "validation", "loop", "outside"])
@pytest.mark.parametrize("name", BEHIND_OTHERS)
def test_training_data_behind_another_call_of_tf_data_are_refused(name, call):
    strategy = create_strategy(1 if call == "outside" else 2)
    data = BEHIND_OTHERS[name](distribute_train(numbered(10), strategy, 4))
    with strategy.scope() if call != "outside" else contextlib.nullcontext():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    calls = {
        "validation": lambda: model.fit(*numbered(10), validation_data=data, verbose=0),
        "loop": lambda: strategy.experimental_distribute_dataset(data),
    }
    with pytest.raises(ValueError, match="its own `map`.* Received: .*Dataset.* `steps_per_epoch`"):
        calls.get(call, lambda: model.fit(data, steps_per_epoch=2, verbose=0))()
    assert not model.built


def test_of_data_in_their_own_order_only_padded_ones_are_refused_behind_another_call():
    strategy = create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    test = distribute_eval(numbered(10), strategy, 4)
    assert model.predict(test.take(2), verbose=0).shape == (8, 1)
    padded = distribute_eval(numbered(10), strategy, 4, remainder="pad")
    with pytest.raises(ValueError, match="padding stays"):
        model.predict(padded.take(2), verbose=0)


def test_a_model_outside_of_the_scope_moves_the_position():
    train = distribute_train(numbered(10), create_strategy(1), 4, seed=1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(train, epochs=2, verbose=0)
    assert train.position == (1, 3)


def test_keras_makes_more_iterators_than_epochs():
    # The canary: were it one each, the epoch could be counted by iterators.
    made = []

    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1)
    distribute_to = train.distribute_to

    class CountingPass:
        def __init__(self, inner):
            self.inner = inner

        def __iter__(self):
            made.append(1)
            return iter(self.inner)

    train.distribute_to = lambda strategy: CountingPass(distribute_to(strategy))
    steps_seen(strategy, lambda model: model.fit(train, epochs=3, verbose=0))
    assert len(made) > 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("remainder", ["uneven", "pad", "drop", "repeat_first"])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_streams_and_arrays_agree_without_shuffling(remainder, num_replicas):
    strategy = create_strategy(num_replicas)
    data = numbered(10)
    arrays = distribute_eval(data, strategy, 4, remainder=remainder)
    stream = tf.data.Dataset.from_tensor_slices(data)
    streams = distribute_eval(stream, strategy, 4, remainder=remainder)
    for ours, theirs in zip(arrays, streams, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(streams.cardinality()) == int(arrays.cardinality())


def test_a_stream_is_shuffled_by_the_seed_alone():
    stream = tf.data.Dataset.range(20).map(lambda i: (tf.cast(i[None], tf.float32), i))

    def order(seed, tf_seed):
        keras.utils.set_random_seed(tf_seed)
        train = distribute_train(stream, create_strategy(2), 8, seed=seed)
        return [np.concatenate([y for _, y in train]).tolist() for _ in range(2)]

    assert order(3, tf_seed=1) == order(3, tf_seed=2)
    assert order(3, tf_seed=1) != order(4, tf_seed=1)
    first, second = order(3, tf_seed=1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_dicts_strings_and_weights_pass_through():
    data = ({"a": np.arange(5.0), "s": np.array(list("abcde"))}, np.arange(5), np.ones(5))
    batch = next(iter(distribute_eval(data, create_strategy(2), 4)))
    assert batch[0]["s"].numpy().tolist() == [b"a", b"b", b"c", b"d"]
    assert [t.shape[0] for t in tf.nest.flatten(batch)] == [4] * 4


def weights_of_two_inputs(num_replicas):
    rng = np.random.RandomState(0)
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    one, other, y = (rng.randn(7, size).astype("float32") for size in (3, 3, 1))
    strategy = create_strategy(num_replicas) if num_replicas else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = [keras.Input((3,)), keras.Input((3,))]
        parts = [keras.layers.Dense(2, "tanh")(each) for each in inputs]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Subtract()(parts)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    if strategy is None:
        model.fit([one, other], y, batch_size=7, epochs=2, verbose=0)
        return [model.predict([one, other], verbose=0), *model.get_weights()]
    model.fit(distribute_train(([one, other], y), strategy, 7), epochs=2, verbose=0)
    test = distribute_eval(([one, other],), strategy, 4)
    return [model.predict(test, verbose=0), *model.get_weights()]


def test_a_list_of_inputs_is_a_tuple_of_them_as_in_keras():
    x, y = numbered(5)
    (one, other), _ = next(iter(distribute_eval(([x, x + 5], y), create_strategy(2), 4)))
    assert one.numpy().ravel().tolist() == [0, 1, 2, 3]
    assert other.numpy().ravel().tolist() == [5, 6, 7, 8]


@pytest.mark.slow
def test_a_list_of_inputs_trains_the_model_that_keras_trains_of_it():
    for found, expected in zip(weights_of_two_inputs(2), weights_of_two_inputs(0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_each_worker_reads_its_own_rows_only():
    class Counting(np.ndarray):
        taken = []

        def take(self, rows, axis=None, **kwargs):
            Counting.taken.extend(np.asarray(rows).tolist())
            return np.asarray(self).take(rows, axis, **kwargs)

    from tfmulti.data.sources import ArraySource

    x = np.arange(10.0).view(Counting)
    plan = ShardPlan(10, 4, 2, seed=None)
    start = tf.data.Dataset.from_tensors((np.int64(0), np.int64(0)))
    dataset = ArraySource((x,), 10).batches(plan, (1,), start, lambda *_: None)
    assert len(list(dataset)) == 3
    assert sorted(Counting.taken) == [2, 3, 6, 7, 9]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tf.data.Dataset.range(4).repeat(), ["number of examples", "-1 endless"]),
        (tf.data.Dataset.range(4).filter(lambda i: i > 1), ["assert_cardinality"]),
        ((np.zeros((3, 2)), np.zeros(4)), ["same number of rows", "[3, 4] rows"]),
        (iter([1]), ["`data` must be arrays", "list_iterator"]),
        ((np.zeros((3, 2)), 5), ["one row for each example", "single value"]),
        ([np.zeros((3, 2)), np.zeros(3)], ["must be a tuple", "a list of 2", "((x1, x2),)"]),
        (
            np.array([[1.5, True], [2, None]], object),
            ["only strings", "NoneType, bool, float, int"],
        ),
        (np.array(["a", 1.5, b"c"], object), ["dtype object with values of type float"]),
        ((np.zeros(2), np.array(["2026-01-01", "2026-01-02"], "M8[D]")), ["datetime64[D]"]),
    ],
)
def test_data_that_cannot_be_laid_out_is_refused(data, words):
    with pytest.raises(ValueError) as caught:
        distribute_train(data, create_strategy(2), 2, seed=0)
    assert all(word in str(caught.value) for word in ["Received: ", *words])


@pytest.mark.parametrize("seed", [-1, None, 1.5, True])
def test_a_seed_must_be_a_number_that_all_workers_can_share(seed):
    with pytest.raises(ValueError, match="`seed` must be a whole number from 0"):
        distribute_train(numbered(4), create_strategy(2), 2, seed=seed)


@pytest.mark.parametrize("shuffle_buffer", [-1, None, 1e4])
def test_the_size_of_a_shuffle_buffer_is_whole(shuffle_buffer):
    with pytest.raises(ValueError, match="`shuffle_buffer` must be a whole number from 0"):
        distribute_train(numbered(4), create_strategy(2), 2, shuffle_buffer=shuffle_buffer)


def test_strategies_of_tensorflow_are_refused_where_they_have_several_replicas():
    devices = [f"{replicas.DEVICE}:{number}" for number in range(2)]
    stock = tf.distribute.MirroredStrategy(devices)
    for distribute in (distribute_train, distribute_eval):
        with pytest.raises(ValueError, match="one of tfmulti's.* Received: Mirrored.*2 replicas"):
            distribute(numbered(4), stock, 2)
        batches = list(distribute(numbered(4), tf.distribute.get_strategy(), 2))
        assert len(batches) == 2


def test_pad_needs_a_place_for_weights():
    with pytest.raises(ValueError, match='remainder="pad"'):
        distribute_train(np.zeros((5, 2)), create_strategy(2), 4, seed=0, remainder="pad")


def doubled(x, y):
    return tf.concat([x, x], 0), tf.concat([y, y], 0)


def larger_than_zero(x, y):
    return tf.boolean_mask(x, x[:, 0] > 0), tf.boolean_mask(y, x[:, 0] > 0)


def weights_after(num_replicas, data, map_func, **settings):
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "tanh", name="dense")])
        model.get_layer("dense").kernel.assign([[0.5], [-0.5]])
        model.compile(keras.optimizers.SGD(0.5), "mse")
    train = distribute_train(data, strategy, 8, **settings).map(map_func)
    model.fit(train, epochs=2, verbose=0)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("map_func", [doubled, larger_than_zero, lambda x, y: (x[:3], y[:3])])
def test_a_map_may_change_the_number_of_rows(map_func):
    rng = np.random.RandomState(0)
    data = rng.randn(11, 2).astype("float32"), rng.randn(11, 1).astype("float32")
    if map_func.__name__ == "<lambda>":
        # Of 8 rows one device takes 3, and two replicas 6: rows that are alike have one result.
        data = np.ones((11, 2), "float32"), np.ones((11, 1), "float32")
    for one, other in zip(*(weights_after(number, data, map_func) for number in (1, 2))):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_rows_are_known_of_maps_that_keep_them():
    def weighted(x, y):
        return x, y, tf.gather(tf.constant([1.0, 2.0]), tf.cast(y, tf.int32) % 2)

    def by_python(x, y):
        return tf.numpy_function(lambda rows: rows, [x], tf.float32), y

    for remainder in ("uneven", "pad", "drop", "repeat_first"):
        train = distribute_train(numbered(13), create_strategy(2), 5, remainder=remainder)
        assert train.map(weighted).map(lambda x, y, w: (x + 1, y, w)).keeps_rows
        # Three rows are all that a replica gets; of two replicas of 5 rows one has 2.
        assert train.map(lambda x, y: (x[:3], y[:3])).keeps_rows
        assert not train.map(lambda x, y: (x[:2], y[:2])).keeps_rows
        assert not train.map(by_python).keeps_rows


def test_a_map_keeps_the_rows_where_padding_is_marked():
    data = np.ones((11, 2), "float32"), np.ones((11, 1), "float32")
    with pytest.raises(ValueError, match='`remainder="pad"` .* Received: 16 rows for 8. Leave'):
        weights_after(1, data, doubled, remainder="pad")
    data[0][0] = -1
    with pytest.raises(tf.errors.InvalidArgumentError, match="must keep the rows of a batch"):
        weights_after(2, data, larger_than_zero, remainder="pad")


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_only_rows_that_were_added_are_cut_off(num_replicas):
    x, y = numbered(11)
    weights = np.where(y % 3, 1.0, -0.0).astype("float32")
    strategy = create_strategy(num_replicas)
    train = distribute_train((x, y, weights), strategy, 4, seed=5, remainder="pad")
    plain = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(4)

    def by_hand(model):
        for batch in strategy.experimental_distribute_dataset(train):
            strategy.run(model.train_step, args=(batch,))

    padded = expected_steps(11, 4, 5, [0, 1])
    assert steps_seen(strategy, lambda model: model.fit(train, verbose=0)) == padded[:3]
    assert steps_seen(strategy, by_hand) == padded[3:]
    unpadded = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert steps_seen(strategy, lambda model: model.fit(plain, verbose=0)) == unpadded


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_predictions_are_those_of_the_rows_that_were_given(num_replicas):
    x, y = numbered(9)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Rescaling(2.0)])
    weights = np.full(9, -0.0, "float32")
    test = distribute_eval((x, y, weights), strategy, 4, remainder="pad")
    np.testing.assert_array_equal(model.predict(test, verbose=0), 2 * x)


def fit_audited(strategy, data, fit, **settings):
    """Returns the lines of the audit of `fit(model, train, callbacks)`."""
    train = distribute_train(data, strategy, 4, audit=True, **settings)
    lines = []
    callbacks = [tfmulti.callbacks.ShardAuditLog(train, lines.append)]
    steps_seen(strategy, lambda model: fit(model, train, callbacks))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "fit", "ends"),
    [
        ({"steps_per_epoch": 2}, {}, ["steps 0 to 1"] * 2),
        ({"steps_per_epoch": 5}, {}, ["steps 0 to 4"] * 2),
        ({"remainder": "drop"}, {}, ["steps 0 to 1"] * 2),
        ({}, {"steps_per_epoch": 2}, ["steps 0 to 1", "steps 2 to 2"]),
    ],
)
def test_the_audit_compares_with_the_steps_that_were_taken(settings, fit, ends):
    def run(model, train, callbacks):
        model.fit(train, epochs=2, verbose=0, callbacks=callbacks, **fit)

    lines = fit_audited(create_strategy(2), numbered(10), run, **settings)
    assert [line.partition("; ")[2] for line in lines] == [
        f"each row as planned for {end}" for end in ends
    ]


def test_the_audit_begins_where_training_resumes():
    def run(model, train, callbacks):
        train.set_position(0, 1)
        model.fit(train, epochs=2, verbose=0, callbacks=callbacks)

    lines = fit_audited(create_strategy(2), numbered(10), run)
    assert lines[0].endswith("each row as planned for steps 1 to 2")
    assert lines[1].endswith("each row once")


def test_the_audit_of_a_stream_is_refused():
    stream = tf.data.Dataset.from_tensor_slices(numbered(10))
    with pytest.raises(ValueError, match=r"`audit` \(--audit_shards\) .* Received: a tf.data.Dat"):
        distribute_train(stream, create_strategy(2), 4, audit=True)


def test_a_log_of_an_audit_needs_one():
    for data in (distribute_train(numbered(4), create_strategy(1), 2), tf.data.Dataset.range(2)):
        with pytest.raises(ValueError, match="records its rows. Received: .*audit=True"):
            tfmulti.callbacks.ShardAuditLog(data)


def test_the_audit_tells_each_row_once():
    strategy = create_strategy(2)
    train = distribute_train(numbered(10), strategy, 4, seed=1, audit=True)
    lines = []
    callback = tfmulti.callbacks.ShardAuditLog(train, lines.append)
    steps_seen(strategy, lambda m: m.fit(train, epochs=2, verbose=0, callbacks=[callback]))
    assert [report.num_rows for report in callback.reports] == [(5, 5), (5, 5)]
    assert callback.reports[0].digests != callback.reports[1].digests
    assert [line.endswith("each row once") for line in lines] == [True, True]


def test_the_audit_names_missing_duplicated_and_unequal_shards():
    plan = ShardPlan(6, 2, 2)
    report = compare(4, plan, [np.array([0, 1, 1, 2]), np.array([5])])
    assert report.missing == (3, 4)
    assert report.duplicated == (1,)
    text = str(report)
    assert "2 missing (3, 4)" in text
    assert "1 duplicated (1)" in text
    assert "unequal: replica 0 has most rows, replica 1 least" in text


def images_of_a_folder(tmp_path, **settings):
    for number, name in itertools.product(range(3), ("cats", "dogs")):
        image = np.full((8, 8, 3), number, "uint8")
        (tmp_path / name).mkdir(exist_ok=True)
        keras.utils.save_img(tmp_path / name / f"{number}.png", image)
    return keras.utils.image_dataset_from_directory(tmp_path, verbose=False, **settings)


def batches_of_a_folder(tmp_path):
    return images_of_a_folder(tmp_path, batch_size=2)


def batches_of_arrays(tmp_path):
    data = tf.data.Dataset.from_tensor_slices(numbered(20)).batch(8)
    return data.map(lambda x, y: (x + 1, y)).prefetch(1)


def zipped_batches(tmp_path):
    x, y = (tf.data.Dataset.from_tensor_slices(part).batch(8) for part in numbered(20))
    return tf.data.Dataset.zip((x, y)).shuffle(3)


def distributed_batches(_):
    return distribute_train(numbered(10), create_strategy(2), 4)


@pytest.mark.parametrize(
    "create", [batches_of_arrays, batches_of_a_folder, zipped_batches, distributed_batches]
)
@pytest.mark.parametrize("distribute", [distribute_train, distribute_eval])
def test_batches_are_not_taken_for_examples(tmp_path, create, distribute):
    with pytest.raises(ValueError, match="must hold single examples.*Received: a dataset of batch"):
        distribute(create(tmp_path), create_strategy(2), 4)


@pytest.mark.parametrize("distribute", [distribute_train, distribute_eval])
def test_sparse_examples_are_refused(distribute):
    rows = tf.data.Dataset.from_tensor_slices((tf.sparse.eye(8, 3), np.zeros(8)))
    with pytest.raises(ValueError, match="dense or ragged.* Received: SparseTensorSpec.* Use"):
        distribute(rows, create_strategy(2), 4)


def examples_of_a_folder(tmp_path):
    return images_of_a_folder(tmp_path, batch_size=None)


def unseeded(tmp_path):
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(numbered(20))
    return data.shuffle(20, reshuffle_each_iteration=False).map(lambda x, y: (x, y)).prefetch(1)


def seeded(tmp_path):
    return tf.data.Dataset.from_tensor_slices(numbered(20)).shuffle(20, seed=3)


def within_each_file(tmp_path):
    files = tf.data.Dataset.range(2).interleave(lambda file: tf.data.Dataset.range(5).shuffle(5))
    return files.apply(tf.data.experimental.assert_cardinality(10))


def parallel_map(_):
    data = tf.data.Dataset.range(10)
    return data.map(lambda x: x, num_parallel_calls=2, deterministic=False).take(5)


def parallel_interleave(_):
    parallel = {"num_parallel_calls": 2, "deterministic": False}
    data = tf.data.Dataset.range(2).interleave(lambda x: tf.data.Dataset.range(5), **parallel)
    return data.apply(tf.data.experimental.assert_cardinality(10))


def parallel_within_each_file(_):
    files = tf.data.Dataset.range(2).flat_map(lambda file: parallel_map(None))
    return files.apply(tf.data.experimental.assert_cardinality(10))


def options_without_order(_):
    options = tf.data.Options()
    options.deterministic = False
    return tf.data.Dataset.range(10).with_options(options).take(5)


def sampled(_, **settings):
    tf.random.set_seed(None)
    parts = [tf.data.Dataset.range(5)] * 2
    data = tf.data.Dataset.sample_from_datasets(parts, **settings)
    return data.apply(tf.data.experimental.assert_cardinality(10))


def sampled_anew(_):
    return sampled(_, seed=3, rerandomize_each_iteration=True)


def sampled_within(_):
    data = tf.data.Dataset.range(1).flat_map(sampled)
    return data.apply(tf.data.experimental.assert_cardinality(10))


CHANGING = [examples_of_a_folder, unseeded, seeded, within_each_file, parallel_map]
CHANGING += [parallel_interleave, parallel_within_each_file, options_without_order]
CHANGING += [sampled, sampled_anew, sampled_within]


@pytest.mark.parametrize("create", CHANGING)
@pytest.mark.parametrize("distribute", [distribute_train, distribute_eval])
def test_a_stream_whose_order_changes_is_refused(tmp_path, create, distribute):
    with pytest.raises(ValueError, match="same order on every worker.* Received: .* Pass it befo"):
        distribute(create(tmp_path), create_strategy(1), 4)


def test_a_stream_of_one_order_is_read_in_it(tmp_path):
    images = images_of_a_folder(tmp_path, batch_size=None, shuffle=False)
    labels = [y.numpy().tolist() for _, y in distribute_eval(images, create_strategy(2), 4)]
    assert labels == [[0, 0, 0, 1], [1, 1]]
    fixed = tf.data.Dataset.range(9).shuffle(9, seed=3, reshuffle_each_iteration=False)
    passes = [list(distribute_eval(fixed, create_strategy(2), 9)) for _ in range(2)]
    np.testing.assert_array_equal(*passes)


def sampled_with_a_seed():
    return sampled(None, seed=3)


def sampled_with_a_seed_within():
    data = tf.data.Dataset.range(1).flat_map(lambda _: sampled_with_a_seed())
    return data.apply(tf.data.experimental.assert_cardinality(10))


def files_in_a_fixed_order():
    files = tf.data.Dataset.range(5).shuffle(5, seed=3, reshuffle_each_iteration=False)
    data = files.interleave(lambda x: tf.data.Dataset.range(2), num_parallel_calls=2)
    return data.apply(tf.data.experimental.assert_cardinality(10))


@pytest.mark.parametrize(
    "create", [sampled_with_a_seed, sampled_with_a_seed_within, files_in_a_fixed_order]
)
def test_a_stream_of_one_order_that_is_made_in_parallel_or_by_a_seed_is_accepted(create):
    passes = [list(distribute_eval(create(), create_strategy(2), 10)) for _ in range(2)]
    np.testing.assert_array_equal(*passes)


def test_sequences_cut_by_batch_are_examples_and_batches_can_be_undone(caplog):
    numbers = tf.data.Dataset.range(40)
    sequences = numbers.batch(5, drop_remainder=True).map(lambda row: (row[:-1], row[1:]))
    x, _ = next(iter(distribute_train(sequences, create_strategy(2), 4)))
    assert x.shape == (4, 4)
    assert "each of its batches of 4 rows" in caplog.text
    caplog.clear()
    rows = numbers.batch(7).unbatch().apply(tf.data.experimental.assert_cardinality(40))
    assert next(iter(distribute_train(rows, create_strategy(2), 4))).shape == (4,)
    assert "each of its batches" not in caplog.text


@pytest.mark.parametrize("settings", [{"global_batch_size": 16.0}, {"steps_per_epoch": 2.5}])
def test_numbers_of_rows_and_steps_are_whole(settings):
    (name, value), settings = next(iter(settings.items())), {"global_batch_size": 16, **settings}
    message = f"`{name}` must be .*a whole number.* Received: .*{value}"
    with pytest.raises(ValueError, match=message):
        distribute_train(numbered(43), create_strategy(2), **settings)


def test_a_model_outside_of_the_scope_does_not_train_alone_unseen():
    strategy = create_strategy(2)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="created in the scope of the strategy.* Received: data"):
        model.fit(distribute_train(numbered(43), strategy, 16), verbose=0)
    with pytest.warns(UserWarning, match="trains on one device only, not on 2 replicas"):
        model.fit(*numbered(43), verbose=0)
    # Right on one device as well, as after loading a model.
    model.evaluate(distribute_eval(numbered(43), strategy, 16), verbose=0)
