"""What the first rows and the first state do not show is told; what is right raises no alarm."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import verification_later as later
from keras import layers

import tfmulti
from tfmulti.verification import views
from tfmulti.verification.comparison import Comparison, Outcome
from tfmulti.verification.rows import Rows
from tfmulti.verification.state import Part, State


def create_strategy(num_replicas=2, verify="always"):
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    return tfmulti.create_strategy(
        "mirrored", devices=devices, verify=verify, on_difference="error"
    )


def batched(data):
    return (tf.data.Dataset.from_tensor_slices(data).batch(8),)


def step(loss, net=later.dense, data=later.sorted_classes, optimizer=None):
    optimizer = optimizer or (lambda: keras.optimizers.SGD(0.1))
    return dict(make=lambda: later.Step(loss, net), data=data, optimizer=optimizer)


def stock(make, data=later.sorted_classes, optimizer=keras.optimizers.Adam, **arguments):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return dict(make=make, data=data, optimizer=optimizer, loss=loss, **arguments)


def fit(make, data, optimizer, num_replicas=2, as_dataset=False, fit_with=(), **arguments):
    strategy = create_strategy(num_replicas)
    with strategy.scope():
        model = make()
        model.compile(optimizer=optimizer(), **arguments)
    parts = batched(data()) if as_dataset else data()
    names = dict(zip(("x", "y", "sample_weight"), parts))
    batch_size = {} if as_dataset else {"batch_size": 8}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not verified")
        model.fit(**names, **batch_size, verbose=0, shuffle=False, **dict(fit_with))
    return model


def decay():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100))


TOLD = {
    "annealed": step(later.by_iterations(later.deviation)),
    "a late term": step(
        later.after_iterations(100_000, later.deviation), optimizer=keras.optimizers.Adam
    ),
    "a variable": step(later.by_setting("setting", later.deviation)),
    "annealed where the rate has decayed": step(
        later.by_iterations(later.deviation), optimizer=decay
    ),
    "a plain variable": step(later.by_setting("plain_setting", later.deviation)),
    "a counter": step(later.by_setting("count", later.deviation)),
    "a flag": step(later.by_setting("flag", later.deviation)),
    "classes": step(later.balanced),
    "weights": step(later.mean_of_weights, data=later.weighted),
    "padding": step(later.mean_of_tokens, later.tagger, later.tokens),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_told_where_it_would_differ_later(name):
    # Of a dataset the first batch is seen alone: one class, no padding.
    with pytest.raises(ValueError, match="`train_step` must give one device's result"):
        fit(**TOLD[name], as_dataset=name in ("classes", "weights", "padding"))


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [3, 2])
def test_told_of_three_replicas_and_of_sorted_arrays(num_replicas):
    with pytest.raises(ValueError, match="Received: own_loss") as caught:
        fit(**TOLD["classes"], num_replicas=num_replicas)
    assert "with other" not in str(caught.value)


@pytest.mark.slow
def test_the_error_says_what_was_made_up():
    with pytest.raises(ValueError, match="with other labels, optimizer.iterations at 8399, var"):
        fit(**TOLD["a counter"])
    with pytest.raises(ValueError, match="of 5 rows, with other labels, other padding;"):
        fit(**TOLD["padding"], as_dataset=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (step(later.skipped_where_large, later.linear), "with outliers"),
        (dict(step(later.mean), make=later.Guarded), "with numbers that are NaN"),
        (dict(step(later.mean), make=later.AssignedByHand), "trainable weight.*trainable=False"),
        (step(later.mean_of_known, data=later.targets), "with labels that are NaN"),
        (step(later.mean_of_labelled(-1)), "with some labels of whole numbers at -1;"),
    ],
    ids=["by a bound", "by a test for NaN", "by hand", "by targets", "by labels"],
)
@pytest.mark.filterwarnings("ignore:.*decides by a number")
def test_replicas_that_would_update_differently_are_reported(case, reason):
    with pytest.raises(ValueError, match=f"must give one device's result.*{reason}"):
        fit(**case, num_replicas=3)


@pytest.mark.slow
def test_a_decision_by_local_rows_is_reported_with_its_line():
    # The loss is above the bound on all rows that are compared.
    with pytest.warns(UserWarning, match="`train_step` decides by.*Relu at .*later.py:"):
        fit(**step(later.mean_above_a_bound))


def warming_up():
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=3)
    return keras.optimizers.SGD(schedule, momentum=0.9)


def normalized():
    middle = [layers.BatchNormalization(synchronized=True), layers.Dropout(0.4)]
    return keras.Sequential([later.dense(), *middle, layers.Dense(3)])


FINE = {
    "annealed": step(later.by_iterations(later.mean_square)),
    "a flag": step(later.by_setting("flag", later.mean_square), optimizer=keras.optimizers.Adam),
    "a class": step(later.last_class_counts_more),
    "padding": step(later.mean_of_rows_tokens, later.tagger, later.tokens),
    "a variable": step(later.by_setting("setting", later.mean_square)),
    "a counter": step(later.by_setting("count", later.mean_square)),
    "no number for made-up labels": step(
        later.log_of_label,
        data=lambda: (later.sorted_classes()[0], later.sorted_classes()[1] * 0 + 2),
    ),
    "a place in a queue": stock(later.queue),
    "stock": stock(later.dense, metrics=["accuracy"]),
    "weights": stock(later.dense, later.weighted, weighted_metrics=["accuracy"]),
    "class weights": stock(later.dense, fit_with={"class_weight": {0: 1.0, 1: 3.0, 2: 0.2}}),
    "recurrent": stock(lambda: later.recurrent(return_sequences=True), later.tokens),
    "normalization and dropout": stock(normalized),
    "warming up from 0": stock(later.dense, optimizer=warming_up),
    "a rate of 0": stock(later.dense, optimizer=lambda: keras.optimizers.SGD(0.0)),
    "moving averages": stock(
        later.dense,
        optimizer=lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3),
    ),
    "accumulation": stock(
        later.dense, optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FINE)
@pytest.mark.filterwarnings("error:.*decides by a number")
def test_no_false_alarm(name):
    fit(**FINE[name], as_dataset=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("eager", [False, True])
def test_a_variable_made_outside_of_the_scope_is_refused_by_name(eager, monkeypatch):
    # As in a script.
    monkeypatch.setattr(later.MovingLoss, "__module__", "__main__")
    case = dict(data=later.sorted_classes, optimizer=keras.optimizers.SGD, run_eagerly=eager)
    variable = tf.Variable(0.0)
    with pytest.raises(ValueError, match="scope.*Received: the variable moving/0,.*2 replicas"):
        fit(lambda: later.MovingLoss(variable), **case)
    assert not variable.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_state_of_ones_own_is_no_random_number(eager):
    case = dict(data=later.sorted_classes, optimizer=keras.optimizers.SGD, run_eagerly=eager)
    with pytest.raises(ValueError, match="variable moving/0: .*state made from local rows"):
        fit(lambda: later.MovingLoss(tf.Variable(0.0)), **case)


@pytest.mark.slow
def test_a_variable_made_outside_of_the_scope_may_be_read():
    variable = tf.Variable(0.5)

    def loss(model, y, losses, weights, outputs):
        return tf.reduce_mean(losses) * variable

    fit(**step(loss))


def varied(way, *batch):
    rows = Rows(batch)
    parts, used = views.vary_rows(rows, rows.parts, views.View((way,)))
    return [part.numpy() for part in parts], used


def test_values_of_made_up_rows_were_there():
    x = np.ones((5, 4), "float32")
    (_, words), _ = varied(views.LABELS, x, np.array(["a", "b", "c", "d", "a"]))
    assert words.tolist() == [b"a", b"a", b"b", b"c", b"b"]
    (_, alike), _ = varied(views.LABELS, x, np.full((5, 1), 7))
    assert alike.ravel().tolist() == [7, 7, 0, 0, 0]
    (_, one_hot), _ = varied(views.LABELS, x, np.tile([0.0, 1.0, 0.0], (5, 1)))
    assert one_hot.argmax(-1).tolist() == [1, 1, 2, 2, 2] and (one_hot.sum(-1) == 1).all()
    (_, _, weights), _ = varied(views.WEIGHTS, x, x, -np.ones(5, "float32"))
    assert weights.tolist() == [-1.0, 0.0, -2.0, -1.0, -0.5] and not np.signbit(weights[1])
    (padded, _), _ = varied(views.PADDING, np.full((5, 4), 3), np.arange(5))
    assert (padded > 0).sum(-1).tolist() == [4, 2, 1, 3, 4]
    assert varied(views.PADDING, x, np.arange(5))[1] == varied(views.WEIGHTS, x, x)[1] == ()


def test_filler_rows_are_left_out_and_sorted_rows_are_unlike():
    weights = np.array([1, 1, 1, -0.0, 1, 1, 0.0, -0.0], "float32")
    rows = Rows((np.arange(8.0), np.arange(8), weights))
    assert sorted(rows.spread([5] * 3, padded=True)[1].numpy()) == [0, 1, 2, 5, 6]
    assert rows.spread([5] * 3)[1].numpy().tolist() == [7, 0, 2, 4, 5]
    assert rows.roles() == [0, 1, 2]


def comparison_of(*parts, begin):
    """A comparison of the given variables, each a name and a kind."""
    state = State(keras.Sequential())
    state.parts += [Part(None, name, kind, 0, i) for i, (name, kind) in enumerate(parts)]
    return Comparison("train", state, begin, 2e-4)


def test_rounding_of_one_step_is_no_difference_after_the_next():
    """As in Adam's velocity, which a second step may leave nearly as it is."""
    nothing = Outcome({}, {})
    begin, first, second = ([np.float32([value])] for value in (0.0, 1.0, 1.000001))
    compared = comparison_of(("velocity", "optimizer's variable"), begin=begin)
    others = [[value[0] + np.float32(1e-4)] for value in (first, second)]
    one, many = ([(nothing, v) for v in values] for values in ((first, second), others))
    assert not compared.differences(begin, one, many, None)
    assert compared.differences(begin, one, [(nothing, [v[0] * 2]) for v in others], None)


def test_a_gradient_that_is_only_rounding_is_no_difference():
    """As that of a bias which a softmax does not see: Adam moves it as far as any other."""
    slots = [f"adam/layer_bias_{name}" for name in ("momentum", "velocity")]
    slots = [(name, "optimizer's variable") for name in slots]
    nothing = Outcome({}, {})
    begin = [np.zeros(2, "float32")] * 3
    compared = comparison_of(("layer/bias", "trainable weight"), *slots, begin=begin)

    def differences(gradient, noise):
        # Of the weights, the second number differs by a third of a step.
        slots = [np.float32([0.1, gradient]), np.float32([0.1, gradient]) ** 2]
        one, many = ([np.float32([0.01, move]), *slots] for move in (0.009, 0.006))
        noise = None if noise is None else [noise]
        return compared.differences(begin, [(nothing, one)], [(nothing, many)], noise)

    assert not differences(1e-9, noise={})
    assert differences(1e-9, noise=None)
    assert differences(1e-3, noise={})


@pytest.mark.parametrize("is_synthetic", [False, True])
def test_a_sum_of_outliers_that_cancel_is_no_difference(is_synthetic):
    """As the same gradient under SGD, which has no moments that tell."""
    parts = [("layer/kernel", "trainable weight"), ("layer/bias", "trainable weight")]
    nothing, kernel = Outcome({}, {}), np.float32([1000])
    one, many = ([kernel, np.float32([bias])] for bias in (1e-5, 3e-5))
    begin = [np.zeros(1, "float32")] * 2
    compared = comparison_of(*parts, begin=begin)
    compared.is_synthetic = is_synthetic
    found = compared.differences(begin, [(nothing, one)], [(nothing, many)], [{}])
    assert bool(found) == (not is_synthetic)


@pytest.mark.slow
def test_state_is_put_back_bit_for_bit():
    strategy, seen = create_strategy(), []
    with strategy.scope():
        model = later.Step(later.by_setting("setting", later.mean_square))
        model.compile("adam")
        model.build((None, 4))
        model.optimizer.build(model.trainable_variables)

    def values():
        own = (model.plain_setting, model.count, model.flag)
        return [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables, *own)]

    before = values()
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(values()))
    model.fit(*later.sorted_classes(), batch_size=8, verbose=0, callbacks=[begin])
    assert strategy.seconds_verified > 0 and seen == [before]


def test_a_number_is_given_to_rows_that_can_have_it():
    x, y = np.ones((7, 2), "float32"), np.arange(7)
    rows = Rows((x, y))
    for number, changed in ((np.inf, []), (0.5, []), (-5.0, [3, 6])):
        view = views.View((views.SOME_LABELS,), number=number)
        _, labels = views.vary_rows(rows, rows.parts, view)[0]
        assert [i for i in range(7) if int(labels[i]) != i] == changed
        view = views.View((views.SOME_INPUTS,), number=number)
        inputs, _ = views.vary_rows(rows, rows.parts, view)[0]
        assert number in inputs.numpy()
