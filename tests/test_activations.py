"""Checkpointed activations: the result without them, and less memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from replicas import create_strategy

import tfmulti
from benchmarks import memory
from tfmulti import keras_compat
from tfmulti.parallel import cutting

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(21, 6)), RNG.normal(size=(21, 1))
TOKENS = RNG.integers(1, 9, (21, 5))
TOKENS[:, 3:] = 0
IMAGES = RNG.normal(size=(21, 6, 6, 3))


@pytest.fixture(autouse=True)
def float64():
    """Rounding stays below 1e-12, so that every other difference shows."""
    keras.backend.set_floatx("float64")
    yield
    keras.backend.set_floatx("float32")


class Block(layers.Layer):
    """A block of a user's own, with all that changes in a step."""

    def __init__(self, units=6, synchronized=False, **settings):
        super().__init__(**settings)
        self.dense = layers.Dense(units, activation="gelu", kernel_regularizer="l2")
        self.norm = layers.BatchNormalization(synchronized=synchronized)
        self.dropout = layers.Dropout(0.3)
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((*shape[:-1], self.dense.units))
        super().build(shape)

    def call(self, x):
        self.calls.assign_add(1.0)
        hidden = self.dropout(self.norm(self.dense(x)))
        self.add_loss(1e-2 * keras.ops.mean(keras.ops.cast(hidden, keras.backend.floatx()) ** 2))
        return x + hidden


class Half(layers.Layer):
    """A layer of half precision around one that needs all digits."""

    def __init__(self, **settings):
        super().__init__(dtype="mixed_float16", **settings)
        self.dense = layers.Dense(6, activation="tanh", dtype="float32")

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(x)


def half():
    return keras.Sequential([keras.Input((6,)), Half(name="block"), layers.Dense(1)])


class Clipped(keras.Sequential):
    def call(self, inputs, **settings):
        return keras.ops.clip(super().call(inputs, **settings), -0.1, 0.1)


def clipped():
    return Clipped([keras.Input((6,)), *[layers.Dense(6) for _ in range(5)]])


def blocks(synchronized=False):
    return keras.Sequential(
        [
            keras.Input((6,)),
            *[Block(synchronized=synchronized, name=f"block_{i}") for i in range(3)],
            layers.Dense(1),
        ]
    )


def masked():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(tokens)
    x = layers.Dense(4, activity_regularizer="l2")(x)
    x = layers.LSTM(4, return_sequences=True, dropout=0.2, recurrent_dropout=0.2)(x)
    x = layers.MultiHeadAttention(2, 2, dropout=0.2)(x, x)
    x = layers.LayerNormalization()(x)
    x = layers.Dense(4, activity_regularizer="l2")(x)
    return keras.Model(tokens, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def shared():
    one = keras.Input((None, 4))
    inner = layers.LSTM(4, return_sequences=True)(layers.Dropout(0.2)(one))
    inner = layers.Dense(4, activity_regularizer="l2")(inner)
    block = keras.Model(one, layers.Add()([one, inner]), name="shared_block")
    tokens = keras.Input((None,), dtype="int32")
    x = block(block(layers.Embedding(9, 4, mask_zero=True)(tokens)))
    return keras.Model(tokens, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def unet():
    image = keras.Input((6, 6, 3))
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    low = layers.BatchNormalization()(layers.Conv2D(4, 3, 2, padding="same")(first))
    low = layers.Dropout(0.2)(layers.ReLU()(low))
    joined = layers.Concatenate()([layers.UpSampling2D()(low), first])
    return keras.Model(image, layers.Dense(1)(layers.GlobalAveragePooling2D()(joined)))


class Tied(keras.Model):
    """A subclassed model whose blocks use the weights of a layer that is not theirs."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(9, 6)
        self.blocks = [Head(self.embed) for _ in range(2)]
        self.out = layers.Dense(1)

    def build(self, shape):
        self.embed.build(shape)
        for block in self.blocks:
            block.build((None, None, 6))
        self.out.build((None, 6))
        super().build(shape)

    def call(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(keras.ops.mean(x, axis=1))


class Head(layers.Layer):
    def __init__(self, embed):
        super().__init__()
        self.others = [lambda: embed.embeddings]
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        table = self.others[0]()
        words = keras.ops.softmax(x @ keras.ops.transpose(table))
        return keras.ops.tanh(self.dense(words @ table))


def tied():
    model = Tied()
    model.build((None, 5))
    return model


class Candidates(keras.Model):
    """An encoder that a vectorized loop calls for parts of the inputs, beside an ordinary call."""

    def __init__(self):
        super().__init__()
        inner = [keras.Input((3,)), layers.Dense(5, activation="tanh"), layers.Dense(4)]
        self.encoder = keras.Sequential(inner)

    def call(self, x):
        encoded = ops.vectorized_map(self.encoder, ops.reshape(x, (-1, 2, 3)))
        return ops.sum(ops.prod(encoded, 1) * self.encoder(x[:, :3]), -1, keepdims=True)


def candidates():
    model = Candidates()
    model(X[:2])
    return model


class Centering(layers.Layer):
    """Reads a running mean after it has assigned it: no gradient passes an assignment."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x * self.scale, axis=0))
        return x - self.mean


def assigning():
    """Blocks that assign a state, or a weight, and read it again."""
    dense = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), Centering()])
    normalized = layers.SpectralNormalization(layers.Dense(6, "relu"))
    return keras.Sequential([keras.Input((6,)), dense, normalized, layers.Dense(1)])


def train(create, data, checkpointed, strategy=None, patterns=None, **settings):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    strategy = strategy or create_strategy(1)
    with strategy.scope():
        model = create()
        if checkpointed:
            tfmulti.checkpoint_activations(model, patterns)
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse", **settings)
    history = model.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
    evaluated = model.evaluate(*data, verbose=0)
    predicted = model.predict(data[0], verbose=0)
    return [*[np.array(v) for v in model.variables], np.array([*history, evaluated]), predicted]


def difference(left, right):
    return max(np.max(np.abs(a.astype(float) - b)) for a, b in zip(left, right))


MODELS = {
    "blocks": (blocks, (X, Y)),
    "masked": (masked, (TOKENS, Y)),
    "shared": (shared, (TOKENS, Y)),
    "U-Net": (unet, (IMAGES, Y)),
    "tied": (tied, (TOKENS, Y)),
    "assigning": (assigning, (X, Y)),
    "half": (half, (X, Y)),
    "in a vectorized loop": (candidates, (X, Y)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        ("chain", "before compile"),
        ("functional", "after compile"),
        ("chain", "after compile"),
        ("functional", "before compile"),
    ],
)
def test_a_model_without_blocks_trains_as_without(kind, when):
    def fit(checkpointed):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(6, activation="gelu") for _ in range(8)]
        model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(1)])
        if kind == "functional":
            model = keras.Model(model.inputs, model.outputs)
        if checkpointed and when == "before compile":
            tfmulti.checkpoint_activations(model)
        model.compile("adam", "mse")
        if checkpointed and when == "after compile":
            tfmulti.checkpoint_activations(model)
        losses = model.fit(X, Y, epochs=2, shuffle=False, verbose=0).history["loss"]
        return [*model.get_weights(), np.array(losses)]

    assert difference(fit(False), fit(True)) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_device_trains_as_without(name, eager):
    create, data = MODELS[name]
    runs = [train(create, data, checkpointed, run_eagerly=eager) for checkpointed in (False, True)]
    assert difference(*runs) < 1e-12


@pytest.mark.slow
def test_a_table_gets_gradients_of_its_rows_alone():
    """Adam adds equal rows of such a gradient after it has squared them; of a dense one, before."""

    def fit(checkpointed):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        pool = layers.GlobalAveragePooling1D(name="pool")
        model = keras.Sequential([layers.Embedding(9, 4, name="table"), pool, layers.Dense(1)])
        model.build((None, 5))
        if checkpointed:
            tfmulti.checkpoint_activations(model, ["table", "pool"])
        model.compile("adam", "mse")
        model.fit(TOKENS, Y, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    assert difference(fit(False), fit(True)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("synchronized", [True, False])
def test_replicas_train_as_without(synchronized):
    strategy = create_strategy(2)
    create = lambda: blocks(synchronized)  # noqa: E731
    runs = [train(create, (X, Y), checkpointed, strategy) for checkpointed in (False, True)]
    assert difference(*runs) < 1e-12


@pytest.mark.slow
def test_named_layers_are_checkpointed_and_not_what_is_within_them():
    runs = [train(masked, (TOKENS, Y), on, patterns=["lstm*", "multi*"]) for on in (False, True)]
    assert difference(*runs) < 1e-12


@pytest.mark.slow
def test_mixed_precision_computes_twice_in_the_same_type():
    keras.backend.set_floatx("float32")

    def create():
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            return blocks()
        finally:
            keras.config.set_dtype_policy("float32")

    # Eagerly, since TensorFlow fuses operations in graphs, and rounds fewer times then.
    runs = [train(create, (X, Y), checkpointed, run_eagerly=True) for checkpointed in (False, True)]
    assert difference(*runs) < 1e-6


def test_gradients_of_gradients():
    found = []
    for checkpointed in (False, True):
        keras.utils.set_random_seed(1)
        model = blocks()
        if checkpointed:
            tfmulti.checkpoint_activations(model)
        x = tf.constant(X)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model(x)
            penalty = tf.reduce_sum(inner.gradient(y, x) ** 2)
        found.append(outer.gradient(penalty, model.layers[0].dense.kernel.value).numpy())
    assert np.abs(found[0]).max() > 0.01
    assert difference([found[0]], [found[1]]) < 1e-12


def test_a_saved_model_loads_without_it(tmp_path):
    model = tfmulti.checkpoint_activations(unet())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(IMAGES), model(IMAGES), atol=1e-12)
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(IMAGES), model(IMAGES), atol=1e-12)


class Draws(layers.Layer):
    """Draws from TensorFlow's own state, which a second run would not find again."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.dense = draw, layers.Dense(6)
        self.counter = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(x) * self.draw(self, x)


def in_a_branch(layer, x):
    return tf.cond(tf.size(x) > 0, lambda: tf.random.normal((), dtype=x.dtype), lambda: x[0, 0])


def in_a_branch_of_a_loop(layer, x):
    return tf.map_fn(lambda row: in_a_branch(layer, row[None]), x)[:, None]


@pytest.mark.parametrize(
    ("draw", "op"),
    [
        (lambda layer, x: tf.random.uniform((), dtype=x.dtype), "RandomUniform"),
        (in_a_branch, "RandomStandardNormal"),
        (in_a_branch_of_a_loop, "RandomStandardNormal"),
        (lambda layer, x: layer.counter.assign_add(1.0), "AssignAddVariableOp"),
    ],
)
def test_what_cannot_run_twice_is_refused(draw, op):
    model = keras.Sequential([keras.Input((6,)), Draws(draw), layers.Dense(1)])
    tfmulti.checkpoint_activations(model)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match=f"runs twice(.|\n)*draws.*{op}(.|\n)*add_weight"):
        model.fit(X, Y, verbose=0)


class Router(layers.Layer):
    """Keeps a part of the loss, or what it was handed beside its inputs, in attributes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.dense, self.calls, self.kept = layers.Dense(6, "tanh"), 0.0, []
        self.handed = lambda: 1.0

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        hidden = self.dense(x)
        self.balance = keras.ops.mean(hidden**2)
        # The next call finds what this one leaves.
        self.calls = self.calls + 0.1 * keras.ops.mean(hidden)
        self.kept.append(self.balance * 2)
        return x + hidden * (self.handed() if callable(self.handed) else self.handed)


class Routed(keras.Model):
    def __init__(self, uses):
        super().__init__()
        self.first, self.out, self.router = layers.Dense(6), layers.Dense(1), Router(name="router")
        self.uses = uses

    def build(self, shape):
        for each in (self.first, self.router, self.out):
            each.build((None, 6))
        self.built = True

    def call(self, x):
        self.router.calls = 0.0
        x = self.first(x)
        if self.uses != "list":
            self.router.handed = x if self.uses == "attribute" else lambda: x
        return self.out(self.router(self.router(x)))

    def compute_loss(self, *args, **kwargs):
        router, loss = self.router, super().compute_loss(*args, **kwargs)
        more = {"attribute": lambda: router.balance + router.calls, "list": lambda: router.kept[-1]}
        return loss + 0.5 * more.get(self.uses, lambda: 0.0)()


def routed(uses):
    model = Routed(uses)
    model.build((None, 6))
    return model


READS = "as arguments(.|\n)*Received: router, which reads"


@pytest.mark.parametrize("eager", [False, True])
def test_what_a_call_finds_or_leaves_in_an_attribute_has_its_gradient(eager):
    found = []
    for checkpointed in (False, True):
        keras.utils.set_random_seed(1)
        model = routed("attribute")
        if checkpointed:
            tfmulti.checkpoint_activations(model, ["router"])

        def gradients(model=model):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=Y, y_pred=model(tf.constant(X)))
            return [loss, *tape.gradient(loss, [v.value for v in model.trainable_variables])]

        model.compile(loss="mse")
        results = gradients() if eager else tf.function(gradients, autograph=False)()
        found.append([each.numpy() for each in results])
    assert difference(*found) < 1e-12


@pytest.mark.parametrize(
    "uses, eager, told",
    [
        ("function", False, f"{READS}(.|\n)*as an argument"),
        ("function", True, f"{READS} a tensor of shape(.|\n)*as an argument"),
        ("list", False, "must return its tensors(.|\n)*Received: router, whose(.|\n)*`add_loss`"),
    ],
)
def test_tensors_that_would_have_no_gradient_are_refused(uses, eager, told):
    model = tfmulti.checkpoint_activations(routed(uses), ["router"])
    model.compile("sgd", "mse", run_eagerly=eager)
    with pytest.raises(RuntimeError, match=told):
        model.fit(X, Y, verbose=0)


class Noise(layers.Layer):
    """Draws from the generator of Keras, whose state it changes with that."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return keras.ops.tanh(self.dense(x)) * keras.random.uniform((6,), dtype=x.dtype)


def noisy():
    return keras.Sequential([keras.Input((6,)), Noise(), layers.Dense(1)])


@pytest.mark.slow
def test_unseeded_numbers_of_keras_are_drawn_once():
    runs = [train(noisy, (X, Y), checkpointed) for checkpointed in (False, True)]
    assert difference(*runs) < 1e-12


def test_a_state_is_read_before_it_changes_however_often():
    model = noisy()
    tfmulti.checkpoint_activations(model)
    inner = tf.function(lambda x: tf.reduce_sum(model(x)), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False)
    results = set()
    for _ in range(200):
        keras_compat.set_global_seed_state([5, 6])
        results.add(float(outer(tf.constant(X))))
    assert len(results) == 1


@pytest.mark.parametrize(
    ("create", "patterns", "received"),
    [
        (lambda: keras.Sequential([layers.Dense(1)]), None, "has not"),
        (blocks, "conv*", "fits none"),
        (
            lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]),
            None,
            "needs blocks.*at least four layers besides its inputs",
        ),
        (lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]), 3, "Received: 3, which"),
        (clipped, None, "the call Clipped.call, which would be left out. Name the layers"),
    ],
)
def test_what_cannot_be_checkpointed_is_refused(create, patterns, received):
    with pytest.raises(ValueError, match=received):
        tfmulti.checkpoint_activations(create(), patterns)


def test_a_call_of_the_models_own_stays_where_layers_are_named():
    model = clipped()
    tfmulti.checkpoint_activations(model, "dense*")
    assert np.abs(model(X)).max() == 0.1


def test_a_model_in_parts_keeps_its_layers():
    hidden = [layers.Dense(6) for _ in range(5)]
    model = tfmulti.checkpoint_activations(keras.Sequential([keras.Input((6,)), *hidden]))
    expected = model(X)
    model.add(layers.Dense(1, name="added"))
    with pytest.raises(ValueError, match="must keep its layers.*added.*Make a new model"):
        model(X)
    model.pop()
    np.testing.assert_array_equal(model(X), expected)


def test_a_block_that_is_a_compiled_model_runs_again():
    runs = []
    noting = layers.Lambda(lambda x: runs.append(1) or x)
    backbone = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), noting])
    backbone.compile("sgd", "mse")
    model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(1)])
    tfmulti.checkpoint_activations(model)
    runs.clear()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(X))
    tape.gradient(total, [weight.value for weight in model.trainable_variables])
    assert len(runs) == 2


def test_parts_are_cut_where_little_is_handed_on():
    inputs = keras.Input((8,))
    x = inputs
    for _ in range(4):
        wide = layers.Dense(64)(x)
        x = layers.Add()([x, layers.Dense(8)(wide)])
    model = keras.Model(inputs, x)
    starts = cutting.starts_by_activations(model, 4)
    # Each block is three calls; one tensor of 8 is all that is needed after it.
    assert starts == [3, 6, 9]
    assert len(cutting.Cut(model, starts).parts) == 4


def test_a_list_of_one_output_is_that_output_also_in_parts():
    model = keras.Sequential([keras.Input((6,)), *(layers.Dense(6) for _ in range(5))])
    model = keras.Model(model.inputs, model.outputs)
    rows = np.ones((3, 6), "float32")
    expected = model(rows)
    np.testing.assert_array_equal(tfmulti.checkpoint_activations(model)(rows), expected)


def two_inputs():
    """Inputs whose order is not that of their names."""
    user, item = keras.Input((8,), name="user"), keras.Input((8,), name="item")
    one = layers.Concatenate()([layers.Dense(8)(user), item])
    return keras.Model([user, item], layers.Dense(1)(layers.Dense(8)(layers.Dense(8)(one))))


def test_a_model_in_parts_finds_its_inputs_by_their_names_as_keras_does():
    model = two_inputs()
    user, item = RNG.normal(size=(2, 4, 8))
    # "other" is in front of the model's own, and "item" in front of "user", by the alphabet.
    given = {"user": user, "item": item, "a": user[:, :1], "other": item}
    expected = model(given), model([user, item])
    tfmulti.checkpoint_activations(model)
    for found, right in zip((model(given), model([user, item])), expected, strict=True):
        np.testing.assert_allclose(found, right, atol=1e-12)


def fitted(create, x, layers_of=None):
    """Weights after `fit`, without and with checkpointed activations."""
    found = []
    for checkpointed in (False, True):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        model = create()
        if checkpointed:
            tfmulti.checkpoint_activations(model, layers_of)
        model.compile("adam", "mse", jit_compile=False)
        model.fit(x, Y, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bool", "int32", "complex128"])
def test_a_block_may_return_first_what_has_no_floating_point_gradient(dtype):
    def create():
        given = keras.Input((6,))
        first = keras.ops.cast(given > 0, dtype)
        block = keras.Model(given, [first, layers.Dense(6)(given)], name="block")
        outer = keras.Input((6,))
        first, second = block(outer)
        first = keras.ops.real(first) if dtype == "complex128" else first
        both = second * keras.ops.cast(first, "float64")
        return keras.Model(outer, layers.Dense(1)(both))

    assert difference(*fitted(create, X)) < 1e-12


@pytest.mark.slow
def test_a_block_may_look_up_strings():
    words = tf.constant([["a"], ["b"], ["c"]] * 7)

    def create():
        given = keras.Input((1,), dtype="string")
        numbers = layers.StringLookup(vocabulary=["a", "b"])(given)
        hidden = layers.Dense(4, "tanh")(layers.Flatten()(layers.Embedding(4, 4)(numbers)))
        tower, outer = keras.Model(given, hidden), keras.Input((1,), dtype="string")
        return keras.Model(outer, layers.Dense(1)(tower(outer)))

    assert difference(*fitted(create, words)) < 1e-12


class Scaled(layers.Layer):
    """Takes and returns sparse tensors."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        values = x.values * tf.gather(tf.convert_to_tensor(self.scale), x.indices[:, 1])
        return tf.SparseTensor(x.indices, values, x.dense_shape)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype, sparse=True)


@pytest.mark.slow
def test_blocks_may_take_and_return_sparse_tensors():
    rows = tf.sparse.from_dense(RNG.integers(0, 2, (21, 30)).astype("float64"))

    def create():
        given = keras.Input((30,), sparse=True)
        hidden = layers.Dense(4, "tanh", name="wide")(Scaled(name="scaled")(given))
        return keras.Model(given, layers.Dense(1)(hidden))

    assert difference(*fitted(create, rows, ["scaled", "wide"])) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("of_blocks", [True, False])
def test_after_a_fit_too_the_layers_run_again_and_not_three_times(of_blocks):
    calls = []

    class Counted(layers.Layer):
        def build(self, shape):
            self.dense = layers.Dense(6)
            self.dense.build(shape)

        def call(self, x):
            calls.append(1)
            return self.dense(x)

    class Plain(layers.Dense):
        def call(self, x):
            calls.append(1)
            return super().call(x)

    first = Counted() if of_blocks else Plain(6)
    hidden = [layers.Dense(6) for _ in range(5)]
    model = keras.Sequential([keras.Input((6,)), first, *hidden, layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, verbose=0)
    for _ in range(2):
        tfmulti.checkpoint_activations(model)
        calls.clear()
        model.fit(X, Y, verbose=0)
        # Keras traces a step twice: to build the model, and to train it.
        assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_a_stack_of_blocks_needs_less_than_half_of_the_memory(xla):
    kept, checkpointed = (memory.measure(8, 256, 8192, on, xla)["bytes"] for on in (False, True))
    assert checkpointed <= 0.45 * kept


def test_the_context_of_a_call_is_kept():
    seen = []

    class Layer(layers.Layer):
        def call(self, x):
            seen.append(keras_compat.call_context())
            return x

    layer = Layer()
    layer(X, training=True)
    with seen[0]():
        dropped = layers.Dropout(0.5)(X)
    assert (np.array(dropped) == 0).any()


def test_keras_distribution_is_refused():
    devices = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    layout = keras.distribution.LayoutMap(devices)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    try:
        with pytest.raises(ValueError, match="no effect with TensorFlow.*ModelParallel"):
            tfmulti.create_strategy("one_device")
    finally:
        keras.distribution.set_distribution(None)


def test_an_empty_selection_of_layers_is_told():
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(5))])
    with pytest.raises(ValueError, match=r"Received: \[\], which fits none"):
        tfmulti.checkpoint_activations(model, layers=[])
