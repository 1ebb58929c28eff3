"""A step is verified on the user's own code: no false alarm, and nothing is left behind."""

import functools
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import verification_cases as cases
from keras import layers
from verification_cases import dense, squares

import tfmulti
from tfmulti import verification
from tfmulti.verification import custom_parts


def create_strategy(num_replicas=2, **arguments):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return tfmulti.create_strategy("mirrored", devices=devices, on_difference="error", **arguments)


def compile_in(strategy, make, optimizer=None, loss=squares, metrics=(), **arguments):
    with strategy.scope():
        model = make()
        optimizer = tfmulti.DistributedOptimizer((optimizer or (lambda: "sgd"))())
        metrics = [create() for create in metrics]
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, **arguments)
    return model


def fit(make, optimizer=None, num_replicas=2, data=None, verify="auto", **arguments):
    """One epoch; a warning that something was not verified is an error."""
    strategy = create_strategy(num_replicas, verify=verify)
    model = compile_in(strategy, make, optimizer, **arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not verified")
        model.fit(*(data or cases.rows()), batch_size=8, verbose=0, shuffle=False)
    assert strategy.seconds_verified > 0
    return model


EXACT = {
    "an own loss": dict(make=dense),
    "an own layer": dict(make=lambda: dense(cases.Scale()), loss="mse"),
    "a counting layer": dict(make=lambda: dense(cases.CountSteps())),
    "a metric of sums": dict(make=dense, metrics=[cases.MeanError]),
    "an own step": dict(make=cases.CustomStep),
    "two optimizers": dict(make=cases.Pair),
    "gradients of nothing": dict(
        make=lambda: dense(layers.BatchNormalization(synchronized=True)),
        optimizer=keras.optimizers.Adam,
    ),
    "local normalization": dict(make=lambda: dense(layers.BatchNormalization())),
    "accumulation": dict(
        make=dense, optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    ),
    "eager": dict(make=dense, run_eagerly=True),
    "steps a call": dict(make=dense, steps_per_execution=2),
    "a mean": dict(make=dense, loss=cases.mean_of_squares),
    "a sum": dict(make=dense, loss=cases.sum_of_squares),
    "dropout": dict(make=lambda: dense(cases.Scale(), layers.Dropout(0.5))),
    "noise of one's own": dict(make=lambda: dense(cases.Noise())),
    "a root": dict(make=dense, loss=cases.root_of_mean),
    "valid ones": dict(make=dense, loss=cases.valid_only),
    "average loss": dict(make=dense, loss=cases.average_loss),
    "a maximum": dict(make=dense, metrics=[cases.Largest]),
    "adversaries, row by row": dict(make=cases.AdversarialOfRows),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_no_false_alarm(name, num_replicas):
    fit(**EXACT[name], num_replicas=num_replicas)


def clip(gradients):
    return [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]


TOLD = {
    "a running mean": (
        dict(make=lambda: dense(cases.RunningMean())),
        "local batch statistics, in RunningMean 'running_mean'",
    ),
    "a centre": (
        dict(make=lambda: dense(cases.Centre())),
        "local batch statistics, in Centre 'centre'",
    ),
    # The loss and the step stand in the way, and are not to blame.
    "a centre within a step": (
        dict(make=lambda: cases.WithNet(dense(cases.Centre()))),
        "local batch statistics, in Centre 'centre'",
    ),
    "an activation": (
        dict(make=lambda: dense(layers.Dense(3, cases.centred))),
        "local batch statistics, in centred",
    ),
    "a state": (
        dict(make=lambda: dense(cases.LargestSeen())),
        "state made from local rows, in LargestSeen",
    ),
    "a bank": (dict(make=cases.Bank), "state made from local rows, in train_step"),
    "a sum of a layer": (
        dict(make=lambda: dense(cases.Penalty())),
        "add_loss that sums over the batch, in Penalty",
    ),
    "losses of rows": (
        dict(make=lambda: dense(cases.AddPerRow())),
        "add_loss that sums over the batch, in AddPerRow",
    ),
    "a step's sum": (
        dict(make=lambda: cases.CustomStep(loss=cases.sum_of_squares)),
        "a step that sums over the batch, in train_step",
    ),
    "a number of replicas": (
        dict(make=lambda: cases.CustomStep(loss=cases.scaled)),
        "a step that depends on the number of replicas, in train_step",
    ),
    "a step's negatives": (
        dict(make=lambda: cases.CustomStep(loss=cases.negatives)),
        "a step that depends on the whole batch at once, in train_step",
    ),
    "negatives": (
        dict(make=dense, loss=cases.negatives),
        "a loss that depends on the whole batch at once, in negatives",
    ),
    "adversaries": (
        dict(make=cases.Adversarial),
        "a gradient with respect to inputs that mixes rows, in train_step",
    ),
    "a number for a metric": (
        dict(make=cases.Total),
        "number computed from local rows, in train_step",
    ),
    "a count": (dict(make=cases.CountRows), "a log that is not a mean over rows, in train_step"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", TOLD)
def test_told_before_the_first_update_with_its_cause(name, num_replicas):
    arguments, cause = TOLD[name]
    with pytest.raises(ValueError, match=re.escape("`train_step` must give")) as caught:
        fit(**arguments, num_replicas=num_replicas)
    text = str(caught.value)
    assert cause in text and "verification_cases.py:" in text, text


def test_an_operation_in_a_graph_is_no_stock_part():
    with pytest.raises(ValueError, match="local batch statistics, in Functional 'graph'"):
        fit(cases.functional, loss="mse")


ROW_BY_ROW = {
    "residual": lambda x: x + keras.layers.Dense(6)(x) * 2.0,
    "first step": lambda x: x[:, 0] - x[..., -1, :],
    "mean of steps": lambda x: keras.ops.mean(keras.ops.relu(x), axis=1),
    "parts": lambda x: keras.ops.concatenate([x, -x], axis=-1),
    "softmax of one": lambda x: keras.ops.softmax(keras.ops.stack([x, x], axis=1), axis=1),
}
ACROSS_ROWS = {
    "mean of rows": lambda x: x - keras.ops.mean(x, axis=0, keepdims=True),
    "mean of all": lambda x: x / keras.ops.max(x),
    "softmax of rows": lambda x: keras.ops.softmax(x, axis=0),
    "counted from the last axis": lambda x: x - keras.ops.sum(x, axis=-3, keepdims=True),
    "rows behind rows": lambda x: keras.ops.concatenate([x, x], axis=0),
    "other rows": lambda x: x + keras.ops.roll(x, 1, axis=0),
    "constants for rows": lambda x: x + np.ones((8, 1, 1)),
}


@pytest.mark.parametrize("name", [*ROW_BY_ROW, *ACROSS_ROWS])
def test_operations_of_single_rows_are_stock_parts(name):
    inputs = keras.Input((4, 6))
    outputs = {**ROW_BY_ROW, **ACROSS_ROWS}[name](inputs)
    inner = keras.Model(inputs, outputs)
    assert custom_parts.has_stock_step(inner, "train") == (name in ROW_BY_ROW)
    outer = keras.Sequential([keras.Input((4, 6)), inner])
    assert custom_parts.has_stock_step(outer, "train") == (name in ROW_BY_ROW)


def orthogonal():
    penalty = keras.regularizers.OrthogonalRegularizer(mode="columns")
    return layers.Dense(3, activity_regularizer=penalty)


def texts(**settings):
    return layers.TextVectorization(vocabulary=["a", "b"], **settings)


LAYERS_ACROSS_ROWS = {
    "a histogram": (keras.Input((4, 4, 3)), lambda: layers.Equalization(dtype="float64")),
    "a floor below the loudest": (
        keras.Input((16,)),
        lambda: layers.MelSpectrogram(8, sampling_rate=100, min_freq=1, num_mel_bins=2),
    ),
    "padding to the longest": (keras.Input((1,), dtype="string"), texts),
    "a norm over rows": (keras.Input((4,)), orthogonal),
}
LAYERS_ROW_BY_ROW = {
    "texts of one length": (
        keras.Input((1,), dtype="string"),
        lambda: texts(output_sequence_length=3),
    ),
    "counts": (keras.Input((1,), dtype="string"), lambda: texts(output_mode="count")),
    "a sum over rows": (keras.Input((4,)), lambda: layers.Dense(3, activity_regularizer="l2")),
}


@pytest.mark.parametrize("name", [*LAYERS_ROW_BY_ROW, *LAYERS_ACROSS_ROWS])
def test_layers_that_combine_rows_are_no_stock_parts(name):
    given, make = {**LAYERS_ROW_BY_ROW, **LAYERS_ACROSS_ROWS}[name]
    model = keras.Sequential([given, make()])
    assert custom_parts.has_stock_step(model, "train") == (name in LAYERS_ROW_BY_ROW)


def test_layers_that_run_code_of_others_are_no_stock_parts(tmp_path):
    keras.Sequential([keras.Input((4,)), layers.Dense(2)]).export(tmp_path, verbose=False)
    model = keras.Sequential([keras.Input((4,)), layers.TFSMLayer(tmp_path)])
    assert not custom_parts.has_stock_step(model, "predict")


def wrapping(function, original):
    """What a decorator returns: it has the name and the module of what it wraps."""
    return functools.wraps(original)(lambda *args: function(*args))


def with_own_loss(model):
    model.compile(loss=wrapping(cases.root_of_mean, keras.losses.mean_squared_error))
    model.test_on_batch(*cases.rows())


def with_own_metric(model):
    model.compile(loss="mse", metrics=[wrapping(squares, keras.losses.mean_squared_error)])
    model.test_on_batch(*cases.rows())


def with_own_step(model):
    model.train_step = wrapping(lambda data: {}, model.train_step)


def with_own_activation(model):
    model.layers[0].activation = wrapping(lambda x: x - x[:1], keras.activations.relu)


def with_function_of_keras(model):
    model.add(layers.Lambda(keras.ops.normalize, arguments={"axis": 0}))


def with_loaded_lambda(model):
    saved = layers.Lambda(lambda x: x - x[:1]).get_config()
    model.add(layers.Lambda.from_config(saved, safe_mode=False))


@pytest.mark.parametrize(
    "change",
    [
        with_own_loss,
        with_own_metric,
        with_own_step,
        with_own_activation,
        with_function_of_keras,
        with_loaded_lambda,
    ],
)
def test_functions_with_the_module_of_keras_are_no_stock_parts(change):
    model = dense()
    change(model)
    [part] = custom_parts.find_custom_parts(model, "train")
    assert not custom_parts.has_stock_step(model, "train")
    assert ("test_verification.py:" in part.where) == (change is not with_function_of_keras)


def state_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    parts = [part for v in variables for part in getattr(v.value, "values", [v.value])]
    return [part.numpy().tobytes() for part in parts]


@pytest.mark.slow
def test_everything_is_put_back_bit_for_bit():
    """The weights, the optimizer, the seeds, and where the data stand."""
    strategy = create_strategy(verify="always")
    model = compile_in(
        strategy,
        lambda: dense(layers.GaussianNoise(0.0), layers.BatchNormalization(), cases.CountSteps()),
        lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        metrics=[cases.MeanError],
    )
    data = tfmulti.distribute_train(cases.rows(), strategy, 8, seed=0)
    with strategy.scope():
        model.build((None, cases.NUM_FEATURES))
        model.optimizer.build(model.trainable_variables)
    before, at_first = state_of(model), []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            at_first.append((state_of(model)[: len(before)], data.position))

    model.fit(data, verbose=0, callbacks=[Look()])
    assert strategy.seconds_verified > 0
    assert at_first == [(before, (0, 0))]


@pytest.mark.slow
def test_training_is_the_same_with_and_without():
    weights = []
    for verify in ("always", "never"):
        keras.utils.set_random_seed(1)
        strategy = create_strategy(verify=verify)
        model = compile_in(strategy, dense, lambda: keras.optimizers.Adam(0.01))
        model.fit(*cases.rows(), batch_size=8, epochs=2, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    assert weights[0].tobytes() == weights[1].tobytes()


@pytest.mark.slow
def test_what_is_told_leaves_no_trace():
    strategy = create_strategy()
    model = compile_in(strategy, lambda: dense(cases.Centre()))
    with strategy.scope():
        model.build((None, cases.NUM_FEATURES))
        model.optimizer.build(model.trainable_variables)
    before = state_of(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="one device's result"):
            model.fit(*cases.rows(), batch_size=8, verbose=0)
    assert state_of(model)[: len(before)] == before
    assert strategy.num_replicas_in_sync == 2


@pytest.mark.slow
def test_functions_of_the_users_own_are_traced_anew_for_training():
    """A trace with one replica in sync would divide by 1 what two have added."""
    model = fit(cases.WithFunction)
    numbers = list(dict.fromkeys(model.seen))
    assert set(numbers) == {1, 2}
    assert model.seen[-1] == 2


@pytest.mark.slow
def test_seldom_asked_again(monkeypatch):
    """Once for what is compiled and for a form of data; again after `compile`."""
    verified, find_out = [], verification.find_out
    monkeypatch.setattr(verification, "find_out", lambda *a: verified.append(a) or find_out(*a))
    strategy = create_strategy()
    model = compile_in(strategy, dense)
    x, y = cases.rows()
    numbers = []
    for _ in range(2):
        for _ in range(2):
            verified.clear()
            model.fit(x, y, batch_size=8, verbose=0)
            numbers.append(len(verified))
        with strategy.scope():
            model.compile(tfmulti.DistributedOptimizer("sgd"), loss=squares)
    assert numbers[0] and not numbers[1] and numbers[2] and not numbers[3]


@pytest.mark.slow
def test_stock_parts_are_left_to_the_matrix():
    for verify, make, loss in (("auto", dense, "mse"), ("never", dense, cases.root_of_mean)):
        strategy = create_strategy(verify=verify)
        model = compile_in(strategy, make, loss=loss)
        model.fit(*cases.rows(), batch_size=8, verbose=0)
        assert strategy.seconds_verified == 0


def one_number_a_row():
    return keras.Sequential([dense(), layers.Dense(1, "sigmoid"), layers.Reshape(())])


def softmax_over_rows():
    return keras.Sequential([dense(), layers.Softmax(axis=0)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (softmax_over_rows, "mse"),
        (one_number_a_row, "categorical_crossentropy"),
        (dense, keras.losses.CosineSimilarity(axis=-2)),
        (dense, keras.losses.CosineSimilarity(axis=0)),
        (lambda: keras.Sequential([dense(), layers.UnitNormalization(axis=(0, 1))]), "mse"),
    ],
)
def test_parts_of_keras_that_combine_rows_are_told(make, loss):
    strategy = create_strategy()
    model = compile_in(strategy, make, loss=loss)
    x, y = cases.rows()
    with pytest.raises(ValueError, match="one device's result"):
        model.fit(x, y[:, 0] if make is one_number_a_row else y, batch_size=8, verbose=0)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="`verify` must be one of auto, always, never"):
        tfmulti.create_strategy("one_device", verify="sometimes")


def test_evaluate_is_verified():
    strategy = create_strategy()
    model = compile_in(strategy, lambda: dense(cases.Centre()))
    with pytest.raises(ValueError, match="`test_step` must give"):
        model.evaluate(*cases.rows(), batch_size=8, verbose=0)


def test_predict_is_verified():
    strategy = create_strategy()
    with strategy.scope():
        model = dense(cases.Centre())
    with pytest.raises(ValueError, match="`predict_step` must give.*Centre"):
        model.predict(cases.rows()[0], batch_size=8, verbose=0)
    with strategy.scope():
        model = cases.CentredPrediction()
    with pytest.raises(ValueError, match="on other rows, in predict_step .*verification_cases"):
        model.predict(cases.rows()[0], batch_size=8, verbose=0)
    with strategy.scope():
        model = dense(cases.Scale())
    assert model.predict(cases.rows()[0], batch_size=8, verbose=0).shape == (cases.NUM_ROWS, 2)


class CustomNoise(layers.Layer):
    def call(self, x, training=False):
        if not training:
            return x
        noise = tf.numpy_function(lambda: np.random.normal(size=1).astype("float32"), [], "float32")
        return x + tf.ensure_shape(noise, [1])


@pytest.mark.slow
def test_random_numbers_that_cannot_be_fixed_are_told_once():
    strategy = create_strategy()
    model = compile_in(strategy, lambda: dense(CustomNoise()))
    with pytest.warns(UserWarning, match="not verified: random") as caught:
        model.fit(*cases.rows(), batch_size=8, verbose=0)
        model.fit(*cases.rows(), batch_size=8, verbose=0)
    assert len([each for each in caught if "not verified" in str(each.message)]) == 1


@pytest.mark.slow
def test_a_learning_rate_of_0_proves_nothing():
    strategy = create_strategy()
    nothing = keras.optimizers.schedules.ExponentialDecay(0.0, 1, 1.0)
    model = compile_in(strategy, dense, lambda: keras.optimizers.SGD(nothing))
    with pytest.warns(UserWarning, match="not verified: no weight changes"):
        model.fit(*cases.rows(), batch_size=8, verbose=0)


@pytest.mark.slow
def test_a_step_that_a_few_rows_do_not_fit_is_told_and_trains():
    def fixed():
        return keras.Sequential([keras.Input(batch_shape=(4, cases.NUM_FEATURES)), cases.Scale()])

    strategy = create_strategy()
    model = compile_in(strategy, lambda: keras.Sequential([fixed(), layers.Dense(2)]), loss="mse")
    x, y = cases.rows(24)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    model.fit(data, verbose=0)


@pytest.mark.slow
def test_mixed_precision_ragged_and_dicts_raise_no_alarm():
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    fit(dense, keras.optimizers.Adam)
    keras.mixed_precision.set_global_policy("mixed_float16")
    # With a scale that no first step overflows, which would change no weight.
    scaled = keras.optimizers.LossScaleOptimizer
    fit(dense, lambda: scaled(keras.optimizers.Adam(), initial_scale=16.0))
    keras.mixed_precision.set_global_policy("float32")

    def of_dict():
        a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
        return keras.Model({"a": a, "b": b}, layers.Dense(2)(layers.Concatenate()([a, b])))

    x, y = cases.rows()
    fit(of_dict, data=({"a": x[:, :2], "b": x[:, 2:]}, y))


def test_train_on_batch_is_verified():
    strategy = create_strategy()
    model = compile_in(strategy, lambda: dense(cases.Centre()))
    x, y = cases.rows(8)
    with pytest.raises(ValueError, match="`train_step` must give"):
        model.train_on_batch(x, y)
