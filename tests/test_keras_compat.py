"""Each canary fails when upstream no longer needs a replacement: then remove the replacement."""

import contextlib
import fcntl
import gc
import importlib
import inspect
import subprocess
import sys
import types
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import replicas
import tensorflow as tf
from keras.src.backend import AutocastScope
from keras.src.backend.tensorflow import nn as keras_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import input_lib
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

import tfmulti
from tfmulti import keras_compat, marks
from tfmulti.keras_compat import TABLE, collectives, table, without_tuning
from tfmulti.keras_compat.tracing import NotBuilt
from tfmulti.parallel import activations
from tfmulti.step import local_steps, slots


def stock(num_replicas=2):
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def ours(num_replicas=2, **settings):
    names = [f"CPU:{i}" for i in range(num_replicas)]
    return tfmulti.create_strategy("mirrored", devices=names, **settings)


@contextlib.contextmanager
def without(*targets):
    """Takes entries of the table out for a time: what was there is called instead."""
    entries = [entry for entry in TABLE if entry.target in targets and entry.make]
    assert {entry.target for entry in entries} == set(targets)
    changed = []
    for entry in entries:
        there = getattr(entry.owner, entry.name)
        cell = there.__closure__[there.__code__.co_freevars.index("new")]
        changed.append((cell, cell.cell_contents))
        cell.cell_contents = there.tfmulti_replaces
    try:
        yield
    finally:
        for cell, function in changed:
            cell.cell_contents = function


def largest_difference(first, second):
    pairs = zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True)
    return max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in pairs)


# What our step says for TensorFlow's "`merge_call` called while defining a new graph".
NO_MERGE_CALL = "Replicas must not reduce within"


def check_needed(run, *targets, error=None):
    """Two replicas come to one device's result, and without an entry to another, or to an error.

    The error is given by a part of its message: any other one would hide that there is no need.
    """
    one = run(tfmulti.create_strategy("one_device", devices=["CPU:0"]))
    assert largest_difference(run(ours(verify="never")), one) < 2e-6
    with without(*targets):
        if error is not None:
            with pytest.raises((ValueError, RuntimeError, TypeError), match=error):
                run(ours(verify="never"))
            return
        upstream = run(ours(verify="never"))
    assert largest_difference(upstream, one) > 1e-4


def compiled(strategy, optimizer, layers=None, **kwargs):
    with strategy.scope():
        model = keras.Sequential(layers or [keras.layers.Dense(2)])
        model.compile(optimizer(), "mse", **kwargs)
    return model


def rows(count):
    rng = np.random.RandomState(0)
    return rng.randn(count, 4).astype("float32"), rng.randn(count, 2).astype("float32")


class Container(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(data[0]) - data[1]) ** 2)
        variables = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.slow
def test_canary_a_first_batch_that_does_not_divide():
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="same size|shape"):
        compiled(stock(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)
    compiled(ours(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)


@pytest.mark.slow
def test_canary_a_model_without_call():
    def fit(strategy):
        with strategy.scope():
            model = Container()
            model.compile("sgd")
        model.fit(*rows(8), batch_size=4, verbose=0)

    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        fit(stock())
    fit(ours())


@pytest.mark.slow
def test_canary_a_python_generator_loses_batches_to_building():
    def steps_of(strategy):
        x, y = rows(80)
        model = compiled(strategy, keras.optimizers.SGD)
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(1)
        )
        batches = ((x[i : i + 4], y[i : i + 4]) for i in range(0, 80, 4))
        model.fit(batches, verbose=0, callbacks=[count])
        return len(steps)

    assert steps_of(stock()) < 20
    assert steps_of(ours()) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 2}],
)
def test_canary_merge_call_within_a_condition(settings):
    def optimizer():
        return keras.optimizers.SGD(0.1, **settings)

    with pytest.raises(RuntimeError, match="merge_call"):
        compiled(stock(), optimizer).fit(*rows(8), batch_size=4, verbose=0)
    distributed = compiled(ours(), lambda: tfmulti.DistributedOptimizer(optimizer()))
    distributed.fit(*rows(8), batch_size=4, verbose=0)


@pytest.mark.slow
def test_canary_a_dataset_must_hand_over_its_variant():
    with pytest.raises(TypeError):
        type("Ours", (tf.data.Dataset,), {"_inputs": list, "element_spec": None})()
    assert keras_compat.variant_tensor(tf.data.Dataset.range(1)).dtype == tf.variant


def trained(strategy, create, x, y, weights=None, optimizer=None, **settings):
    """Weights and logs of a short training; the same initial weights on any strategy."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = create()
        model.compile(
            (optimizer or (lambda: keras.optimizers.SGD(0.1)))(), **{"loss": "mse", **settings}
        )
    size = -(-len(x) // 2)
    history = model.fit(x, y, size, sample_weight=weights, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


class MeanPenalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.sum(x**2, axis=-1)))
        return x


def normalized():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            # As an activity regularizer, which Keras divides by the rows since 3.14.
            MeanPenalty(),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(2, kernel_regularizer="l2"),
        ]
    )


@pytest.mark.slow
def test_canary_batch_statistics_count_every_row():
    # Batches of two rows and of one: the second replica is left without a row.
    check_needed(
        lambda strategy: trained(strategy, normalized, *rows(3)), "nn._compute_moments_sync"
    )


@pytest.mark.slow
def test_canary_masked_batch_statistics_are_each_replicas_own():
    x = np.random.RandomState(1).randn(8, 3, 4).astype("float32")
    x[:3, 1:] = 0

    def create():
        layers = [keras.Input((3, 4)), keras.layers.Masking()]
        layers += [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(2)]
        return keras.Sequential(layers)

    check_needed(
        lambda strategy: trained(strategy, create, x, x[..., :2]), "BatchNormalization._moments"
    )


def cudnn_stand_in(input, input_h, sequence_lengths, **_):
    """Returns its inputs; leaves the gradient of masked steps as large as memory may be."""
    is_kept = tf.sequence_mask(sequence_lengths, tf.shape(input)[1])[..., None]

    @tf.custom_gradient
    def copy(inputs):
        outputs = tf.where(is_kept, inputs, 0.0)
        return outputs, lambda upstream: tf.where(is_kept, upstream, 1e9)

    outputs = copy(input)
    last = tf.gather(outputs, sequence_lengths - 1, axis=1, batch_dims=1)
    last = tf.reshape(last, tf.shape(input_h))
    return outputs, last, last, None, None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_gradients_of_masked_steps_that_cudnn_leaves_are_cleared(monkeypatch, kind):
    # Its package has a function of this name.
    rnn = importlib.import_module("keras.src.backend.tensorflow.rnn")
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(tf.raw_ops, "CudnnRNNV3", cudnn_stand_in)

    def gradient():
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, mask=mask) ** 2)
        return tape.gradient(loss, x).numpy()

    x, mask = tf.random.normal([2, 3, 4], seed=1), tf.constant([[True] * 3, [True, False, False]])
    with ours(1).scope():
        layer = getattr(keras.layers, kind)(4, use_cudnn=True)
        layer.build(x.shape)
        found = gradient()
        with without(f"rnn._cudnn_{kind.lower()}"):
            upstream = gradient()
    assert found[0].any() and found[1, 0].any() and not found[1, 1:].any()
    np.testing.assert_array_equal(upstream[1, 1:], 1e9)
    np.testing.assert_array_equal(upstream[mask], found[mask])


class Custom(keras.Model):
    """A model with a training step of its own, made of a loss of data and an update."""

    def __init__(self, find_loss, update=None, inner=None):
        super().__init__()
        self.inner = inner or dense()
        self.find_loss, self.update = find_loss, update

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.find_loss(self, x, y)
        grads = tape.gradient(loss, self.trainable_variables)
        if self.update is not None:
            self.update(self, loss, grads)
        else:
            self.optimizer.apply(grads, self.trainable_variables)
        return {"steps": tf.constant(1.0)}


def squares(model, x, y):
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


@pytest.mark.slow
def test_canary_a_step_by_another_name():
    class Traced(Custom):
        train_step = tf.function(Custom.train_step)

    check_needed(
        lambda strategy: trained(strategy, lambda: Traced(squares), *rows(13)),
        "Model._make_function",
        error=NO_MERGE_CALL,
    )


@pytest.mark.slow
def test_canary_a_tape_gives_its_own_replicas_gradient():
    def apart(model, loss, grads):
        for variable, grad in zip(model.trainable_variables, grads, strict=True):
            variable.assign_sub(0.1 * tf.clip_by_norm(grad, 0.3))

    check_needed(
        lambda strategy: trained(strategy, lambda: Custom(squares, apart), *rows(13)),
        "GradientTape.gradient",
    )


class Noting(keras.Variable):
    """Notes for each read in a list whether it was of what this worker holds."""

    def __init__(self, initializer, read):
        self.read = read
        super().__init__(initializer)

    @property
    def value(self):
        self.read.append(keras_compat.are_held_values())
        return super().value


def test_canary_an_optimizer_reads_a_variable_to_look_it_up():
    read = []
    with ours().scope():
        variable, optimizer = Noting([1.0], read), keras.optimizers.SGD()
        optimizer.build([variable])
        read.clear()
        keras_compat.variable_index(optimizer, variable)
        with without("Optimizer._var_key"):
            keras_compat.variable_index(optimizer, variable)
    assert read == [True, False]


@pytest.mark.parametrize("name", ["_tf_swap_variables", "_tf_finalize_ema_values"])
def test_canary_a_callback_asks_the_strategy_for_averages(name):
    read = []
    # Those of sharded state are no variables of the strategy.
    average = keras.Variable([1.0])
    with ours(1).scope():
        weight, optimizer = Noting([3.0], read), keras.optimizers.SGD(use_ema=True)
        optimizer.build([weight])
    object.__setattr__(optimizer, "_model_variables_moving_average", [average])
    shards = types.SimpleNamespace(values=types.SimpleNamespace(keep_again=list))
    object.__setattr__(optimizer, "tfmulti_shards", shards)
    callback = keras.callbacks.SwapEMAWeights()
    # Keras 3.12 asks the model for its variables.
    callback.set_model(types.SimpleNamespace(trainable_variables=[weight]))
    change = getattr(callback, name)
    read.clear()
    change(optimizer)
    assert average.numpy() == [3.0] and all(read)
    with without(f"SwapEMAWeights.{name}"), contextlib.suppress(AssertionError):
        change(optimizer)
    assert not read[-1]


def test_canary_loss_scaling_looks_at_the_gradients_here(monkeypatch):
    class Shards:
        shards_parameters = True

        def count(self, condition):
            """This worker's, and another one that has seen a gradient which is not finite."""
            return tf.cast(condition, tf.float32) + 1

    with ours().scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
        object.__setattr__(optimizer.inner_optimizer, "tfmulti_shards", Shards())
        assert not optimizer.check_finite([tf.ones(2)])
        with without("LossScaleOptimizer.check_finite"):
            assert optimizer.check_finite([tf.ones(2)])


@pytest.mark.slow
def test_canary_a_tf_function_within_a_step_cannot_reduce():
    forward = tf.function(squares)
    check_needed(
        lambda strategy: trained(strategy, lambda: Custom(forward, inner=normalized()), *rows(13)),
        "Function.__call__",
        error=NO_MERGE_CALL,
    )


@pytest.mark.parametrize("name", ["input_signature", "reduce_retracing"])
def test_a_tf_function_within_a_step_makes_tensors_of_what_it_is_given(name):
    """Of Python's values by its signature, and of NumPy's, as where it runs by itself."""
    signature = [tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.bool)]
    has_signature = name == "input_signature"
    kinds = []

    @tf.function(**({name: signature} if has_signature else {name: True}))
    def augment(x, strong=True):
        kinds.append((tf.is_tensor(x), tf.is_tensor(strong)))
        return tf.cond(strong, lambda: 2.0 * x, lambda: x) if has_signature else 2.0 * x

    def loss(model, x, y):
        return squares(model, augment(x=x, strong=True) + augment(np.ones([1, 4], "float32")), y)

    with ours(verify="never").scope():
        model = Custom(loss)
        model.compile(keras.optimizers.SGD(0.1))
    model.fit(*rows(8), batch_size=4, verbose=0)
    assert set(kinds) == {(True, has_signature)}


@pytest.mark.slow
def test_canary_penalties_of_replicas_are_kept_apart(monkeypatch):
    def run(strategy):
        return trained(strategy, normalized, *rows(13))

    one = run(ours(1))
    assert largest_difference(run(ours()), one) < 2e-6
    for name in ("_losses", "_loss_ids"):
        monkeypatch.setattr(vars(keras.Layer)[name], "_notes_of_step", lambda: None)
    assert largest_difference(run(ours(verify="never")), one) > 1e-4


@pytest.mark.slow
def test_canary_a_step_on_a_batch_is_traced_for_its_rows():
    traced = []

    def loss(model, x, y):
        traced.append(x.shape)
        return squares(model, x, y)

    model = Custom(loss)
    model.compile("sgd", "mse")
    for count in (4, 3):
        model.train_on_batch(*rows(count))
    assert len(set(map(str, traced))) > 1


@pytest.mark.slow
def test_canary_a_loss_is_divided_by_one_replicas_count():
    weights = np.arange(1.0, 14.0, dtype="float32")
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    check_needed(
        lambda strategy: trained(strategy, dense, *rows(13), weights, loss=loss),
        "loss.reduce_weighted_values",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scale_loss_for_distribution", "unscale_loss_for_distribution"])
def test_canary_a_loss_is_divided_by_the_replicas(name):
    check_needed(lambda strategy: trained(strategy, normalized, *rows(12)), f"loss.{name}")


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["compute_average_loss", "scale_regularization_loss"])
def test_canary_tensorflows_own_averages_divide_by_the_replicas(name):
    def average(model, x, y):
        each = tf.reduce_mean((model(x) - y) ** 2, axis=-1)
        loss = tf.nn.compute_average_loss(each)
        return loss + tf.nn.scale_regularization_loss(tf.nn.l2_loss(model.trainable_variables[0]))

    check_needed(
        lambda strategy: trained(strategy, lambda: Custom(average), *rows(13)), f"nn.{name}"
    )


@pytest.mark.slow
def test_canary_a_loss_of_the_whole_batch_sees_one_replica_batch():
    x, y = rows(13)
    check_needed(
        lambda strategy: trained(strategy, dense, x, np.abs(y), loss=keras.losses.Dice()),
        "Loss.__call__",
    )


@pytest.mark.slow
def test_canary_a_metric_function_sees_one_replica_batch():
    def largest(y, prediction):
        return tf.reduce_max(prediction)

    check_needed(
        lambda strategy: trained(strategy, dense, *rows(13), metrics=[largest]),
        "MeanMetricWrapper.update_state",
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Mean", "Sum"])
def test_canary_a_running_mean_counts_replicas_alike(kind):
    class Tracked(Custom):
        def __init__(self):
            super().__init__(squares)
            self.tracker = getattr(keras.metrics, kind)(name="own")

        def train_step(self, data):
            super().train_step(data)
            self.tracker.update_state(squares(self, *data))
            return {"own": self.tracker.result()}

    check_needed(lambda strategy: trained(strategy, Tracked, *rows(13)), f"{kind}.update_state")


def update_in_branch(model, loss, grads):
    def apply():
        model.optimizer.apply(grads, model.trainable_variables)
        return 0

    tf.cond(loss > 0, apply, lambda: 0)


@pytest.mark.slow
def test_canary_a_branch_cannot_count_updates():
    check_needed(
        lambda strategy: trained(strategy, lambda: Custom(squares, update_in_branch), *rows(13)),
        "Variable._initialize",
        error=NO_MERGE_CALL,
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("_backend_update_step", {}),
        ("_apply_weight_decay", {"weight_decay": 0.1, "gradient_accumulation_steps": 2}),
        ("_backend_increment_gradient_accumulators", {"gradient_accumulation_steps": 2}),
        (
            "_overwrite_model_variables_with_average_value",
            {"use_ema": True, "ema_overwrite_frequency": 2},
        ),
        ("_tf_apply", {}),
    ],
)
def test_canary_an_optimizers_update_goes_across_replicas(name, settings):
    def optimizer():
        inner = keras.optimizers.SGD(0.1, **settings)
        return keras.optimizers.LossScaleOptimizer(inner) if name == "_tf_apply" else inner

    def run(strategy):
        # By hand: gradients are reduced at each step.
        update = update_in_branch if name == "_tf_apply" else None
        return trained(strategy, lambda: Custom(squares, update), *rows(13), optimizer=optimizer)

    kind = "LossScaleOptimizer" if name == "_tf_apply" else keras.optimizers.Optimizer.__name__
    # Without this entry alone, gradients are reduced once more.
    error = None if name == "_backend_update_step" else NO_MERGE_CALL
    check_needed(run, f"{kind}.{name}", error=error)


@pytest.mark.slow
def test_canary_an_accumulating_optimizer_reduces_at_each_step():
    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    check_needed(
        lambda strategy: trained(strategy, dense, *rows(13), optimizer=optimizer),
        "Optimizer._backend_apply_gradients",
    )


@pytest.mark.slow
def test_canary_a_file_holds_the_users_optimizer(tmp_path):
    def loaded():
        with strategy.scope():
            return keras.models.load_model(tmp_path / "model.keras").optimizer

    strategy = ours()
    model = compiled(strategy, lambda: tfmulti.DistributedOptimizer(keras.optimizers.SGD()))
    model.fit(*rows(4), verbose=0)
    model.save(tmp_path / "model.keras")
    assert hasattr(loaded(), "tfmulti_distributed")
    with without("Model.compile_from_config"):
        assert not hasattr(loaded(), "tfmulti_distributed")


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch"])
def test_calls_are_looked_at(name):
    class Centred(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = dense()

        def call(self, x):
            return self.inner(x - tf.reduce_mean(x, axis=0))

    def call():
        with ours(verify="always", on_difference="error").scope():
            model = Centred()
            model.compile("sgd", "mse")
        x, y = rows(8)
        getattr(model, name)(*((x,) if name == "predict" else (x, y)))

    with pytest.raises(ValueError, match="Received"):
        call()
    with without(f"Model.{name}"):
        call()


SAVES = {
    "saving_lib.save_model": (keras.saving.save_model, "model.keras"),
    "saving_lib.save_weights_only": (keras.Model.save_weights, "model.weights.h5"),
    "legacy_h5_format.save_model_to_hdf5": (keras.Model.save, "model.h5"),
    "Model.export": (lambda model, path: model.export(path, verbose=False), "exported"),
    "Model.get_state_tree": (lambda model, path: path.write_text(f"{model.get_state_tree()}"), "t"),
}


@pytest.mark.parametrize("name", SAVES)
def test_no_model_is_saved_between_averages(name, tmp_path):
    model = compiled(ours(), keras.optimizers.SGD, [keras.Input((4,)), keras.layers.Dense(2)])
    # Another model with its weights, whose worker takes a step by itself.
    with model.distribute_strategy.scope():
        trained = keras.Sequential([keras.Input((4,)), model])
    local_steps.average_of(trained).count_step(2)
    save, path = SAVES[name][0], tmp_path / SAVES[name][1]
    with pytest.raises(RuntimeError, match="a save 1 local steps after the last average"):
        save(model, path)
    assert not path.exists()
    with without(name):
        save(model, path)
    assert path.exists()


def test_a_model_is_saved_in_the_scope_as_its_workers_read_it_now(tmp_path):
    class Noting(keras.layers.Dense):
        def save_own_variables(self, store):
            seen.append((slots.is_gathering(), tf.distribute.has_strategy()))
            super().save_own_variables(store)

    seen = []
    model = compiled(ours(), keras.optimizers.SGD, [keras.Input((4,)), Noting(2)])
    with model.distribute_strategy.scope(), slots.collective_reads():
        model.save_weights(tmp_path / "model.weights.h5")
    assert seen == [(True, False)]


def test_a_file_that_another_worker_writes_is_told(tmp_path):
    model = compiled(ours(), keras.optimizers.SGD, [keras.Input((4,)), keras.layers.Dense(2)])
    path = tmp_path / "model.weights.h5"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="let only the chief save") as told:
            model.save_weights(path)
    assert f"a save to {path}, which another process is writing" in str(told.value)
    # Once there is a strategy, this process holds its port.
    assert "`tfmulti.resolve_cluster(check_network=False).is_chief`" in str(told.value)


@pytest.mark.slow
def test_canary_callbacks_see_one_replicas_sum_of_gradients():
    def run(strategy):
        found = []
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = dense()
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
            model.compile(optimizer, "mse")

        def look(epoch, logs):
            found.extend(v.numpy() for v in optimizer.variables if "accum" in v.path)

        keep = keras.callbacks.LambdaCallback(on_epoch_end=look)
        model.fit(*rows(13), batch_size=7, shuffle=False, verbose=0, callbacks=[keep])
        assert found
        return found

    check_needed(run, "CallbackList.on_epoch_end")


@pytest.mark.slow
def test_canary_an_epoch_without_steps_has_no_logs():
    model = compiled(ours(), keras.optimizers.SGD)
    model.evaluate(*rows(4), verbose=0)
    assert "loss" in model._get_metrics_result_or_logs({})
    with without("Model._get_metrics_result_or_logs"):
        assert model._get_metrics_result_or_logs({}) == {}


@pytest.mark.slow
def test_canary_one_number_for_a_loss_is_taken_twice():
    def loss(y, prediction):
        return tf.reduce_mean(tf.square(y - prediction))

    def train(strategy, optimizer):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(2)])
            model.compile(optimizer(), loss)
        model.fit(*rows(8), batch_size=8, shuffle=False, verbose=0)
        return model.get_weights()[0]

    one = train(ours(1), lambda: keras.optimizers.SGD(0.1))
    two = train(ours(), lambda: tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    upstream = train(stock(), lambda: keras.optimizers.SGD(0.1))
    np.testing.assert_allclose(two, one, atol=1e-6)
    assert np.abs(upstream - one).max() > 1e-3


@pytest.mark.slow
def test_canary_dropout_is_the_same_on_all_replicas():
    def masks(strategy):
        with strategy.scope():
            generator = keras.random.SeedGenerator(3)
        seeds = tf.function(lambda: strategy.run(generator.next))()
        return [seed.numpy().tolist() for seed in strategy.experimental_local_results(seeds)]

    first, second = masks(stock())
    assert first == second
    first, second = masks(ours())
    assert first != second


@pytest.mark.slow
def test_canary_a_metrics_state_is_a_sum_over_replicas():
    def largest(strategy, keep):
        with strategy.scope():
            metric = keras.metrics.Metric()
            state = metric.add_variable((), keras.initializers.Constant(-np.inf))
            keep(metric.variables)
            state.assign(-np.inf)
        update = tf.function(lambda: state.assign(tf.maximum(state.value.read_value(), 3.0)))
        strategy.run(update)
        return float(tf.convert_to_tensor(state))

    assert largest(stock(), lambda variables: None) == 6
    assert largest(ours(), keras_compat.keep_on_each_replica) == 3


@pytest.mark.slow
def test_canary_xla_does_not_span_devices():
    model = compiled(stock(), keras.optimizers.SGD, jit_compile=True)
    with pytest.raises((tf.errors.OpError, ValueError)):
        model.fit(*rows(8), batch_size=4, verbose=0)


@pytest.mark.slow
def test_canary_a_replica_batch_of_sparse_rows_cannot_be_empty():
    rows_of = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(3)))

    def last(strategy):
        iterator = iter(strategy.experimental_distribute_dataset(rows_of.batch(2)))
        next(iterator)
        return strategy.experimental_local_results(next(iterator))

    with pytest.raises(tf.errors.OpError, match="at least 1 serialized tensor"):
        last(stock())
    assert [int(part.dense_shape[0]) for part in last(ours())] == [1, 0]


@pytest.mark.slow
def test_canary_a_function_of_datasets_is_counted_by_replicas():
    def dataset(context):
        return tf.data.Dataset.from_tensor_slices(rows(12)).batch(2)

    strategy = stock()
    assert int(strategy.distribute_datasets_from_function(dataset).cardinality) == 6
    strategy, steps = ours(), []
    model = compiled(strategy, lambda: tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran out of data")
        data = strategy.distribute_datasets_from_function(dataset)
        model.fit(data, epochs=2, verbose=0, callbacks=[count])
    assert len(steps) == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ModelCheckpoint", "CSVLogger", "TensorBoard"])
def test_canary_stock_callbacks_know_no_chief(name, tmp_path, monkeypatch):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    kind = type(strategy.extended)
    monkeypatch.setattr(kind, "should_checkpoint", property(lambda self: False))
    monkeypatch.setattr(kind, "should_save_summary", property(lambda self: False))
    place = tmp_path / "written.keras"
    model = compiled(strategy, keras.optimizers.SGD)
    model.fit(*rows(4), verbose=0, callbacks=[getattr(keras.callbacks, name)(str(place))])
    assert place.exists()


@pytest.mark.slow
def test_canary_stock_workers_take_one_cpu():
    assert tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync == 1


def tuned_by(datasets):
    return [dataset.options().autotune.enabled for dataset in datasets]


def test_no_dataset_keeps_fit_waiting_for_its_tuning_thread(monkeypatch):
    """The user's own, and those that the strategy adds for its devices."""
    made, given = [], []
    strategy = ours()
    create, distribute = multi_device_iterator_ops._create_device_dataset, without_tuning

    def note(function, kept):
        def call(*args, **kwargs):
            kept.append(function(*args, **kwargs))
            return kept[-1]

        return call

    name = "_create_device_dataset"
    monkeypatch.setattr(multi_device_iterator_ops, name, note(create, made))
    monkeypatch.setattr(keras_compat, "without_tuning", note(distribute, given))
    data = tf.data.Dataset.from_tensor_slices(rows(8)).repeat().batch(4)
    compiled(strategy, keras.optimizers.SGD).fit(data, steps_per_epoch=2, verbose=0)
    assert len(made) >= 2 and set(tuned_by(made)) == {False}
    assert given and set(tuned_by(given)) == {False}


def test_whoever_asks_for_tuning_has_it():
    options = tf.data.Options()
    options.autotune.enabled = True
    assert tuned_by([without_tuning(tf.data.Dataset.range(3).with_options(options))]) == [True]


@pytest.mark.slow
def test_canary_datasets_of_devices_are_tuned(monkeypatch):
    made = []

    def keep(function):
        def create(*args, **kwargs):
            made.append(function(*args, **kwargs))
            return made[-1]

        return create

    name = "_create_device_dataset"
    ours()
    create = getattr(multi_device_iterator_ops, name)
    monkeypatch.setattr(multi_device_iterator_ops, name, keep(create))
    for strategy, expected in ((ours(), False), (stock(), None), (ours(), False)):
        made.clear()
        iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2)))
        whole = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(4))
        iter(whole)
        assert len(made) == 4 and set(tuned_by(made)) == {expected}


@contextlib.contextmanager
def iterators(monkeypatch):
    """A list to which every iterator over distributed data is added."""
    created, name = [], "_create_iterators_per_worker"
    create = getattr(input_lib, name)

    def note(*args, **kwargs):
        created.append(args)
        return create(*args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(input_lib, name, note)
        yield created


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", [["a", "b", "c"], [5, 6, 7]], ids=["words", "numbers"])
def test_canary_lookups_refuse_a_dummy_row(words):
    kind = keras.layers.StringLookup if words[0] == "a" else keras.layers.IntegerLookup
    x, y = tf.constant([[word] for word in words[:1] * 3 + words]), np.arange(6.0)[:, None]

    def train(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            lookup = kind(vocabulary=words, num_oov_indices=0)
            embed = keras.layers.Embedding(3, 2)
            inputs = keras.Input((1,), dtype=x.dtype.name)
            outputs = keras.layers.Dense(1)(keras.layers.Flatten()(embed(lookup(inputs))))
            model = keras.Model(inputs, outputs)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        return [*model.get_weights(), model.predict(x[:1], verbose=0)]

    # The last batch leaves a replica without a row.
    for one, two in zip(train(ours(1)), train(ours())):
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-6)
    with without("IndexLookup._lookup_dense"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="should be in vocabulary"):
            train(ours())


def test_canary_every_epoch_creates_an_iterator_that_is_not_used(monkeypatch):
    x = np.ones((4, 3), "float32")
    for strategy, expected in ((ours(), 1), (stock(), 2), (ours(), 1)):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        with iterators(monkeypatch) as created:
            model.predict(x, batch_size=2, verbose=0)
        assert len(created) == expected


def test_canary_each_worker_shuffles_arrays_by_itself():
    x = np.arange(64)

    def orders():
        """As two workers have them, in two epochs each."""
        adapters = [ArrayDataAdapter(x, batch_size=64, shuffle=True) for _ in range(2)]
        made = [adapter.get_tf_dataset() for adapter in adapters]
        return [[next(iter(each)).numpy().tolist() for _ in range(2)] for each in made]

    ours()
    before, model = context.global_seed(), keras.Sequential()
    marks.ORDER_SEED.set(model, 3)
    try:
        tf.random.set_seed(None)
        one, other = orders()
        assert one != other
        with keras_compat.shuffling_for(model):
            one, other = orders()
        assert one == other and one[0] != one[1] and sorted(one[0]) == x.tolist()
        assert context.global_seed() is None
        tf.random.set_seed(1)
        own = orders()
        tf.random.set_seed(1)
        with keras_compat.shuffling_for(model):
            assert orders() == own
        assert own[0][0] == own[0][1]
    finally:
        tf.random.set_seed(before)


def test_an_iterator_is_created_for_each_epoch(monkeypatch):
    x, strategy = np.ones((4, 3), "float32"), ours()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    settings = {"batch_size": 2, "verbose": 0, "validation_batch_size": 2}
    with iterators(monkeypatch) as created:
        model.fit(x, x[:, :1], epochs=2, validation_data=(x, x[:, :1]), **settings)
        assert len(created) == 4
        # With a number of steps one iterator goes on through the epochs.
        created.clear()
        model.fit(x, x[:, :1], epochs=3, steps_per_epoch=1, batch_size=2, verbose=0)
    assert len(created) == 2


def run_collectives(*arguments):
    script = Path(__file__).parent / "collective_keys.py"
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("_all_gather", "gather"), ("all_reduce", "reduce")])
def test_canary_a_key_stands_for_one_shape(name, kind):
    sizes = [int(line.split()[0]) for line in run_collectives("nothing", kind).stdout.splitlines()]
    assert sizes == ([4, 6, 4] if kind == "gather" else [2, 3, 2])
    upstream = run_collectives(name, kind)
    assert upstream.returncode != 0
    assert "Shape mismatch in the collective instance" in upstream.stderr


@pytest.mark.slow
@pytest.mark.parametrize("taken_out", ["nothing", pytest.param("use_own_groups", id="upstream")])
def test_canary_a_second_strategy_finds_the_groups_of_the_first(taken_out):
    done = run_collectives(taken_out, "strategies")
    if taken_out == "nothing":
        assert (done.returncode, done.stdout.split()) == (0, ["2", "3", "2", "2"]), done.stderr
    else:
        assert "joining a group with size3, but that group has size 2" in done.stderr


@pytest.mark.parametrize(("given", "sent_as"), [("bfloat16", "float32"), ("int32", "int64")])
def test_numbers_that_gpus_cannot_add_are_added_in_a_wider_dtype(given, sent_as):
    sent = []

    def original(launcher, value, control_input, options):
        sent.append(value.dtype)
        return value + value

    add = collectives.reduce_by_size(original)
    for device, dtype in (("/device:GPU:1", sent_as), ("/device:CPU:0", given)):
        value = tf.constant([3, 2], given)
        total = add(types.SimpleNamespace(_device=device), value, None, None)
        assert (sent.pop(), total.dtype, total.numpy().tolist()) == (dtype, given, [6, 4])


@pytest.mark.slow
def test_canary_new_keys_do_not_reach_nested_functions():
    assert run_collectives("nothing", "nested").returncode == 0
    assert run_collectives("_use_unique_instance_key", "nested").returncode != 0


@pytest.mark.slow
def test_canary_a_trace_cannot_make_variables_for_later():
    def trace(strategy):
        with strategy.scope():
            layer = keras.layers.Dense(2)
        step = tf.function(lambda x: strategy.run(layer, args=(x,)))
        step.get_concrete_function(tf.TensorSpec([None, 4]))

    with pytest.raises(Exception, match="Unable to lift tensor"):
        trace(stock())
    with pytest.raises(NotBuilt), keras_compat.noting_unbuilt([]) as found:
        trace(ours())
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64"])
def test_canary_initial_values_of_few_dtypes_are_sent(dtype):
    keys = {"group_size": 2, "group_key": 1, "instance_key": 1, "shape": [3]}
    with tf.Graph().as_default(), pytest.raises(TypeError, match="not in list of allowed values"):
        tf.raw_ops.CollectiveBcastSend(input=tf.zeros(3, dtype), **keys)


@pytest.mark.slow
def test_canary_workers_add_by_tensorflows_collectives_alone():
    options = inspect.signature(tf.distribute.MultiWorkerMirroredStrategy.__init__).parameters
    assert set(options) == {"self", "cluster_resolver", "communication_options"}
    implementations = tf.distribute.experimental.CommunicationImplementation
    assert {each.name for each in implementations} == {"AUTO", "RING", "NCCL"}


def test_the_private_names_are_there():
    for name in ("_maybe_symbolic_build", "_symbolic_build", "_make_function"):
        assert hasattr(keras_trainer.TensorFlowTrainer, name)
    fit = inspect.signature(keras_trainer.TensorFlowTrainer._maybe_symbolic_build)
    assert list(fit.parameters) == ["self", "iterator", "data_batch"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keras_compat.check_versions()


def test_versions_that_were_not_tried_are_told():
    tried = "is tested with keras {} to {}".format(*table.TRIED["keras"])
    with pytest.warns(UserWarning, match=f"{tried}.*Installed: keras 3.99.0"):
        keras_compat.check_versions({"keras": "3.99.0", "tensorflow": tf.__version__})


@pytest.mark.parametrize(
    "name", [(keras.Model, "_nothing", ()), (keras.Model, "_symbolic_build", ("nothing",))]
)
def test_a_missing_private_name_is_an_error_with_versions(name):
    with pytest.raises(RuntimeError, match=rf"missing: {name[1]}. Received: keras .*tested"):
        keras_compat.check_versions(names=[name])


def test_assigned_variables_are_found_in_functions_branches_and_loops():
    made = [keras.Variable(1.0, name=f"v{number}") for number in range(6)]
    seen = []

    @tf.function(autograph=False)
    def inner(x):
        tf.cond(x > 0, lambda: made[0].value.assign(x), lambda: tf.identity(x))

    @tf.function(autograph=False)
    def step(x):
        inner(x)
        branches = [lambda: tf.identity(x), lambda: made[1].value.assign(x)]
        tf.switch_case(tf.cast(x, tf.int32), branches)
        tf.while_loop(lambda _: False, lambda _: made[2].value.assign_add(x), [x])
        graph, first = tf.compat.v1.get_default_graph(), keras_compat.next_op()
        made[3].assign(made[4] + x)
        apart = [(graph, first, keras_compat.next_op())]
        for left_out in ((), apart):
            found = keras_compat.variables_assigned(made, left_out)
            seen.append([variable.name for variable in found])

    step(tf.constant(1.0))
    assert seen == [["v0", "v1", "v2", "v3"], ["v0", "v1", "v2"]]
    assert keras_compat.variables_assigned(made) == made


def test_installing_twice_changes_nothing():
    ours()
    first = keras_trainer.TensorFlowTrainer._maybe_symbolic_build, keras_nn._compute_moments_sync
    ours()
    second = keras_trainer.TensorFlowTrainer._maybe_symbolic_build, keras_nn._compute_moments_sync
    assert first == second


def test_stock_strategies_stay_as_they_are():
    ours()
    model = compiled(stock(), keras.optimizers.SGD)
    model.fit(*rows(8), batch_size=4, verbose=0)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        compiled(stock(), keras.optimizers.SGD).fit(*rows(15), batch_size=15, verbose=0)


@pytest.mark.parametrize("kind", ["train", "test", "predict"])
def test_keras_steps_are_recognized(kind, monkeypatch):
    seen = []
    original = keras_compat.step_of

    def step_of(fn):
        seen.append(original(fn))
        return seen[-1]

    monkeypatch.setattr(keras_compat, "step_of", step_of)
    model = compiled(ours(), keras.optimizers.SGD)
    x, y = rows(8)
    calls = {"train": model.fit, "test": model.evaluate}
    if kind == "predict":
        model.predict(x, batch_size=4, verbose=0)
    else:
        calls[kind](x, y, batch_size=4, verbose=0)
    assert {found for found, _ in seen} == {kind}
    assert all(found_model is model for _, found_model in seen) or kind == "predict"


def test_a_users_own_function_is_not_a_step():
    assert keras_compat.step_of(lambda data: data) == (None, None)


@pytest.mark.slow
def test_canary_predict_is_traced_for_the_rows_that_it_is_given():
    model = compiled(tf.distribute.get_strategy(), keras.optimizers.SGD)
    for count in (4, 3):
        model.predict(rows(count)[0], verbose=0)
    assert model.predict_function.experimental_get_tracing_count() > 1


@pytest.mark.parametrize("kind", ["train", "test"])
def test_canary_a_step_reads_weights_from_before_they_moved(kind):
    strategy, x = ours(1), np.ones((4, 2), "float32")

    def last_loss():
        """The loss after its only weight has moved, and become 1."""
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
            model.compile(keras.optimizers.SGD(0.0), "mse")
        call = model.train_on_batch if kind == "train" else model.test_on_batch
        call(x, x[:, :1])
        keras_compat.put_on(model.layers[0].kernel, "CPU:1")
        model.set_weights([np.ones((2, 1))])
        # In Keras 3.12 these calls do not, and return the mean loss of both.
        model.reset_metrics()
        return float(call(x, x[:, :1]))

    with without(f"Model.make_{kind}_function"):
        assert last_loss() != 1.0
    assert last_loss() == 1.0


@pytest.mark.slow
def test_canary_predict_on_batch_answers_once_for_each_replica():
    assert len(compiled(stock(), keras.optimizers.SGD).predict_on_batch(rows(13)[0])) == 26
    assert len(compiled(ours(), keras.optimizers.SGD).predict_on_batch(rows(13)[0])) == 13


@pytest.mark.slow
def test_canary_a_function_of_the_users_own_is_not_traced_again_within_another_trace():
    traced = []

    @tf.function
    def inner(x):
        traced.append(None)
        return x + 1.0

    for separate in (False, True):
        traced.clear()
        for _ in range(2):
            with keras_compat.separate_traces() if separate else contextlib.nullcontext():
                tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec([]))
        assert len(traced) == (2 if separate else 1)


def test_canary_a_step_records_summaries_also_within_a_record_if_around_it(tmp_path):
    strategy, writer = ours(), tf.summary.create_file_writer(str(tmp_path))

    def step():
        with writer.as_default(), tf.summary.record_if(True):
            return tf.summary.should_record_summaries()

    def recorded():
        with tf.summary.record_if(False):
            return [bool(x) for x in strategy.experimental_local_results(strategy.run(step))]

    assert recorded() == [True, False]
    with keras_compat.separate_traces():
        assert recorded() == [False, False]
        # Another thread of the user's goes on.
        assert step()
    assert recorded() == [True, False]


@pytest.mark.slow
def test_canary_replicas_reduce_unless_prevented():
    """Sums, means, gathers and their gradients are each replica's own."""
    strategy = ours()

    def step():
        context = tf.distribute.get_replica_context()
        value = tf.reshape(tf.cast(context.replica_id_in_sync_group + 1, tf.float32), [1])
        with keras_compat.as_first_replica(), tf.GradientTape() as tape:
            tape.watch(value)
            gathered = context.all_gather(value, axis=0)
            total = tf.reduce_sum(context.all_reduce("SUM", gathered) ** 2)
            return total, tape.gradient(total, value)

    with keras_compat.as_one_device(strategy):
        totals, gradients = tf.function(lambda: strategy.run(step))()
    assert [float(x) for x in strategy.experimental_local_results(totals)] == [1.0, 4.0]
    assert [float(x[0]) for x in strategy.experimental_local_results(gradients)] == [2.0, 4.0]
    totals, _ = tf.function(lambda: strategy.run(step))()
    assert float(strategy.experimental_local_results(totals)[0]) == 2.0**2 + 4.0**2


def _operations_searched(strategy, layers, monkeypatch):
    """Returns how many operations TensorFlow searches while a step of all-reduces is traced."""
    from tensorflow.python.ops import op_selector

    found, search = [], op_selector.get_backward_walk_ops

    def counted(*args, **kwargs):
        found.append(search(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(op_selector, "get_backward_walk_ops", counted)

    def step():
        context = tf.distribute.get_replica_context()
        value = tf.ones([2])
        for _ in range(layers):
            value = tf.sin(value) + context.all_reduce("SUM", tf.sin(value))
        return value

    tf.function(lambda: strategy.run(step)).get_concrete_function()
    monkeypatch.setattr(op_selector, "get_backward_walk_ops", search)
    return sum(map(len, found))


def test_canary_each_all_reduce_is_searched_for_variables(monkeypatch):
    """A stock strategy searches the graph for each; under ours there is no search."""
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    few, many = (_operations_searched(stock, layers, monkeypatch) for layers in (4, 16))
    assert many > few > 0
    assert _operations_searched(ours(), 16, monkeypatch) == 0


def test_a_custom_gradient_finds_its_variables_in_a_step():
    """A variable that the function reads, directly or in a function it calls, has its gradient."""
    strategy = ours()
    with strategy.scope():
        scale = tf.Variable(3.0)

    @tf.custom_gradient
    def scaled(x):
        def gradient(upstream, variables=()):
            return upstream * 2.0, [upstream * 5.0 for _ in variables]

        return x * scale, gradient

    def step():
        with tf.GradientTape() as tape:
            y = scaled(tf.constant(1.0))
        return tape.gradient(y, scale)

    gradients = tf.function(lambda: strategy.run(step))()
    assert [float(g) for g in strategy.experimental_local_results(gradients)] == [5.0, 5.0]


def test_canary_a_step_runs_on_the_first_replica_alone():
    """A change of a variable there changes that replica's copy, without reductions."""
    strategy = ours()
    with strategy.scope():
        weight = keras.Variable([0.0])
    seen = []

    def step():
        seen.append(tf.distribute.get_replica_context().replica_id_in_sync_group)
        tf.distribute.get_replica_context().merge_call(lambda _, x: x, (1.0,))
        return weight + 1.0

    with keras_compat.as_one_device(strategy), keras_compat.on_first_replica(strategy):
        result = tf.function(lambda: strategy.run(step))()
    assert len(seen) == 1 and result.numpy() == [1.0]
    assert len(strategy.experimental_local_results(strategy.run(step))) == 2


def test_canary_graphs_are_not_optimized_where_they_run_once():
    names = "disable_meta_optimizer", "constant_folding"
    tf.config.optimizer.set_experimental_options({names[1]: True})
    before = tf.config.optimizer.get_experimental_options()
    with keras_compat.without_optimized_graphs():
        assert tf.config.optimizer.get_experimental_options()[names[0]]
    assert tf.config.optimizer.get_experimental_options() == {names[0]: False, **before}


@pytest.mark.slow
def test_canary_a_result_under_another_name_is_one_replicas():
    """keras.io's variational autoencoder logs `{"loss": self.total_loss.result()}`."""

    class Renaming(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.total = keras.metrics.Mean(name="total_loss")

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            self.total.update_state(loss)
            return {"error": self.total.result()}

    def errors(strategy, replaced=True):
        keras.utils.set_random_seed(0)
        entry = next(e for e in TABLE if e.owner is keras.metrics.Mean and e.name == "result")
        with strategy.scope():
            model = Renaming([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd")
        ours = keras.metrics.Mean.result
        try:
            if not replaced:
                keras.metrics.Mean.result = ours.tfmulti_replaces
            data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
            return model.fit(data, epochs=2, verbose=0).history["error"]
        finally:
            keras.metrics.Mean.result = ours
            assert entry.test

    X = np.random.RandomState(0).randn(13, 4).astype("float32")
    Y = X[:, :1] * 2
    one = errors(replicas.create_strategy(1))
    np.testing.assert_allclose(errors(replicas.create_strategy(2)), one, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="one device's result"):
        errors(replicas.create_strategy(2), replaced=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [int, float])
def test_canary_a_variable_of_replicas_is_no_number(kind):
    """Callbacks write `int(self.model.optimizer.iterations)`."""

    def number(strategy):
        with strategy.scope():
            variable = keras.Variable(3, dtype="int32", trainable=False)
        return kind(variable), kind(variable.value)

    with pytest.raises(TypeError, match="MirroredVariable"):
        number(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    assert number(replicas.create_strategy(2)) == (3, 3)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_value_that_was_read_stays_while_its_variable_changes(jit_compile):
    variable = tf.Variable([1.0, 2.0])
    read, expected = keras_compat.read_handle(variable.handle), [1.0, 2.0]

    @tf.function(jit_compile=jit_compile)
    def twice():
        variable.assign_add(variable)

    def scatter():
        variable.scatter_nd_add([[0]], [5.0])

    for change in (lambda: variable.assign([7.0, 8.0]), twice, scatter, twice):
        change()
        assert read.tolist() == expected != variable.numpy().tolist()
        keras_compat.write_handle(variable.handle, read)
        assert variable.numpy().tolist() == expected


def test_assignments_are_counted():
    """TensorFlow does not tell how often a variable was assigned a value."""

    def assigned(strategy):
        with strategy.scope():
            variable = tf.Variable([0.0, 0.0], trainable=False)
        variable.assign([1.0, 2.0])
        variable.assign_add([1.0, 2.0])
        return marks.NUM_ASSIGNED.get(variable), variable.numpy().tolist()

    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert assigned(stock) == (0, [2.0, 4.0])
    assert assigned(replicas.create_strategy(2)) == (2, [2.0, 4.0])


@pytest.mark.slow
def test_canary_each_replica_makes_a_generator_of_its_own():
    """Keras keeps what is global for each thread, and each replica has one."""

    def draw(strategy):
        @tf.function
        def step():
            return strategy.run(lambda: keras.random.normal((2,)))

        keras.random.normal((2,))
        if getattr(strategy, "repairs_keras", False):
            keras_compat.prepare_global_seeds(strategy)
        return strategy.experimental_local_results(step())

    with pytest.raises(ValueError, match="singleton tf.Variables"):
        draw(stock())
    first, second = draw(ours())
    assert np.all(first != second)


@pytest.mark.slow
def test_canary_an_optimizer_outside_of_replicas():
    def apply(strategy):
        with strategy.scope():
            variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)
            optimizer.apply([tf.constant(1.0)], [variable])

    with pytest.raises(AttributeError, match="merge_call"):
        apply(stock())
    with pytest.raises(ValueError, match="must be applied in replica context"):
        apply(ours())


class NoisySum(keras.Model):
    """Sums over rows, which cannot be split, with random numbers of TensorFlow."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x + tf.random.normal(tf.shape(x)))
            loss = self.optimizer.scale_loss(tf.reduce_sum(tf.square(outputs - y)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"scaled": loss}


@pytest.mark.slow
def test_canary_loss_scaling_applies_each_replicas_gradients():
    def train():
        with ours().scope():
            model = NoisySum()
            model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3)))
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)

    with pytest.warns(UserWarning, match="Every replica computes"):
        train()
    with without("LossScaleOptimizer.apply"), pytest.raises(ValueError, match="one device"):
        train()


class Recomputed(keras.layers.Layer):
    """Dropout between two layers, which Keras runs again for gradients."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.run = keras.remat(self.compute)

    def build(self, shape):
        self.inner.build(shape)
        super().build(shape)

    def compute(self, x):
        return self.dropout(keras.ops.tanh(self.inner(x)), training=True)

    def call(self, x):
        return self.run(x)


@pytest.mark.slow
def test_canary_keras_computes_activations_from_another_state():
    def gradients(strategy):
        with strategy.scope():
            layer = Recomputed()
            layer.build((None, 4))
            seed, x, found = layer.dropout.seed_generator.state, tf.constant(rows(8)[0]), []
            before = np.array(seed)
            for function in (layer.run, layer.compute):
                seed.assign(before)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = function(x)
                found.append(tape.gradient(y, x).numpy())
        return np.abs(found[0] - found[1]).max()

    strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
    assert gradients(strategy) < 1e-6
    with without("core.remat"):
        assert gradients(strategy) > 1e-2


def test_canary_a_function_with_its_own_gradient_loses_those_of_tensors():
    table.install_for_repeated_calls(activations.recomputed)
    weight = keras.Variable([[2.0]])

    def gradient():
        with tf.GradientTape() as tape:
            value = tf.convert_to_tensor(weight)
            with keras_compat.RecordingScope([(weight, value)]):
                found = tf.recompute_grad(lambda x: x @ weight)(tf.ones((1, 1)))
        return tape.gradient(found, weight.value)

    for run in (gradient, tf.function(gradient)):
        with pytest.raises(RuntimeError, match="would lose its gradient"):
            run()
    names = "_eager_mode_decorator", "_graph_mode_decorator"
    for run, name in zip((gradient, tf.function(gradient)), names):
        with without(f"custom_gradient.{name}"):
            assert run() is None


def test_canary_a_graph_does_not_count_what_it_captures():
    variable = tf.Variable(1.0)

    @tf.function
    def trace():
        variable.read_value()
        # Otherwise `Graph.version` would serve.
        assert tf.compat.v1.get_default_graph().version < keras_compat.next_op()

    trace()


def test_canary_a_tape_tells_whether_it_watches():
    tensor = tf.constant(1.0)
    assert not keras_compat.is_recorded([]) and not keras_compat.is_recorded([tensor])
    with tf.GradientTape() as tape:
        assert not keras_compat.is_recorded([tensor])
        tape.watch(tensor)
        assert keras_compat.is_recorded([tensor])


def test_canary_the_state_of_a_generator_has_its_name():
    assert keras_compat.is_seed_state(keras.random.SeedGenerator(1).state)
    assert not keras_compat.is_seed_state(keras.Variable(1.0, name="state"))


def test_canary_calls_of_a_model_have_layers():
    hidden = [keras.layers.Dense(2, name=name) for name in "abc"]
    model = keras.Sequential([keras.Input((2,)), *hidden])
    assert keras_compat.layers_of_nodes(model) == hidden
    assert len(keras_compat.nodes_of(model)) == 3


class _Servers:
    """The scope of one device that takes itself for that of two servers."""

    has_parameter_servers, num_servers = True, 2


def test_canary_embeddings_on_servers_are_read_whole(monkeypatch):
    def lookups(entry):
        ours(1)
        strategy = tfmulti.create_strategy("one_device", devices=["CPU:0"])
        for name in ("has_parameter_servers", "num_servers"):
            monkeypatch.setattr(strategy, name, getattr(_Servers, name), raising=False)
        with contextlib.ExitStack() as stack:
            if entry:
                stack.enter_context(without("Embedding.build"))
            with strategy.scope():
                layer = keras.layers.Embedding(40, 3)
                layer.build()
        ids = tf.constant([1, 2])
        graph = tf.function(lambda: layer(ids)).get_concrete_function().graph
        return {operation.type for operation in graph.get_operations()}

    assert "ReadVariableOp" in lookups(True) and "ResourceGather" not in lookups(True)
    assert "ReadVariableOp" not in lookups(False) and "ResourceGather" in lookups(False)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "uint8", "int16", "uint32", "float32"])
def test_workers_gather_numbers_of_every_dtype(dtype):
    gathered = (tf.float32, tf.float16, tf.float64, tf.int32, tf.int64)

    def original(launcher, tensor, options):
        assert tensor.dtype in gathered, "TensorFlow refuses it"
        return tf.concat([tensor, tensor], 0)

    rows = tf.cast([[0, 1], [1, 0]], dtype)
    found = collectives.gather_by_shape(original)(None, rows, None)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, tf.concat([rows, rows], 0))


def test_canary_tensorflow_keeps_the_gradients_of_what_is_traced():
    @tf.custom_gradient
    def double(x):
        return 2.0 * x, lambda upstream: 2.0 * upstream

    kept = set(ops.gradient_registry.list())
    tf.function(double).get_concrete_function(tf.TensorSpec([]))
    gc.collect()
    assert set(ops.gradient_registry.list()) - kept
    kept = set(ops.gradient_registry.list())
    with keras_compat.separate_traces():
        tf.function(double).get_concrete_function(tf.TensorSpec([]))
    assert set(ops.gradient_registry.list()) == kept


def test_a_scope_within_a_layer_of_half_precision_keeps_all_digits():
    variable = keras.Variable([1 / 3])
    with AutocastScope("float16"):
        scope = keras_compat.RecordingScope([(variable, variable.value)])
        assert variable.dtype == "float16"
    assert scope.get_current_value(variable).dtype == tf.float32
