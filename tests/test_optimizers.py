import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti import keras_compat
from tfmulti.step import clipping, parameters, weighting

SGD = keras.optimizers.SGD
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1, momentum=0.9),
    "global_clipnorm": lambda: SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: SGD(0.1, clipvalue=0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "accumulation": lambda: SGD(0.1, gradient_accumulation_steps=2),
    "ema": lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=8.0),
}


def images(count):
    rng = np.random.RandomState(0)
    return rng.randn(count, 6, 6, 1).astype("float32"), rng.randint(0, 3, count)


def layers(kind):
    penalty = keras.regularizers.L2(0.01)
    body = {
        "dense": [keras.layers.Flatten()],
        "conv": [keras.layers.Conv2D(4, 3, activation="tanh"), keras.layers.Flatten()],
        "batch_norm": [
            keras.layers.Flatten(),
            keras.layers.Dense(6, use_bias=False),
            keras.layers.BatchNormalization(synchronized=True),
        ],
        "gru": [keras.layers.Reshape((6, 6)), keras.layers.GRU(5)],
    }[kind]
    return [*body, keras.layers.Dense(3, kernel_regularizer=penalty)]


def train(num_replicas, optimizer, *, count=33, kind="dense", remainder="uneven", eager=False):
    """Three epochs in batches of 16; gives weights and history."""
    keras.utils.set_random_seed(1)
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers(kind)])
        model.compile(
            tfmulti.DistributedOptimizer(optimizer()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            run_eagerly=eager,
        )
    data = images(count)
    history = model.fit(
        tfmulti.distribute_train(data, strategy, 16, seed=3, remainder=remainder),
        validation_data=tfmulti.distribute_eval(data, strategy, 16),
        epochs=3,
        verbose=0,
    )
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    return weights, {name: np.array(values) for name, values in history.history.items()}


def assert_equal_runs(run, reference):
    np.testing.assert_allclose(run[0], reference[0], rtol=0, atol=1e-6)
    for name, values in reference[1].items():
        np.testing.assert_allclose(run[1][name], values, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_gives_one_devices_result(name):
    reference = train(1, OPTIMIZERS[name])
    assert_equal_runs(train(3, OPTIMIZERS[name]), reference)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["conv", "batch_norm", "gru"])
@pytest.mark.parametrize("num_replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_empty_replica_batch_leaves_no_trace(kind, num_replicas):
    # 33 examples in batches of 16: the last batch has one row for several replicas.
    reference = train(1, OPTIMIZERS["sgd"], kind=kind)
    assert_equal_runs(train(num_replicas, OPTIMIZERS["sgd"], kind=kind), reference)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_padding_changes_nothing(num_replicas):
    reference = train(1, OPTIMIZERS["sgd"], count=43)
    run = train(num_replicas, OPTIMIZERS["sgd"], count=43, remainder="pad")
    assert_equal_runs(run, reference)


@pytest.mark.slow
def test_eager_steps_are_right_too():
    reference = train(1, OPTIMIZERS["sgd"])
    assert_equal_runs(train(2, OPTIMIZERS["sgd"], eager=True), reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_nobody_has_wrapped_is_right_too(name, monkeypatch):
    reference = train(1, OPTIMIZERS[name], count=43)
    monkeypatch.setattr(tfmulti, "DistributedOptimizer", lambda optimizer: optimizer, raising=False)
    assert_equal_runs(train(3, OPTIMIZERS[name], count=43), reference)


@pytest.mark.slow
def test_without_the_weights_of_rows_uneven_batches_are_wrong(monkeypatch):
    # The canary of the whole module.
    reference = train(1, OPTIMIZERS["sgd"], count=43)
    monkeypatch.setattr(weighting, "row_weight", lambda counted, whole: tf.constant(1 / 3))
    weights, _ = train(3, OPTIMIZERS["sgd"], count=43)
    assert np.abs(weights - reference[0]).max() > 1e-4


def decayed_but_for_layers():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["embedding", "dense_1/kernel"])
    return optimizer


class ByName(keras.optimizers.SGD):
    """Updates single rows in place, and biases at another rate, which it knows by their names."""

    def update_step(self, gradient, variable, learning_rate):
        rate = tf.cast(learning_rate, variable.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(rate * gradient.values, gradient.indices))
        else:
            factor = 0.5 if variable.name.endswith("dense/bias:0") else 1.0
            variable.assign_sub(factor * rate * gradient)


def updated_table(num_replicas, optimizer):
    """A table and two dense layers after two updates; of plain Keras for no replicas."""
    keras.utils.clear_session()
    strategy = create_strategy(num_replicas) if num_replicas else tf.distribute.get_strategy()
    with strategy.scope():
        table, *dense = keras.layers.Embedding(9, 4), *(keras.layers.Dense(4) for _ in range(2))
        keras.Sequential([keras.Input((3,), dtype="int32"), table, *dense])
        variables = [table.embeddings, *(v for layer in dense for v in layer.weights)]
        for variable in variables:
            variable.assign(tf.reshape(tf.range(float(np.prod(variable.shape))), variable.shape))
        optimizer = optimizer()

        def update():
            # A custom loop adds the gradients of replicas.
            part = 1 / max(num_replicas, 1)
            rows = tf.IndexedSlices(part * tf.ones((2, 4)), tf.constant([1, 7]), (9, 4))
            # Several replicas add sparse gradients of steps that are traced only.
            rows = rows if num_replicas < 2 else tf.convert_to_tensor(rows)
            optimizer.apply([rows, *(part * tf.ones(v.shape) for v in variables[1:])], variables)

        for _ in range(2):
            strategy.run(update)
    return [variable.numpy() for variable in variables]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("optimizer", [decayed_but_for_layers, lambda: ByName(0.1)])
def test_optimizers_know_weights_by_their_names_on_one_device(optimizer, num_replicas):
    found, expected = updated_table(num_replicas, optimizer), updated_table(0, optimizer)
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, other, rtol=0, atol=1e-5)


def test_the_class_and_the_file_stay_the_users(tmp_path):
    strategy = create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers("dense")])
        optimizer = tfmulti.DistributedOptimizer(SGD(0.1, clipnorm=1.0))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = images(16)
    model.fit(tfmulti.distribute_train(data, strategy, 8, seed=0), verbose=0)
    assert type(optimizer) is SGD
    assert tfmulti.DistributedOptimizer(optimizer) is optimizer
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is SGD
    assert int(loaded.optimizer.iterations) == 2
    for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_loss_scale_optimizer_takes_over_from_its_inner_one():
    inner = tfmulti.DistributedOptimizer(SGD(0.1))
    outer = tfmulti.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
    assert outer.tfmulti_distributed
    assert not hasattr(inner, "tfmulti_distributed")


def test_an_apply_that_the_user_has_set_on_the_object_stays():
    """It clips the gradients of the whole batch, also while they are checked for NaN."""

    def clipping(optimizer):
        inherited = optimizer.apply
        optimizer.apply = lambda grads, variables=None: inherited(
            [tf.clip_by_norm(each, 0.05) for each in grads], variables
        )
        return optimizer

    def fit(scope, distribute, callbacks):
        keras.utils.set_random_seed(1)
        with scope:
            optimizer = clipping(SGD(0.1))
            own = optimizer.apply
            model = keras.Sequential([keras.Input((6, 6, 1)), *layers("dense")])
            model.compile(distribute(optimizer), "sparse_categorical_crossentropy")
        x, y = images(33)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
        return np.concatenate([w.ravel() for w in model.get_weights()]), optimizer, own

    expected, *_ = fit(contextlib.nullcontext(), lambda optimizer: optimizer, [])
    checks = [tfmulti.callbacks.NonFinite("stop")]
    scope = create_strategy(3).scope()
    weights, optimizer, own = fit(scope, tfmulti.DistributedOptimizer, checks)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
    # Now the outer one reduces.
    tfmulti.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))
    assert optimizer.apply is own


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["by compile", "inside", "outside"])
def test_a_loss_scale_optimizer_is_right_wherever_it_is(wrapped):
    """43 examples in half precision, its losses scaled so that one replica overflows."""

    def fit(num_replicas):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(num_replicas)
        x, y = images(43)
        x[-1] *= 1000.0
        with strategy.scope():
            model = keras.Sequential([keras.Input((6, 6, 1)), *layers("dense")])
            model.compile(optimizer(), keras.losses.MeanSquaredError())
        data = (x, np.eye(3, dtype="float32")[y])
        model.fit(tfmulti.distribute_train(data, strategy, 16, seed=3), epochs=3, verbose=0)
        scale = float(np.array(model.optimizer.dynamic_scale))
        return np.concatenate([w.ravel() for w in model.get_weights()]), scale

    def optimizer():
        if wrapped == "by compile":
            return tfmulti.DistributedOptimizer(SGD(0.02))
        if wrapped == "inside":
            return keras.optimizers.LossScaleOptimizer(tfmulti.DistributedOptimizer(SGD(0.02)))
        return tfmulti.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(SGD(0.02)))

    keras.config.set_dtype_policy("mixed_float16")
    reference, scale = fit(1)
    assert np.isfinite(reference).all()
    assert scale < 2.0**15
    for num_replicas in (2, 3):
        weights, other_scale = fit(num_replicas)
        # Half precision: sums over 16 rows are rounded at 2**-11, on one device too.
        np.testing.assert_allclose(weights, reference, rtol=0, atol=1e-3)
        assert other_scale == scale


@pytest.mark.slow
def test_a_loaded_model_is_distributed_again(tmp_path):
    """Saved on two replicas; goes on on one, on three, and on one again, as if never stopped."""

    def go_on(num_replicas, path, weights=None):
        strategy = create_strategy(num_replicas)
        with strategy.scope():
            model = keras.models.load_model(path)
        data = tfmulti.distribute_train(images(43), strategy, 16, seed=3)
        model.fit(data, epochs=1, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 6
        return model

    strategy = create_strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 6, 1)), *layers("dense")])
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.AdamW(0.01, clipnorm=0.3))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(tfmulti.distribute_train(images(43), strategy, 16, seed=3), verbose=0)
    model.save(tmp_path / "model.keras")
    reference = go_on(1, tmp_path / "model.keras")
    assert not hasattr(reference.optimizer, "tfmulti_distributed")
    other = go_on(3, tmp_path / "model.keras")
    assert other.optimizer.tfmulti_distributed
    other.save(tmp_path / "other.keras")
    alone = keras.models.load_model(tmp_path / "other.keras")
    for ours, theirs in zip(reference.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)


def test_what_compile_takes_is_taken():
    by_name = tfmulti.DistributedOptimizer("adam")
    by_settings = tfmulti.DistributedOptimizer(
        keras.optimizers.serialize(keras.optimizers.SGD(0.25, clipnorm=1.0))
    )
    assert isinstance(by_name, keras.optimizers.Adam) and by_name.tfmulti_distributed
    assert by_settings.clipnorm == 1.0 and float(by_settings.learning_rate) == 0.25


def test_a_later_call_adds_settings_and_changes_none():
    optimizer = tfmulti.DistributedOptimizer("sgd", compression="bfloat16")
    assert tfmulti.DistributedOptimizer(optimizer) is optimizer
    assert tfmulti.DistributedOptimizer(optimizer, synchronize_every=1) is optimizer
    with pytest.raises(ValueError, match="no effect with .*compression='bfloat16'"):
        tfmulti.DistributedOptimizer(optimizer, synchronize_every=4)
    with pytest.raises(ValueError, match="cannot be changed. Received: compression='float16'"):
        tfmulti.DistributedOptimizer(optimizer, compression="float16")


def test_a_gradient_in_parts_below_its_limit_stays_what_it_is_in_float64():
    parts = [keras.Variable(np.zeros(2), dtype="float64") for _ in range(2)]
    optimizer = SGD(1.0, clipnorm=0.7)
    clipping.clip_together(optimizer, [parts])
    gradients = [tf.constant([0.3, 0.1], tf.float64), tf.constant([0.2, 0.4], tf.float64)]
    optimizer.apply(gradients, parts)
    for part, gradient in zip(parts, gradients):
        np.testing.assert_array_equal(-part.numpy(), gradient)


class Around(keras.optimizers.SGD):
    """An optimizer around another one."""

    def __init__(self, create):
        super().__init__()
        self.inner = create(None)


@pytest.mark.parametrize("kind", ["MultiOptimizer", Around])
@pytest.mark.parametrize("setting", [{"shard": "state"}, {"synchronize_every": 2}])
def test_an_optimizer_of_several_is_not_sharded_and_takes_no_local_steps(setting, kind):
    # Earlier versions of Keras have none of several.
    kind = getattr(keras.optimizers, kind, Around) if isinstance(kind, str) else kind
    several = kind(lambda variable: keras.optimizers.Adam())
    [(name, value)] = setting.items()
    expected = f"`{name}` needs.*{name}={value!r} for a {kind.__name__}"
    with pytest.raises(ValueError, match=expected):
        tfmulti.DistributedOptimizer(several, **setting)


def test_what_else_may_read_the_gradients_of_an_update_is_found():
    class Logging(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {}

    def compiled(kind=keras.Sequential):
        model = kind([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(tfmulti.DistributedOptimizer("adam"), "mse")
        return model

    with create_strategy(2).scope():
        model, own, logging = compiled(), compiled(), compiled(Logging)
    apply = own.optimizer.apply
    own.optimizer.apply = lambda grads, variables: apply(grads, variables)
    before = keras.optimizers.SGD()
    before.apply = own.optimizer.apply
    with create_strategy(2).scope():
        set_before = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        set_before.compile(tfmulti.DistributedOptimizer(before), "mse")
    expected_of = ((model, True), (own, False), (set_before, False), (logging, False))
    for each, expected in expected_of:
        assert parameters.only_update_reads_gradients(each) is expected
    # As while a loss takes a gradient.
    with tf.GradientTape():
        assert not parameters.only_update_reads_gradients(model)


def test_a_variable_that_an_optimizer_was_not_built_for_is_named():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(1.0)])
    with pytest.raises(ValueError, match="Received: log_t:0, which sgd does not know"):
        keras_compat.variable_index(optimizer, tf.Variable(1.0, name="log_t"))


def test_what_a_class_does_by_itself_with_all_gradients_is_found():
    class Normed(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)

    class Clipped(Normed):
        def _clip_gradients(self, grads):
            return grads

    # The methods of Keras's own are replaced.
    create_strategy(2)
    stock = map(keras.optimizers.get, ("sgd", "nadam", "muon", "adafactor"))
    others = (keras.optimizers.LossScaleOptimizer(Normed()), Normed(), Clipped())
    found = [keras_compat.own_parts_of_apply(each) for each in (*stock, *others)]
    assert found == [[]] * 6 + [["_clip_gradients"]]


def test_something_else_is_refused():
    with pytest.raises(ValueError, match="must be a Keras 3 optimizer, or.* Received: .*'sdg'"):
        tfmulti.DistributedOptimizer("sdg")


def test_optimizers_that_nobody_has_wrapped_can_be_refused():
    strategy = create_strategy(2, distribute_optimizers=False)
    x, y = images(16)

    def fit(create_optimizer):
        with strategy.scope():
            model = keras.Sequential([keras.Input((6, 6, 1)), *layers("dense")])
            model.compile(
                create_optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        model.fit(x, y, verbose=0)

    with pytest.raises(ValueError, match="must be wrapped. Received: SGD. Use tfmulti"):
        fit(lambda: SGD(0.1))
    fit(lambda: tfmulti.DistributedOptimizer(SGD(0.1)))
