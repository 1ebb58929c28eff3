"""Numbers that go bad are found at the step, on any number of replicas."""

import keras
import numpy as np
import pytest
from replicas import create_strategy, not_on_gpu

import tfmulti
from tfmulti.sharding import epoch_order

NUM_ROWS, BATCH_SIZE = 40, 8  # Five steps.


def rows(bad_step=None):
    """One row of a step is not a number; it is in the last replica batch."""
    rng = np.random.RandomState(0)
    x, y = rng.randn(NUM_ROWS, 4).astype("float32"), rng.randn(NUM_ROWS, 1).astype("float32")
    if bad_step is not None:
        x[epoch_order(NUM_ROWS, 0, epoch=0)[bad_step * BATCH_SIZE + BATCH_SIZE - 1]] = np.nan
    return x, y


def train(num_replicas, callback, data, optimizer=None, **compiled):
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        # relu hides what is not a number from the loss.
        layers = [keras.layers.Dense(5, "relu", name="first"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
        model.compile(tfmulti.DistributedOptimizer(optimizer), "mse", **compiled)
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    data = tfmulti.distribute_train(data, strategy, BATCH_SIZE, seed=0)
    try:
        model.fit(data, epochs=1, verbose=0, callbacks=[count, callback])
    finally:
        callback.steps = len(steps)
    return model.get_weights()


@not_on_gpu("numbers of a GPU are looked at rarely")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [3, 1, 2])
def test_training_stops_at_the_step(num_replicas):
    callback = tfmulti.callbacks.NonFinite()
    words = "the gradient of sequential.*/first/kernel at step 3, in epoch 0"
    with pytest.raises(tfmulti.callbacks.NonFiniteError, match=words):
        train(num_replicas, callback, rows(bad_step=2))
    assert callback.steps == 3
    assert all(np.isfinite(weight).all() for weight in callback.model.get_weights())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps_per_execution", [2, 1])
def test_bad_steps_can_be_left_out(steps_per_execution):
    told = []

    def fit(num_replicas):
        callback = tfmulti.callbacks.NonFinite("skip", told.append)
        weights = train(num_replicas, callback, rows(2), steps_per_execution=steps_per_execution)
        assert callback.skipped == 1
        assert int(callback.model.optimizer.iterations.numpy()) == 4
        return weights

    reference = fit(1)
    assert "1 update(s) skipped, the first with" in told[0]
    for one, other in zip(reference, fit(3), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 1])
def test_it_changes_nothing_where_all_is_well(num_replicas):
    watched = train(num_replicas, tfmulti.callbacks.NonFinite(), rows())
    plain = train(num_replicas, keras.callbacks.Callback(), rows())
    for one, other in zip(watched, plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [2, 1])
def test_accumulated_gradients_are_looked_at_too(num_replicas):
    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    train(num_replicas, tfmulti.callbacks.NonFinite(), rows(), optimizer)
    with pytest.raises(tfmulti.callbacks.NonFiniteError, match="first/kernel"):
        train(num_replicas, tfmulti.callbacks.NonFinite(), rows(2), optimizer)


@pytest.mark.slow
def test_an_overflow_that_loss_scaling_takes_care_of_is_no_error():
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2e38)

    callback = tfmulti.callbacks.NonFinite()
    train(2, callback, rows(), optimizer)
    assert float(callback.model.optimizer.dynamic_scale.numpy()) < 2e38
    with pytest.raises(tfmulti.callbacks.NonFiniteError):
        train(2, tfmulti.callbacks.NonFinite(), (rows()[0], np.full((NUM_ROWS, 1), np.nan)))


class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_later_fit_without_it_checks_nothing(num_replicas):
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")

    def fit(data, *callbacks):
        before = model.get_weights()
        model.fit(*data, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        after = model.get_weights()
        model.set_weights(before)
        return all(np.isfinite(weight).all() for weight in after)

    guard = tfmulti.callbacks.NonFinite("skip", lambda line: None)
    assert fit(rows(2), guard) and guard.skipped == 1
    assert not fit(rows(2))
    assert fit(rows(2), guard) and guard.skipped == 1
    with pytest.raises(ZeroDivisionError):
        fit(rows(), guard, Fails())
    assert not fit(rows(2))
    with pytest.raises(tfmulti.callbacks.NonFiniteError):
        fit(rows(2), tfmulti.callbacks.NonFinite())
    model.train_on_batch(*(np.full((8, size), np.nan, "float32") for size in (4, 1)))
    assert np.isnan(model.get_weights()[0]).all()


def test_the_step_is_traced_once_with_it_and_once_without():
    traced = []

    class Traced(keras.Model):
        def train_step(self, data):
            traced.append(1)
            return super().train_step(data)

    inputs = keras.Input((4,))
    with create_strategy(1).scope():
        model = Traced(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    counts = []
    for callbacks in ([tfmulti.callbacks.NonFinite()], []) * 2:
        model.fit(*rows(), batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
        counts.append(len(traced))
    assert 0 < counts[0] < counts[1] == counts[2] == counts[3]


def test_weights_that_are_bad_from_the_start_are_told():
    class Spoil(tfmulti.callbacks.NonFinite):
        def on_train_begin(self, logs=None):
            layer = self.model.get_layer("first")
            layer.kernel.assign(np.full((4, 5), np.nan))
            super().on_train_begin(logs)

    with pytest.raises(tfmulti.callbacks.NonFiniteError, match="the weight .*first/kernel"):
        train(1, Spoil(), rows())


def test_another_action_is_refused():
    with pytest.raises(ValueError, match="`action` must be one of stop, skip"):
        tfmulti.callbacks.NonFinite("ignore")


class Replays(keras.callbacks.Callback):
    """Calls `fit` of the same model, as with pseudo-labels, after a step of the first epoch."""

    def __init__(self, at, *callbacks):
        super().__init__()
        self.left, self.callbacks = at, callbacks

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            data = rows()
            self.model.fit(*data, batch_size=BATCH_SIZE, verbose=0, callbacks=[*self.callbacks])


@pytest.mark.parametrize("has_own", [False, True])
def test_gradients_are_checked_after_a_callback_has_called_fit(has_own):
    told = []
    own = [tfmulti.callbacks.NonFinite("skip", told.append)] if has_own else []
    callback = tfmulti.callbacks.NonFinite("skip", told.append)
    x, y = rows()
    x[[BATCH_SIZE - 1, 4 * BATCH_SIZE - 1]] = np.nan  # Before the inner call, and after it.
    with create_strategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="first")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    callbacks = [callback, Replays(2, *own)]
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0, callbacks=callbacks)
    assert callback.skipped == len(told) == 2
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
