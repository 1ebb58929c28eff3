"""Gradients of tables whose rows do not depend on the batch, as those of positions."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from replicas import create_strategy

import tfmulti
from tfmulti import keras_compat, marks
from tfmulti.step import sparse_gradients

LENGTH, VOCABULARY = 6, 9


def clipped():
    return keras.optimizers.SGD(0.1, global_clipnorm=0.05)


class Positions(layers.Layer):
    """Tokens and positions, each by an Embedding, as most transformers have them."""

    def __init__(self, repeated):
        super().__init__()
        self.tokens = layers.Embedding(VOCABULARY, 4)
        self.positions = layers.Embedding(LENGTH, 4)
        self.repeated = repeated

    def call(self, x):
        positions = ops.arange(ops.shape(x)[1])
        if self.repeated:
            positions = ops.broadcast_to(positions, ops.shape(x))
        return self.tokens(x) + self.positions(positions)


def of_any_length(x, y):
    """The same examples, of which the graph does not know how long they are."""
    specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    data = tf.data.Dataset.from_generator(lambda: zip(x, y), output_signature=specs)
    return data.apply(tf.data.experimental.assert_cardinality(len(x)))


def train(num_replicas, optimizer, repeated=False, remainder="uneven", again=False, **options):
    random = np.random.RandomState(0)
    x, y = random.randint(0, VOCABULARY, (41, LENGTH)), random.randint(0, 3, 41)
    strategy = create_strategy(num_replicas, verify="never" if again else "auto")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [Positions(repeated), layers.GlobalAveragePooling1D(), layers.Dense(3)]
        )
        if again:
            model.build((None, LENGTH))
            tables = [model.layers[0].positions, model.layers[0].tokens]
            tfmulti.checkpoint_activations(model, tables)
        model.compile(
            tfmulti.DistributedOptimizer(optimizer()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=options.pop("run_eagerly", False),
        )
    feed = options.pop("feed", lambda *data: data)
    data = tfmulti.distribute_train(feed(x, y), strategy, 16, remainder=remainder)
    model.fit(data, epochs=2, verbose=0)
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


@pytest.mark.parametrize(
    "optimizer",
    [
        clipped,
        pytest.param(lambda: keras.optimizers.Adam(0.01, epsilon=1e-3), marks=pytest.mark.slow),
    ],
    ids=["clipped", "adam"],
)
@pytest.mark.parametrize(
    ("repeated", "remainder"),
    [
        (False, "uneven"),
        pytest.param(True, "uneven", marks=pytest.mark.slow),
        pytest.param(False, "pad", marks=pytest.mark.slow),
        pytest.param(True, "pad", marks=pytest.mark.slow),
    ],
)
def test_positions_count_once(optimizer, repeated, remainder):
    one = train(1, optimizer, repeated, remainder)
    three = train(3, optimizer, repeated, remainder)
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_positions_count_once_in_a_layer_that_runs_again(eager):
    one, three = train(1, clipped), train(3, clipped, again=True, run_eagerly=eager)
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [True, False])
def test_positions_of_any_length_count_once(repeated):
    one = train(1, clipped, repeated, feed=of_any_length)
    three = train(3, clipped, repeated, feed=of_any_length)
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [False, True])
def test_positions_count_once_in_a_step_that_runs_eagerly(repeated):
    one = train(1, clipped, repeated, run_eagerly=True)
    three = train(3, clipped, repeated, run_eagerly=True)
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-6)


class Container(keras.Model):
    """A model with a step of its own and no `call`, as the usual GAN."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                (self.inner(x, training=True)[:, 0] - tf.cast(y, tf.float32)) ** 2
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_tables_are_found_beside_a_frozen_weight_of_another_worker():
    strategy = create_strategy(1)
    with strategy.scope():
        tokens = keras.Input((4,), dtype="int32")
        table, frozen = keras.layers.Embedding(5, 3), keras.layers.Dense(2, trainable=False)
        model = keras.Model(tokens, frozen(table(tokens)))
    keras_compat.hold(frozen.kernel, keras_compat.HeldVariable, strategy, is_here=False)
    sparse_gradients.note_positions(model, lambda: tf.zeros((2, 4), tf.int32))
    assert marks.TABLE_READS.get(model) == {id(table.embeddings): sparse_gradients.TOKENS}


@pytest.mark.slow
def test_a_table_of_a_model_without_call_is_refused_eagerly():
    strategy = create_strategy(3)
    with strategy.scope():
        inner = keras.Sequential([Positions(False), layers.Flatten(), layers.Dense(1)])
        inner.build((None, LENGTH))
        model = Container(inner)
        model.compile(tfmulti.DistributedOptimizer(clipped()), run_eagerly=True)
    data = np.zeros((12, LENGTH), "int64"), np.zeros(12, "int64")
    with pytest.raises(
        ValueError, match="needs a step that can be traced.*Received: a step that.*one_device"
    ):
        model.fit(tfmulti.distribute_train(data, strategy, 12), verbose=0)


class Distinct(layers.Layer):
    """Reads each token of the batch once."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(VOCABULARY, 4)

    def call(self, x):
        distinct, places = tf.unique(tf.reshape(x, [-1]))
        return tf.reshape(tf.gather(self.table(distinct), places), [tf.shape(x)[0], LENGTH, 4])


def sparse_inputs():
    dense = np.random.RandomState(0).binomial(1, 0.3, (41, VOCABULARY)).astype("float32")
    body = [keras.Input((VOCABULARY,), sparse=True), layers.Dense(5)]
    return tf.sparse.from_dense(dense), body


def distinct_tokens():
    tokens = np.random.RandomState(0).randint(0, VOCABULARY, (41, LENGTH))
    return tokens, [keras.Input((LENGTH,), dtype="int64"), Distinct(), layers.Flatten()]


def distinct_tokens_again():
    tokens, body = distinct_tokens()
    tfmulti.checkpoint_activations(keras.Sequential(body), [body[1].table])
    return tokens, body


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("create", [sparse_inputs, distinct_tokens, distinct_tokens_again])
def test_rows_that_occur_once_count_once(create, eager):
    def train(num_replicas):
        strategy = create_strategy(num_replicas)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            x, body = create()
            model = keras.Sequential([*body, layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", run_eagerly=eager)
        y = np.random.RandomState(1).rand(41, 1).astype("float32")
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), epochs=2, verbose=0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    np.testing.assert_allclose(train(3), train(1), rtol=0, atol=1e-6)


class Trimmed(layers.Layer):
    """Reads the positions of the longest of its own rows: replicas have different ones."""

    def __init__(self, counts_down=False):
        super().__init__()
        self.positions = layers.Embedding(LENGTH, 1)
        self.counts_down = counts_down

    def call(self, x):
        mask = tf.sequence_mask(x[:, 0])
        positions = tf.range(tf.shape(mask)[1])
        positions = positions[::-1] if self.counts_down else positions
        return tf.reduce_sum(self.positions(positions)[:, 0] * tf.cast(mask, tf.float32), axis=1)


def train_trimmed(num_replicas, eager=False, **options):
    # Of each batch the first replica has the longest rows, then the last one.
    lengths = np.array([6, 5, 2, 1, 1, 2, 2, 1, 3, 1, 4, 5])[:, None]
    strategy = create_strategy(num_replicas, verify="never")
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int32"), Trimmed(**options)])
        model.compile(clipped(), "mse", run_eagerly=eager)
    model.fit(lengths, np.arange(12.0), batch_size=6, shuffle=False, verbose=0)
    return model.get_weights()[0]


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replicas_read_different_numbers_of_positions(eager):
    one, three = train_trimmed(1, eager), train_trimmed(3, eager)
    np.testing.assert_allclose(three, one, rtol=0, atol=1e-6)


def test_different_numbers_of_positions_must_begin_alike():
    with pytest.raises(tf.errors.InvalidArgumentError, match="begin alike. Received: others"):
        train_trimmed(3, counts_down=True)
