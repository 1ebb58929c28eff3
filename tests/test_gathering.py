"""The whole batch's rows on every replica: their order, their gradients, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti


def of_replicas(num_replicas, counts, function, eager=False):
    """Gives each replica `counts[replica]` rows of 0, 1, 2, ... and what `function` makes of it."""
    strategy = create_strategy(num_replicas)
    starts = np.cumsum([0, *counts])
    rows = tf.reshape(tf.range(starts[-1] * 2, dtype=tf.float32), [-1, 2])
    values = strategy.experimental_distribute_values_from_function(
        lambda context: rows[
            starts[context.replica_id_in_sync_group] : starts[context.replica_id_in_sync_group + 1]
        ]
    )

    def run(values):
        return strategy.run(function, args=(values,))

    results = (run if eager else tf.function(run))(values)
    return rows, strategy.experimental_local_results(results)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("counts", [(3, 2), (4, 4, 3), (1, 1, 0), (0, 0, 2)])
def test_every_replica_has_all_rows_in_the_batchs_order(counts, eager):
    rows, results = of_replicas(len(counts), counts, tfmulti.gather_batch, eager)
    for result in results:
        np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int32", "int64", "uint8", "uint32", "float16", "bfloat16", "float64", "complex64"],
)
def test_gathered_rows_keep_their_type(dtype):
    def gather(rows):
        return tfmulti.gather_batch(tf.cast(rows, dtype))

    rows, results = of_replicas(2, (3, 2), gather)
    for result in results:
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, tf.cast(rows, dtype))


def test_several_whole_numbers_are_gathered_at_once():
    def gather(rows):
        whole = tf.cast(rows, tf.int32)
        return tfmulti.gather_batch((whole, whole + 1, rows[:, 0] > 1))

    rows, results = of_replicas(2, (3, 2), gather)
    for first, second, third in results:
        np.testing.assert_array_equal(first, rows)
        np.testing.assert_array_equal(second, rows + 1)
        np.testing.assert_array_equal(third, rows[:, 0] > 1)


def test_nested_structures_with_none():
    def gather(rows):
        structure = {"a": (rows, None), "b": [rows[:, 0], tf.cast(rows, tf.int32)[:, None]]}
        return tfmulti.gather_batch(structure)

    rows, results = of_replicas(2, (3, 2), gather)
    for replica in range(2):
        local = tf.nest.map_structure(lambda value: value, results)
        assert local[replica]["a"][1] is None
        np.testing.assert_array_equal(local[replica]["a"][0], rows)
        np.testing.assert_array_equal(local[replica]["b"][0], rows[:, 0])
        np.testing.assert_array_equal(local[replica]["b"][1], rows[:, None])


def test_views_with_more_rows_than_the_batch_come_back_replica_by_replica():
    _, results = of_replicas(
        2, (2, 1), lambda rows: tfmulti.gather_batch(tf.concat([rows[:, 0], -rows[:, 0]], 0))
    )
    np.testing.assert_array_equal(results[0], [0, 2, -0, -2, 4, -4])


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("counts", [(3, 2), (1, 1, 0)])
def test_gradients_of_weighed_losses_are_one_devices(counts, eager):
    def gradient(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            everything = tfmulti.gather_batch(rows)
            # Every row with every other one, in an order that matters.
            loss = tf.reduce_mean(tf.square(everything - tf.roll(everything, 1, 0)) * everything)
            loss *= tf.cast(tf.shape(rows)[0], loss.dtype) / tf.cast(sum(counts), loss.dtype)
        return tape.gradient(loss, rows)

    rows, results = of_replicas(len(counts), counts, gradient, eager)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        loss = tf.reduce_mean(tf.square(rows - tf.roll(rows, 1, 0)) * rows)
    np.testing.assert_allclose(tf.concat(results, 0), tape.gradient(loss, rows), rtol=1e-6)


def test_one_replica_and_no_replica_get_back_what_they_gave():
    structure = {"a": tf.ones([2]), "b": "anything"}
    assert tfmulti.gather_batch(structure) is structure
    assert create_strategy(1).run(tfmulti.gather_batch, args=(structure,)) == structure
    with create_strategy(2).scope():
        assert tfmulti.gather_batch(structure) is structure


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tf.constant(["a"]), r"must hold numbers. .* type string"),
        (lambda: tf.ragged.constant([[1], [2, 3]]), "must hold dense tensors. .* RaggedTensor"),
        (lambda: tf.constant(1.0), "must hold tensors with rows. "),
    ],
)
def test_what_cannot_be_gathered_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        create_strategy(2).run(lambda: tfmulti.gather_batch(make()))


def test_symbolic_tensors_are_refused():
    with pytest.raises(ValueError, match="`call` of a custom layer"):
        tfmulti.gather_batch(keras.Input((4,)))


class Pairs(keras.Model):
    """In-batch negatives: each row's own partner against all others of the batch."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)

    def call(self, x):
        return self.left(x), self.right(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        left, right = tfmulti.gather_batch(y_pred)
        logits = tf.matmul(left, right, transpose_b=True)
        labels = tf.range(tf.shape(logits)[0])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return tf.reduce_mean(losses)


def train(num_replicas, num_rows, run_eagerly=False, verify="auto", **feed):
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas, verify=verify)
    with strategy.scope():
        model = Pairs()
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, run_eagerly=run_eagerly)
    x = np.random.RandomState(0).randn(num_rows, 4).astype("float32")
    data = tfmulti.distribute_train((x, x[:, 0]), strategy, 16, seed=3, **feed)
    history = model.fit(data, epochs=2, verbose=0).history["loss"]
    return np.concatenate([weight.ravel() for weight in model.get_weights()]), history


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_replicas", "num_rows", "run_eagerly"), [(2, 43, False), (3, 33, False), (3, 33, True)]
)
def test_fit_with_negatives_from_the_batch_is_one_devices(num_replicas, num_rows, run_eagerly):
    one, others = train(1, num_rows), train(num_replicas, num_rows, run_eagerly)
    np.testing.assert_allclose(others[0], one[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(others[1], one[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [3, 1])
def test_padding_is_left_out(num_replicas):
    one, padded = train(1, 33), train(num_replicas, 33, remainder="pad")
    np.testing.assert_allclose(padded[0], one[0], rtol=0, atol=1e-6)


def logits_of(model, x, views=1):
    """Each replica's rows, or views of them, against the rows of the whole batch."""
    left, right = model.left(x), model.right(x)
    return tf.matmul(tf.concat([left] * views, 0), tfmulti.gather_batch(right), transpose_b=True)


def whole_logits(model, x):
    left, right = tfmulti.gather_batch((model.left(x), model.right(x)))
    return tf.matmul(left, right, transpose_b=True)


def by_keras(reduction, labels, logits, weights=None):
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=reduction)
    return loss(labels, logits, weights)


def own_row(logits):
    return tf.eye(tf.shape(logits)[0])


def keras_sum(model, x):
    logits = whole_logits(model, x)
    return by_keras("sum", own_row(logits), logits)


def keras_mean(model, x):
    logits = whole_logits(model, x)
    return by_keras("sum_over_batch_size", own_row(logits), logits)


def keras_weighted_mean(model, x):
    logits = whole_logits(model, x)
    weights = tf.reduce_sum(tf.abs(tfmulti.gather_batch(x)), -1)
    return by_keras("mean_with_sample_weight", own_row(logits), logits, weights)


def tensorflow_average(model, x):
    logits = whole_logits(model, x)
    losses = tf.nn.softmax_cross_entropy_with_logits(own_row(logits), logits)
    return tf.nn.compute_average_loss(losses, global_batch_size=12)


def vector(model, x):
    """A tape adds the losses of the gathered rows."""
    logits = whole_logits(model, x)
    losses = keras.losses.categorical_crossentropy(own_row(logits), logits, from_logits=True)
    return (losses + losses) / 2


def keras_sum_of_own_views(model, x):
    """Two views of this replica's rows: with two replicas as many as all rows."""
    logits = logits_of(model, x, views=2)
    labels = tf.ones_like(logits) / tf.cast(tf.shape(logits)[1], logits.dtype)
    return by_keras("sum", labels, logits)


class Retrieval(keras.Model):
    """A step with a loss of gathered rows."""

    def __init__(self, loss_of):
        super().__init__()
        self.left, self.right = keras.layers.Dense(3), keras.layers.Dense(3)
        self.loss_of = loss_of

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"value": tf.reduce_mean(loss)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss_of",
    [
        keras_sum,
        pytest.param(keras_mean, marks=pytest.mark.slow),
        pytest.param(keras_weighted_mean, marks=pytest.mark.slow),
        pytest.param(tensorflow_average, marks=pytest.mark.slow),
        vector,
        keras_sum_of_own_views,
    ],
)
@pytest.mark.parametrize("num_rows", [24, pytest.param(29, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("error:.*not verified")
def test_losses_of_gathered_rows_in_a_step(loss_of, num_rows):
    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        with create_strategy(num_replicas).scope():
            model = Retrieval(loss_of)
            model.compile(keras.optimizers.SGD(0.02))
        x = np.random.RandomState(0).randn(num_rows, 4).astype("float32")
        data = tf.data.Dataset.from_tensor_slices(x).batch(12)
        history = model.fit(data, epochs=2, verbose=0).history["value"]
        return np.concatenate([weight.ravel() for weight in model.get_weights()]), history

    one, two = fit(1), fit(2)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(two[1], one[1], rtol=1e-5)


@pytest.mark.slow
def test_a_keras_sum_of_gathered_rows_in_an_eager_step_is_told():
    """No graph shows there that the rows are those of the whole batch."""
    with create_strategy(2).scope():
        model = Retrieval(keras_sum)
        model.compile(keras.optimizers.SGD(0.02), run_eagerly=True)
    with pytest.raises(ValueError, match="gathered rows with tf.reduce_sum, not with reduction"):
        model.fit(np.random.RandomState(0).randn(24, 4).astype("float32"), batch_size=12, verbose=0)


@pytest.mark.slow
def test_without_the_gather_it_is_not_one_devices(monkeypatch):
    one = train(1, 43)
    monkeypatch.setattr(tfmulti, "gather_batch", lambda structure: structure, raising=False)
    with pytest.raises(ValueError, match="must give one device's result"):
        train(2, 43)
    assert np.abs(train(2, 43, verify="never")[0] - one[0]).max() > 1e-3


@pytest.mark.parametrize("activation", [tf.nn.softmax, keras.ops.sigmoid])
def test_gradients_reach_the_output_of_an_activation(activation):
    def gradient(rows):
        with tf.GradientTape() as tape:
            output = activation(rows)
            tape.watch(output)
            loss = tf.reduce_sum(tfmulti.gather_batch(output) ** 2)
        return output, tape.gradient(loss, output)

    _, results = of_replicas(2, (3, 2), gradient)
    for output, found in results:
        # Each of two replicas has the loss of all rows.
        np.testing.assert_allclose(found, 2 * 2 * output, rtol=1e-6)
