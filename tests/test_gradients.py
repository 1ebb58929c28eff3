"""Gradients of the whole batch, in steps and loops that are written by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti

ROWS = np.random.RandomState(0).randn(43, 6).astype("float32")
LABELS = np.random.RandomState(1).randint(0, 3, 43)


class Classifier(keras.Model):
    """A model whose step each test writes."""

    def __init__(self, step):
        super().__init__()
        self.own_step = step
        body = [
            keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
        self.net = keras.Sequential([keras.Input((6,)), *body])
        self.steps = self.add_weight(name="steps", dtype="int32", trainable=False)

    def call(self, x, training=None):
        return self.net(x, training=training)

    def loss_of(self, data):
        x, y = data
        logits = self(x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return tf.reduce_mean(losses)

    def train_step(self, data):
        return self.own_step(self, data)


def take_gradients(model, data, tape=tf.GradientTape):
    with tape() as tape:
        loss = model.loss_of(data)
    return tape.gradient(loss, model.trainable_variables), loss


def clipped(model, data):
    grads, loss = take_gradients(model, data)
    grads, _ = tf.clip_by_global_norm(grads, 0.1)
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": loss}


def by_hand(model, data):
    """No optimizer at all."""
    grads, loss = take_gradients(model, data)
    for variable, grad in zip(model.trainable_variables, grads):
        variable.assign_sub(0.1 * grad)
    return {"loss": loss}


def sharpness_aware(model, data):
    variables = model.trainable_variables
    grads, _ = take_gradients(model, data)
    norm = tf.linalg.global_norm(grads)
    moves = [0.05 * grad / norm for grad in grads]
    for variable, move in zip(variables, moves):
        variable.assign_add(move)
    grads, loss = take_gradients(model, data)
    for variable, move in zip(variables, moves):
        variable.assign_sub(move)
    model.optimizer.apply(grads, variables)
    return {"loss": loss}


def every_second_step(model, data):
    """`tf.cond` around `apply`."""
    grads, loss = take_gradients(model, data)
    model.steps.assign_add(1)

    def apply():
        model.optimizer.apply(grads, model.trainable_variables)
        return tf.constant(True)

    tf.cond(model.steps % 2 == 0, apply, lambda: tf.constant(False))
    return {"loss": loss}


def penalized_by_gradients(model, data):
    """Second derivatives; the inner gradient is with respect to weights."""
    variables = model.trainable_variables
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = model.loss_of(data)
        grads = inner.gradient(loss, variables)
        loss += 0.1 * tf.add_n([tf.reduce_sum(grad**2) for grad in grads])
    model.optimizer.apply(outer.gradient(loss, variables), variables)
    return {"loss": loss}


def of_rows(model, data):
    """A tape that is given a loss for each row adds them."""
    x, y = data
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        losses = 0.1 * keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    grads = tape.gradient(losses, model.trainable_variables)
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": tf.reduce_mean(losses)}


def of_inputs_too(model, data):
    """Gradients of inputs are each replica's own rows'."""
    x, y = data
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.loss_of((x, y))
    grads, of_rows = tape.gradient(loss, [model.trainable_variables, x])
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": loss, "sensitivity": tf.reduce_mean(tf.reduce_sum(of_rows**2, -1) * 0 + loss)}


def parts_added_by_hand(model, data):
    with tfmulti.no_sync():
        first, loss = take_gradients(model, data)
        second, _ = take_gradients(model, data)
    grads = tfmulti.reduce_gradients([a + b for a, b in zip(first, second)])
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": loss}


@tf.function
def within_a_function(model, data):
    return clipped(model, data)


def with_our_tape(model, data):
    grads, loss = take_gradients(model, data, tfmulti.DistributedGradientTape)
    grads, _ = tf.clip_by_global_norm(grads, 0.1)
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": loss}


def clipped_for_each_row(model, data):
    """The sum of DP-SGD (Abadi et al., 2016), without its noise; from `tape.jacobian`."""
    x, y = data
    with tf.GradientTape() as tape:
        logits = model(x, training=False)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    apply_clipped(model, tape.jacobian(losses, model.trainable_variables))
    return {"loss": tf.reduce_mean(losses)}


def clipped_for_each_row_in_a_map(model, data):
    def of_row(row):
        x, y = row
        with tf.GradientTape() as tape:
            logits = model(x[None], training=False)[0]
            loss = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return loss, tape.gradient(loss, model.trainable_variables)

    losses, grads = tf.vectorized_map(of_row, data)
    apply_clipped(model, grads)
    return {"loss": tf.reduce_mean(losses)}


def apply_clipped(model, of_rows):
    """Updates by the mean over rows of gradients whose norm is bounded for each row."""
    squares = [tf.reduce_sum(tf.reshape(g * g, [tf.shape(g)[0], -1]), 1) for g in of_rows]
    scales = tf.minimum(1.0, 0.5 / tf.sqrt(tf.add_n(squares)))
    grads = [tf.tensordot(scales, g, 1) / tf.cast(tf.shape(g)[0], g.dtype) for g in of_rows]
    model.optimizer.apply(grads, model.trainable_variables)


STEPS = [
    clipped,
    clipped_for_each_row,
    clipped_for_each_row_in_a_map,
    by_hand,
    sharpness_aware,
    every_second_step,
    penalized_by_gradients,
    of_rows,
    of_inputs_too,
    parts_added_by_hand,
    within_a_function,
    with_our_tape,
]


def train(num_replicas, step, eager=False):
    """Two epochs in batches of 16 and, at the end of each, of 11; gives weights and losses."""
    keras.utils.set_random_seed(3)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = Classifier(step)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=eager)
    data = tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(16)
    history = model.fit(data, epochs=2, verbose=0).history
    return np.concatenate([w.ravel() for w in model.get_weights()]), history["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: getattr(step, "__name__", "function"))
@pytest.mark.filterwarnings("error:.*not verified")
def test_a_step_by_hand_gives_one_devices_result(step):
    weights, losses = train(3, step)
    expected, expected_losses = train(1, step)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-6)


def product_with_hessian(model, data):
    """Back over back, with the vector as `output_gradients`."""
    variables = model.trainable_variables
    with tf.GradientTape() as outer:
        grads, loss = take_gradients(model, data)
    vector = [tf.ones_like(grad) for grad in grads]
    products = outer.gradient(grads, variables, output_gradients=vector)
    model.optimizer.apply([g + 0.1 * p for g, p in zip(grads, products)], variables)
    return {"loss": loss}


def in_two_parts(model, data):
    """Output gradients of rows: not reduced by the tape, but by the optimizer."""
    x, y = data
    with tf.GradientTape() as first:
        logits = model(x, training=False)
    with tf.GradientTape() as second:
        second.watch(logits)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        loss = tf.reduce_mean(losses)
    of_logits = second.gradient(loss, logits)
    grads = first.gradient(logits, model.trainable_variables, output_gradients=of_logits)
    model.optimizer.apply(grads, model.trainable_variables)
    return {"loss": loss}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("step", "eager"),
    [(product_with_hessian, False), (product_with_hessian, True), (in_two_parts, False)],
)
def test_output_gradients_give_one_devices_result(step, eager):
    weights, losses = train(3, step, eager)
    expected, expected_losses = train(1, step)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "step", [clipped_for_each_row_in_a_map, clipped_for_each_row, sharpness_aware]
)
def test_eager_steps_by_hand_too(step):
    np.testing.assert_allclose(train(2, step, eager=True)[0], train(1, step)[0], rtol=0, atol=1e-6)


def test_a_gradient_within_a_branch_is_refused():
    def step(model, data):
        def branch():
            grads, _ = take_gradients(model, data)
            model.optimizer.apply(grads, model.trainable_variables)
            return tf.constant(True)

        tf.cond(model.steps == 0, branch, lambda: tf.constant(False))
        return {"loss": model.loss_of(data)}

    with pytest.raises(
        ValueError, match="must not reduce within tf.cond.*Received:.*Take gradients"
    ):
        train(2, step)


@pytest.mark.parametrize("wrap", [False, True], ids=["bare", "distributed"])
def test_a_loop_of_ones_own_has_the_mean_over_replicas(wrap):
    def run(num_replicas):
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
            optimizer = keras.optimizers.SGD(0.5, global_clipnorm=1.0)
            optimizer = tfmulti.DistributedOptimizer(optimizer) if wrap else optimizer
            optimizer.build([variable])

        def step(rows):
            with tfmulti.DistributedGradientTape() as tape:
                loss = tf.reduce_mean(tf.linalg.matvec(rows, variable) ** 2)
            optimizer.apply([tape.gradient(loss, variable)], [variable])

        dataset = tf.data.Dataset.from_tensor_slices(ROWS[:16, :2]).batch(8)
        for rows in strategy.experimental_distribute_dataset(dataset):
            tf.function(strategy.run)(step, args=(rows,))
        return variable.numpy()

    np.testing.assert_allclose(run(2), run(1), rtol=0, atol=1e-6)


def test_batch_normalization_of_a_foreign_model_is_synchronized():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.BatchNormalization()])
    assert tfmulti.synchronize_batch_normalization(model) is model
    assert inner.layers[0].synchronized and model.layers[1].synchronized


@pytest.mark.slow
def test_models_that_were_trained_before_are_synchronized_too():
    rows = ROWS[:8] * np.arange(1, 9, dtype="float32")[:, None]

    def weights_after(num_replicas):
        strategy = create_strategy(num_replicas)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inner = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization()])
            model = keras.Sequential([keras.Input((6,)), inner, keras.layers.Dense(1)])
            for each in (model, inner):
                each.compile(keras.optimizers.SGD(0.1), "mse")
        before = model.get_weights()
        model.fit(rows, rows[:, :1], batch_size=8, verbose=0)
        inner.fit(rows, rows, batch_size=8, verbose=0)
        model.set_weights(before)
        tfmulti.synchronize_batch_normalization(model)
        model.fit(rows, rows[:, :1], batch_size=8, verbose=0)
        inner.fit(rows, rows, batch_size=8, verbose=0)
        return model.get_weights()

    for found, expected in zip(weights_after(2), weights_after(1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
