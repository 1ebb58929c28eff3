"""What layers may do that run again for gradients, and what they are told instead."""

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfmulti

sys.path.append(str(Path(__file__).parent / "multi_worker"))

from recurrent import DroppingCell

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(32, 8)), RANDOM.normal(size=(32, 3))


@pytest.fixture(autouse=True)
def float64():
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)


class Block(layers.Layer):
    """A layer whose call is given."""

    def __init__(self, call):
        super().__init__()
        self.given, self.dense, self.dropout = call, layers.Dense(8, "tanh"), layers.Dropout(0.3)
        self.generator = tf.random.Generator.from_seed(3)
        self.own = tf.Variable(0.0, dtype="float64", trainable=False)

    def build(self, shape):
        self.dense.build(shape)
        self.counts = self.add_weight(shape=(8,), initializer="zeros", trainable=False)
        super().build(shape)

    def call(self, x, training=False):
        return self.given(self, x)


def stack(call):
    return keras.Sequential([keras.Input((8,)), Block(call), Block(call), layers.Dense(3)])


def trained(create, checkpointed, eager=False):
    # Else Keras 3.12 goes on with the seeds of what was drawn before.
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = create()
    if checkpointed:
        tfmulti.checkpoint_activations(model)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    keras.utils.set_random_seed(1)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


def assert_alike(create, eager=False):
    pairs = zip(trained(create, False, eager), trained(create, True, eager), strict=True)
    assert max(np.abs(left - right).max() for left, right in pairs) < 1e-12


def count(layer, x):
    layer.own.assign_add(1.0)
    return layer.dense(x) * layer.own


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("call", "op"),
    [
        (
            lambda self, x: self.dense(x) * self.generator.normal((), dtype=x.dtype),
            "RngReadAndSkip",
        ),
        (lambda self, x: tf.nn.dropout(self.dense(x), 0.3), "RandomUniform"),
        (count, "AssignAddVariableOp"),
    ],
)
def test_what_would_differ_in_the_second_run_is_told(call, op, eager):
    with pytest.raises(RuntimeError, match=f"(?s)do the same both times. Received: block.*{op}"):
        trained(lambda: stack(call), True, eager)


def with_own_gradient(self, x):
    @tf.custom_gradient
    def half(inputs):
        def gradient(upstream, variables=None):
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = self.dense(inputs)
            found = tape.gradient(outputs, [inputs, *variables], upstream)
            return found[0], [0.5 * each for each in found[1:]]

        return self.dense(inputs), gradient

    return half(x)


def again(recompute, self, x):
    return self.dense(x) + recompute(self.dense)(2 * x)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "call", [lambda self, x: again(tf.recompute_grad, self, x), with_own_gradient]
)
def test_weights_in_a_function_with_its_own_gradient_are_told(call, eager):
    with pytest.raises(
        RuntimeError, match="(?s)would lose its gradient. Received: .*dense.*kernel"
    ):
        trained(lambda: stack(call), True, eager)


def of_function(self, x):
    return self.dense(x) + keras.remat(lambda y: self.dense(y))(2 * x)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("call", [lambda self, x: again(keras.remat, self, x), of_function])
def test_remat_within_a_block_keeps_the_gradients_of_weights(call, eager):
    assert_alike(lambda: stack(call), eager)


def test_remat_around_a_block_draws_the_same_numbers():
    strategy = tfmulti.create_strategy("mirrored", logical_cpus=2)
    found = []
    for context in (contextlib.nullcontext, keras.RematScope):
        keras.utils.set_random_seed(0)
        with strategy.scope(), context():
            model = stack(lambda self, x: self.dropout(self.dense(x), training=True))
            tfmulti.checkpoint_activations(model)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert max(np.abs(one - other).max() for one, other in zip(*found)) < 1e-12


class Functions(Block):
    """Calls its weights in a `tf.function` that has traces of its own."""

    @tf.function
    def inner(self, x, twice=False):
        return self.dense(x) * (2.0 if twice else 1.0)


def in_own_function(self, x):
    return self.inner(x, twice=True)


@pytest.mark.parametrize("eager", [False, True])
def test_weights_in_a_function_have_their_gradients(eager):
    def create():
        parts = [Functions(in_own_function), Functions(in_own_function)]
        return keras.Sequential([keras.Input((8,)), *parts, layers.Dense(3)])

    assert_alike(create, eager)


SCALE = tf.constant(0.5, "float64")


@pytest.mark.parametrize("eager", [False, True])
def test_a_constant_may_be_read_in_two_blocks_and_outside(eager):
    def create():
        given = keras.Input((8,))
        block = Block(lambda self, x: self.dense(x) * SCALE)
        found = layers.Lambda(lambda x: x * SCALE)(block(block(given)))
        return keras.Model(given, layers.Dense(3)(found))

    assert_alike(create, eager)


def with_own_tape(self, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum(self.dense(x) ** 2)
    return x - 0.1 * tape.gradient(energy, x)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "call", [with_own_tape, lambda self, x: self.dense(x) + keras.random.normal((8,))]
)
def test_a_tape_and_a_draw_without_a_seed_are_repeated(call, eager):
    assert_alike(lambda: stack(call), eager)


@pytest.mark.parametrize("eager", [False, True])
def test_attention_takes_the_masks_of_its_inputs_away(eager):
    words = np.array([[1, 2, 3, 0, 0, 0]] * 8)

    def create():
        given = keras.Input((6,), dtype="int32")
        found = layers.Embedding(5, 8, mask_zero=True)(given)
        for _ in range(2):
            attention = layers.MultiHeadAttention(2, 4)
            found = layers.Add()([found, attention(found, found)])
        return keras.Model(given, layers.Dense(3)(found))

    found = []
    for checkpointed in (False, True):
        keras.utils.set_random_seed(0)
        model = create()
        if checkpointed:
            tfmulti.checkpoint_activations(model, "multi*")
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
        model.fit(words, np.ones((8, 6, 3)), epochs=2, shuffle=False, verbose=0)
        found.append([*model.get_weights(), model.predict(words, verbose=0)])
    assert max(np.abs(one - other).max() for one, other in zip(*found)) < 1e-12


class Bounded(keras.Sequential):
    """A step that bounds derivatives along a direction."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
            loss += 0.1 * tf.reduce_mean(forward.jvp(outputs) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("eager", [False, True])
def test_derivatives_in_forward_mode_go_through_blocks(eager):
    def call(self, x):
        return x + self.dense(x)

    def create():
        return Bounded([keras.Input((8,)), Block(call), Block(call), layers.Dense(3)])

    assert_alike(create, eager)


def of_cell():
    reshape = layers.Reshape((2, 4))
    return keras.Sequential(
        [keras.Input((8,)), reshape, layers.RNN(DroppingCell(8)), layers.Dense(3)]
    )


def in_branches(self, x):
    def dropped():
        return self.dropout(self.dense(x), training=True)

    return ops.cond(ops.sum(x) > 0, dropped, lambda: 2.0 * self.dense(x))


def in_a_loop(self, x):
    def body(number, y):
        self.counts.assign(self.counts + 1.0)
        return number + 1, self.dense(y)

    return ops.while_loop(lambda number, _: number < 2, body, (0, x))[1]


def in_a_function(self, x):
    return tf.function(lambda y: self.dropout(self.dense(y), training=True))(x)


CREATED = {
    "a cell": of_cell,
    "branches": lambda: stack(in_branches),
    "a loop": lambda: stack(in_a_loop),
    "a function": lambda: stack(in_a_function),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "a cell")) for each in CREATED]
)
def test_a_layer_that_assigns_within_a_loop_or_a_branch_runs_once(name):
    with pytest.warns(UserWarning, match="(?s)in a branch, a loop.* whose activations are kept"):
        assert_alike(CREATED[name])


@pytest.mark.parametrize("eager", [False, True])
def test_a_layer_that_runs_once_has_not_begun_what_would_then_be_done_twice(eager):
    def call(self, x):
        return in_a_function(self, count(self, x))

    with pytest.raises(RuntimeError, match="(?s)do the same both times. Received: .*AssignAdd"):
        trained(lambda: stack(call), True, eager)


def test_an_outer_block_runs_once_too():
    def create():
        inner = stack(in_branches)
        return keras.Sequential([keras.Input((8,)), inner, layers.Dense(8), stack(in_branches)])

    def everything():
        model = create()
        tfmulti.checkpoint_activations(model.layers[0])
        return model

    with pytest.warns(UserWarning, match="whose activations are kept"):
        assert_alike(everything)


class Tied(keras.Model):
    """Hands a weight to a block, or takes one from it."""

    def __init__(self, gives):
        super().__init__()
        self.first, self.last, self.gives = layers.Dense(8), layers.Dense(3), gives
        self.block = _Returning() if gives else _Given()

    def build(self, shape):
        self.first.build(shape)
        self.block.build((None, 8))
        self.last.build((None, 8))
        super().build(shape)

    def call(self, x):
        found = self.first(x)
        if not self.gives:
            return self.last(self.block(found, weight=self.first.kernel))
        found, weight = self.block(found)
        return self.last(found @ ops.transpose(weight))


@pytest.mark.parametrize("eager", [False, True])
def test_a_variable_of_tensorflow_is_an_argument_like_its_value(eager):
    class OfValue(Tied):
        def call(self, x):
            return self.last(self.block(self.first(x), weight=self.first.kernel.value))

    def create():
        model = OfValue(False)
        model.build((None, 8))
        return model

    assert_alike(create, eager)


class _Given(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(8)
        self.dense.build(shape)
        super().build(shape)

    def call(self, x, weight=None):
        return self.dense(x) @ ops.transpose(weight)


class _Returning(_Given):
    def call(self, x):
        return self.dense(x), self.dense.kernel


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("gives", [False, True])
def test_a_weight_may_be_an_argument_and_an_output(gives, eager):
    def create():
        model = Tied(gives)
        model.build((None, 8))
        return model

    assert_alike(create, eager)


@pytest.mark.parametrize("eager", [False, True])
def test_a_value_that_is_used_as_a_variable_is_told(eager):
    def call(self, x):
        self.counts.value.assign_add(tf.ones(8, "float64"))
        return self.dense(x)

    with pytest.raises(
        RuntimeError, match="(?s)`weight.value` is a tensor. Received: block.*assign"
    ):
        trained(lambda: stack(call), True, eager)


def test_another_missing_attribute_is_told_as_ever():
    def call(self, x):
        return self.dense(x).nothing

    with pytest.raises(AttributeError, match="nothing"):
        trained(lambda: stack(call), True)
