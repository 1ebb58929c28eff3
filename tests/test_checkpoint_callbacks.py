"""The state of the user's own callbacks is saved where they give it, and told where it is lost."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti.checkpoint import callback_states, state


class Halving(keras.callbacks.Callback):
    """Halves the learning rate after every second epoch, which it counts itself."""

    def __init__(self):
        super().__init__()
        self.count, self.every = 0, 2

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1
        if self.count % self.every == 0:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5


class Keeping(Halving):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class KeepingAnArray(Halving):
    def state_dict(self):
        return {"count": np.array([self.count])}

    def load_state_dict(self, state):
        raise AssertionError


def train(folder, callback, epochs):
    """Trains from a new process's point of view; returns the rate and what was said."""
    strategy, told = create_strategy(2), []
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
    rng = np.random.RandomState(0)
    rows = rng.rand(16, 4).astype("float32"), rng.rand(16, 1).astype("float32")
    data = tfmulti.distribute_train(rows, strategy, 8, seed=3)
    saver = tfmulti.callbacks.Checkpoint(folder, data, print_fn=told.append)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[callback, saver])
    return float(model.optimizer.learning_rate), told


def test_what_a_callback_returns_from_state_dict_goes_on(tmp_path):
    train(tmp_path, Keeping(), 3)
    rate, told = train(tmp_path, Keeping(), 4)
    assert rate == 0.125
    assert not [line for line in told if "the callback" in line]


def test_what_a_callback_without_state_dict_has_changed_is_told(tmp_path):
    train(tmp_path, Halving(), 3)
    rate, told = train(tmp_path, Halving(), 4)
    assert rate == 0.25
    [line] = [line for line in told if "the callback" in line]
    assert "the callback Halving had changed count, which a checkpoint does not have" in line
    assert "`state_dict()`" in line


def test_a_state_that_json_does_not_keep_is_refused_before_the_first_step(tmp_path):
    callback = KeepingAnArray()
    words = r"`state_dict` of a callback must return JSON.* Received: .*from KeepingAnArray"
    with pytest.raises(ValueError, match=words):
        train(tmp_path, callback, 1)
    assert callback.count == 0


def test_values_that_are_not_a_number_are_kept_within_others():
    nan = float("nan")
    kept = [{"losses": [1.0, nan]}, [[nan], {"best": nan}], nan]
    assert all(map(callback_states.is_json, kept))
    assert not any(map(callback_states.is_json, [[(nan,)], {1: nan}, [np.zeros(1)]]))
    logs = {"scores": np.array([0.5, nan])}
    assert list(state.plain_logs(logs)) == ["scores"]


class Anneal(keras.callbacks.Callback):
    """Raises a variable after every epoch."""

    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def on_epoch_end(self, epoch, logs=None):
        self.beta.assign_add(0.1)


def anneal(folder, epochs, create_callback, reads_beta, num_replicas=2):
    strategy, told = create_strategy(num_replicas), []
    keras.utils.set_random_seed(1)
    with strategy.scope():
        beta = tf.Variable(0.0, trainable=False)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        loss = lambda y, outputs: (
            keras.losses.mean_squared_error(y, outputs)
            + beta * (keras.ops.mean(outputs**2, axis=-1))
        )
        model.compile(keras.optimizers.SGD(0.5), loss if reads_beta else "mse")
    rng = np.random.RandomState(0)
    rows = rng.rand(16, 4).astype("float32"), rng.rand(16, 1).astype("float32")
    data = tfmulti.distribute_train(rows, strategy, 8, seed=3)
    saver = tfmulti.callbacks.Checkpoint(folder, data, print_fn=told.append)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[create_callback(beta), saver])
    return np.array([float(beta.numpy()), *model.get_weights()[0].ravel()]), told


class Annealed(keras.Sequential):
    """A model whose step reads a variable of the module."""

    def compute_loss(self, **given):
        return super().compute_loss(**given) + VARIABLES["beta"]


VARIABLES: dict = {}


def by_closure(beta):
    add = lambda epoch, logs: beta.assign_add(0.1)
    return keras.callbacks.LambdaCallback(on_epoch_end=add)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("reads_beta", "create_callback"),
    [(True, by_closure), (False, Anneal), (True, Anneal), (False, by_closure)],
)
def test_variables_of_callbacks_and_around_losses_go_on(tmp_path, create_callback, reads_beta):
    run = lambda folder, epochs: anneal(tmp_path / folder, epochs, create_callback, reads_beta)
    whole, _ = run("whole", 2)
    assert whole[0] == np.float32(0.2)
    run("resumed", 1)
    resumed, told = run("resumed", 2)
    assert not [line for line in told if "has no value" in line]
    np.testing.assert_array_equal(resumed, whole)


def test_variables_that_methods_read_from_the_module_are_found():
    strategy = create_strategy(2)
    with strategy.scope():
        VARIABLES["beta"] = tf.Variable(0.0, trainable=False)
        model = Annealed([keras.Input((4,)), keras.layers.Dense(1)])
    named = state.named_variables(model)
    assert named["own/compute_loss/VARIABLES/beta"] is VARIABLES["beta"]


def test_a_variable_of_a_callback_that_a_checkpoint_does_not_have_is_told(tmp_path):
    anneal(tmp_path, 1, lambda beta: keras.callbacks.Callback(), False)
    _, told = anneal(tmp_path, 2, Anneal, False)
    [line] = [line for line in told if "has no value" in line]
    assert "the checkpoint has no value of the callbacks' Anneal/0/beta" in line
