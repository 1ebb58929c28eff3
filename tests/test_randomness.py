"""Rows draw the same numbers however a batch is dealt out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy, not_on_gpu
from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import function_context

import tfmulti
from tfmulti.keras_compat import fixed_random_numbers

REPLICA_BATCHES = ((0, 2), (2, 2), (4, 1))


def run(fn, x, first_row, *, eager=False, dynamic=True):
    """What `fn` makes of these rows: in a graph for any number of rows, or eagerly."""

    def fixed(x, first_row):
        with fixed_random_numbers(lambda: (first_row, tf.shape(x)[0])) as draws:
            result = fn(x)
        assert not draws.not_replaced
        assert draws.number
        return result

    if eager:
        return fixed(tf.constant(x), first_row).numpy()
    row = tf.TensorSpec([None if dynamic else len(x), *x.shape[1:]], x.dtype)
    traced = tf.function(fixed, input_signature=[row, tf.TensorSpec([], tf.int32)])
    return traced(tf.constant(x), tf.constant(first_row)).numpy()


def check(fn, x, **kwargs):
    """Returns the whole's result, once replica batches have given the same rows bit for bit."""
    whole = run(fn, x, 0, **kwargs)
    parts = [run(fn, x[first : first + count], first, **kwargs) for first, count in REPLICA_BATCHES]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    return whole


def rows(*shape):
    return np.random.RandomState(0).uniform(0.5, 1.5, (5, *shape)).astype("float32")


class Sampling(keras.layers.Layer):
    def call(self, mean):
        noise = keras.random.normal(keras.ops.shape(mean))
        return mean + noise * tf.random.normal([tf.shape(mean)[0], 3])


LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5),
    "gaussian_noise": lambda: keras.layers.GaussianNoise(1.0),
    "gaussian_dropout": lambda: keras.layers.GaussianDropout(0.5),
    "alpha_dropout": lambda: keras.layers.AlphaDropout(0.5),
    "sampling": Sampling,
}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_draw_by_row(name, eager):
    layer, x = LAYERS[name](), rows(3)
    whole = check(lambda x: layer(x, training=True), x, eager=eager)
    assert len(np.unique(whole - x)) > 2


@pytest.mark.parametrize(
    "create",
    [
        lambda: keras.layers.RandomFlip("horizontal"),
        lambda: keras.layers.RandomRotation(0.2),
        lambda: keras.layers.RandomBrightness(0.5, value_range=(0, 1)),
        lambda: keras.layers.MixUp(),
    ],
    ids=["flip", "rotation", "brightness", "mix_up"],
)
def test_augmentation_draws_by_row(create):
    layer, x = create(), rows(4, 4, 3)
    whole = run(lambda x: layer(x, training=True), x, 0)
    parts = [run(lambda x: layer(x, training=True), x[i : i + n], i) for i, n in REPLICA_BATCHES]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.LSTM(3, dropout=0.5, recurrent_dropout=0.5),
        lambda: keras.layers.GRU(3, dropout=0.5, recurrent_dropout=0.5, unroll=True),
        lambda: keras.layers.SpatialDropout1D(0.5),
        lambda: keras.layers.TimeDistributed(keras.layers.Dropout(0.5)),
    ],
    ids=["lstm", "gru", "spatial", "time_distributed"],
)
def test_sequences_draw_by_row(layer):
    layer, x = layer(), rows(4, 3)
    layer.build(x.shape)
    call = lambda x: layer(x, training=True)
    whole = run(call, x, 0)
    parts = [run(call, x[first : first + count], first) for first, count in REPLICA_BATCHES]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    assert abs(whole - layer(x).numpy()).max() > 1e-3


def test_attention_draws_by_row():
    layer, x = keras.layers.MultiHeadAttention(2, 3, dropout=0.5), rows(4, 3)
    layer.build(x.shape, x.shape)
    call = lambda x: layer(x, x, training=True)
    parts = [run(call, x[first : first + count], first) for first, count in REPLICA_BATCHES]
    np.testing.assert_allclose(np.concatenate(parts), run(call, x, 0), atol=1e-6)


def of_rows(draw, *more):
    """A function of rows that draws `(rows, *more)` numbers."""
    return lambda x: tf.cast(draw([tf.shape(x)[0], *more]), tf.float64)


SEED = (1, 2)
# Numbers from a constant seed are alike on all replicas, and stay.
STATE = tf.Variable(SEED)
SEEDS = keras.random.SeedGenerator(5)
DRAWS = {
    "uniform": (of_rows(tf.random.uniform, 400), 0.5, 1 / 12),
    "half": (of_rows(lambda s: tf.random.uniform(s, dtype=tf.float16), 400), 0.5, 1 / 12),
    "double": (of_rows(lambda s: tf.random.uniform(s, dtype=tf.float64), 400), 0.5, 1 / 12),
    "bfloat16": (of_rows(lambda s: tf.random.normal(s, dtype=tf.bfloat16), 400), 0, 1),
    "normal": (of_rows(tf.random.normal, 20, 20), 0, 1),
    "stateless": (of_rows(lambda s: tf.random.stateless_normal(s, SEEDS.next()), 400), 0, 1),
    "truncated": (of_rows(tf.random.truncated_normal, 400), 0, 0.774),
    "int": (of_rows(lambda s: tf.random.uniform(s, -2, 3, tf.int32), 400), 0, 2),
    "keras_int": (of_rows(lambda s: keras.random.randint(s, -2, 3), 400), 0, 2),
    "gamma": (of_rows(lambda s: keras.random.gamma(s, 2.0), 400), 2, 0),
    "poisson": (of_rows(lambda s: tf.random.poisson(s, [3.0] * 4), 100), 3, 0),
    "stateless_poisson": (
        of_rows(lambda s: tf.random.stateless_poisson(s, STATE.read_value(), 3.0), 4),
        3,
        0,
    ),
    "binomial": (of_rows(lambda s: keras.random.binomial(s, 8.0, 0.25), 400), 2, 0),
    "beta": (of_rows(lambda s: keras.random.beta(s, 2.0, 2.0), 400), 0.5, 0),
    "bounded": (
        of_rows(
            lambda s: tf.random.stateless_parameterized_truncated_normal(
                s, STATE.read_value(), 1.0, 2.0, -3.0, 5.0
            ),
            400,
        ),
        1,
        4 * 0.774,
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_distributed_as_it_shall_be(name):
    draw, mean, variance = DRAWS[name]
    whole = check(draw, rows(1), dynamic=name != "normal")
    np.testing.assert_allclose(whole.mean(), mean, atol=0.1)
    np.testing.assert_allclose(whole.var(), variance, atol=0.15 * max(variance, 0.1))
    assert variance == 0 or abs(np.corrcoef(whole.reshape(5, -1))[0, 1]) < 0.2


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("draw", [tf.random.categorical, keras.random.categorical])
def test_categories_have_the_fractions_of_their_logits(draw, eager):
    logits = np.log(np.array([[0.7, 0.1, 0.2]] * 5, "float32"))
    whole = check(lambda x: draw(x, 400), logits, eager=eager)
    fractions = np.bincount(whole.flat) / whole.size
    np.testing.assert_allclose(fractions, [0.7, 0.1, 0.2], atol=0.05)
    assert set(whole.flat) == {0, 1, 2}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("method", ["normal", "uniform", "truncated_normal", "uniform_full_int"])
def test_a_generator_draws_by_row_and_advances(method, eager):
    generator = tf.random.Generator.from_seed(1)
    draw = lambda x: getattr(generator, method)([tf.shape(x)[0], 2])
    before = generator.state.numpy()
    if method == "uniform_full_int":
        draw = lambda x: generator.uniform_full_int([tf.shape(x)[0], 2], tf.int64)
    assert len(np.unique(check(draw, rows(1), eager=eager))) == 10
    assert (generator.state.numpy() != before).any()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("shuffle", [tf.random.shuffle, keras.random.shuffle])
def test_a_shuffle_keeps_the_order(shuffle, eager):
    x = rows(2)
    with_draw = lambda x: shuffle(x) + 0 * tf.random.uniform([])
    np.testing.assert_array_equal(check(with_draw, x, eager=eager), x)


def test_numbers_that_belong_to_no_row_are_alike_and_those_of_a_multiple_of_rows_too():
    x = rows(1)
    check(lambda x: x + tf.random.normal([]) + tf.reduce_sum(tf.random.normal([4])), x)
    check(lambda x: x + tf.random.normal([1, 6]), x)
    folded = lambda x: tf.reshape(tf.random.normal([3 * tf.shape(x)[0], 2]), [-1, 6])
    assert len(np.unique(check(folded, x))) == 2


def test_padding_changes_no_numbers():
    draw = lambda length: run(lambda x: tf.random.normal([tf.shape(x)[0], length, 2]), rows(1), 0)
    np.testing.assert_array_equal(draw(3), draw(7)[:, :3])


def test_every_draw_is_another_and_shape_and_type_stay():
    def draw(x):
        first, second = (tf.random.normal([tf.shape(x)[0], 3], dtype=tf.float16) for _ in "ab")
        assert first.shape == (None, 3)
        assert first.dtype == tf.float16
        return tf.stack([first, second], axis=1)

    whole = check(draw, rows(1))
    assert (whole[:, 0] != whole[:, 1]).all()


def test_within_functions_and_branches_and_loops():
    @tf.function
    def inner(x):
        return x + tf.random.normal(tf.shape(x))

    outside = inner(tf.constant(rows(3)))

    def draw(x):
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: inner(x), lambda: x)
        body = lambda i, y: (i + 1, y + tf.random.normal(tf.shape(x)) + inner(y))
        return tf.while_loop(lambda i, y: i < 2, body, [0, y])[1]

    for eager in (False, True):
        check(draw, rows(3), eager=eager)
    x = tf.constant(rows(3))
    assert (inner(x) != outside).numpy().all()
    assert (inner(x) != inner(x)).numpy().all()


def test_a_function_first_traced_within_is_random_after_it():
    inner = tf.function(lambda x: x + tf.random.normal(tf.shape(x)))
    check(inner, rows(3))
    assert inner.experimental_get_tracing_count() == 0
    outer = tf.function(lambda x: inner(x))
    x = tf.constant(rows(3))
    assert (outer(x) != outer(x)).numpy().all()
    assert (inner(x) != inner(x)).numpy().all()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_gradients_are_those_of_the_numbers_drawn(eager):
    def draw(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            noise = tf.random.normal(tf.shape(x))
            loss = tf.reduce_sum(noise * x)
        return tf.concat([tape.gradient(loss, x), noise], axis=1)

    whole = check(draw, rows(3), eager=eager)
    np.testing.assert_array_equal(whole[:, :3], whole[:, 3:])


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_gradients_of_functions_within_can_be_taken_after_it(eager):
    inner = tf.function(lambda x, w: tf.reduce_sum(tf.nn.dropout(x, 0.5) @ w) ** 2)
    w = tf.Variable(tf.ones([3, 1]))

    def gradient(x):
        with tf.GradientTape() as tape:
            with fixed_random_numbers(lambda: (0, tf.shape(x)[0])):
                loss = tf.map_fn(lambda row: inner(row[None], w), x)
        return tape.gradient(loss, w)

    go = gradient if eager else tf.function(gradient)
    assert np.abs(go(tf.constant(rows(3)))).max() > 0


@not_on_gpu("compares bits")
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_seeds_advance_and_initial_values_stay_random(eager):
    layer, made = keras.layers.Dropout(0.5, seed=3), []

    def call(x):
        if not made:
            made.append(keras.layers.Dense(3, kernel_initializer="random_normal"))
        return made[0](layer(x, training=True))

    twin = keras.layers.Dropout(0.5, seed=3)
    twin(tf.constant(rows(3)), training=True)
    keras.utils.set_random_seed(1)
    run(call, rows(3), 0, eager=eager)
    state = layer.seed_generator.state.numpy()
    assert list(state) == list(twin.seed_generator.state.numpy()) == [3, 1]
    keras.utils.set_random_seed(1)
    alone = keras.layers.Dense(3, kernel_initializer="random_normal")
    alone.build((5, 3))
    np.testing.assert_array_equal(made[0].kernel.numpy(), alone.kernel.numpy())


def test_a_model_that_is_built_within_draws_no_more_than_one_that_was():
    numbers = []

    def call(x):
        with fixed_random_numbers(lambda: (0, tf.shape(x)[0])) as draws:
            result = model(x, training=True)
        numbers.append(draws.number)
        return result

    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    step = lambda: tf.function(call, input_signature=[tf.TensorSpec([None, 3])])
    x = tf.constant(rows(3))
    np.testing.assert_array_equal(step()(x), step()(x))
    assert set(numbers) == {1}


def test_what_is_run_outside_of_the_graph_or_only_for_shapes_is_no_draw():
    drawn = []

    def call(x):
        with fixed_random_numbers(lambda: (0, tf.shape(x)[0])) as draws:
            with tf.init_scope():
                drawn.append(tf.random.normal([5]))
            Sampling()(keras.Input((3,)))
        assert draws.number == 0

    for _ in range(2):
        tf.function(call)(tf.constant(rows(3)))
    assert (drawn[0] != drawn[1]).numpy().all()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_what_cannot_be_replaced_is_told(eager):
    reports = []

    def draw():
        with fixed_random_numbers(lambda: (0, 1)) as draws, tf.name_scope("sampled"):
            tf.random.uniform_candidate_sampler([[1]], 1, 2, True, 5)
            tf.nn.fractional_max_pool(tf.zeros([1, 4, 4, 1]), [1, 1.5, 1.5, 1], True)
        reports.append(draws.not_replaced)

    draw() if eager else tf.function(draw)()
    assert list(reports[0]) == ["UniformCandidateSampler", "FractionalMaxPool"]
    assert "sampled/" in reports[0]["FractionalMaxPool"] or eager


def surrounded():
    return [
        pywrap_tfe.TFE_Py_FastPathExecute,
        execute.execute,
        function_context.make_function_context,
        function_cache.FunctionCache.add,
    ]


def test_nothing_is_left_after_an_exception():
    originals = surrounded()
    with pytest.raises(ValueError, match="of the step"), fixed_random_numbers(lambda: (0, 5)):
        fixed = tf.random.normal([5])
        assert not set(map(id, originals)) & set(map(id, surrounded()))
        raise ValueError("of the step")
    assert originals == surrounded()
    assert not context.context().op_callbacks
    assert (tf.random.normal([5]) != fixed).numpy().all()
    draw = tf.function(lambda: tf.random.normal([5]))
    assert (draw() != draw()).numpy().all()


@pytest.mark.parametrize("nested", [False, True], ids=["step", "nested"])
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_replicas_draw_for_their_own_rows(eager, nested):
    strategy, x = create_strategy(2), rows(3)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    step = lambda x: tf.random.normal(tf.shape(x)) + layer(x, training=True)
    step = tf.function(step) if nested else step

    def on_replica(x, first_row):
        with fixed_random_numbers(lambda: (first_row, tf.shape(x)[0])):
            result = step(x)
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)
            return result + step(x)

    def of_replicas(cuts, first_rows):
        value = lambda context: context.replica_id_in_sync_group
        parts = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(x[slice(*cuts[value(context)])])
        )
        firsts = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(first_rows[value(context)])
        )
        go = lambda *args: strategy.run(on_replica, args)
        result = (go if eager else tf.function(go))(parts, firsts)
        return [part.numpy() for part in strategy.experimental_local_results(result)]

    whole, other = of_replicas([(0, 5), (0, 5)], [0, 0])
    np.testing.assert_array_equal(whole, other)
    parts = of_replicas([(0, 3), (3, 5)], [0, 3])
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not context.context().op_callbacks


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)])

    def call(self, x, training=False):
        noise = tf.random.normal(tf.shape(x)) if training else 0.0
        return self.layer(x + noise, training=training)

    def train_step(self, data):
        rows = lambda: (first_row * tf.shape(data[0])[0], tf.shape(data[0])[0])
        first_row = tf.distribute.get_replica_context().replica_id_in_sync_group
        with fixed_random_numbers(rows):
            return super().train_step(data)


def test_fit_on_replicas_is_fit_on_one_device():
    weights = []
    for num_replicas in (1, 2):
        keras.utils.set_random_seed(0)
        with create_strategy(num_replicas).scope():
            model = Autoencoder()
            model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        x = np.random.RandomState(0).randn(8, 3).astype("float32")
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, atol=1e-6)
