"""Parts of training with parameter servers that need no cluster."""

import contextlib
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmulti
from tfmulti.checkpoint.generations import CheckpointError
from tfmulti.cluster import Cluster, ClusterError, network, resolve_cluster
from tfmulti.cluster.peers import GONE, SILENT, THERE, Presence, probe
from tfmulti.launch.config import LaunchConfig
from tfmulti.parallel import partitioned, remote_build, split_check
from tfmulti.parallel.answers import Answer, add_gradients, mean_logs
from tfmulti.parallel.remote_step import RemoteStep
from tfmulti.runtime import command_line, processes
from tfmulti.step import clipping
from tfmulti.step import rows as rows_lib
from tfmulti.strategies import factories
from tfmulti.strategies.parameter_server import ServerLost, WorkersLost
from tfmulti.strategies.task_monitor import TaskMonitor
from tfmulti.train import __main__ as command
from tfmulti.train import asynchronous, remote_runs
from tfmulti.train.config import TrainConfig
from tfmulti.train.remote_runs import RemoteRuns, StalenessBound, summarize_staleness


def simulate(bound, workers, seed, steps=400):
    """Workers that compute for random times, one of them slow; returns the staleness of each."""
    chance, limit = random.Random(seed), StalenessBound(bound)
    reading, held, staleness = {}, [], []
    numbers = itertools.count()
    while len(staleness) < steps:
        while len(limit) < min(workers + 1, bound + 1):
            number = next(numbers)
            limit.begin(number)
            reading[number] = limit.updates
        computing = [number for number in reading if number not in held]
        if computing:
            # The first one is computed by the slow worker.
            slow = chance.random() < 0.05 or len(computing) == 1
            held.append(computing[0] if slow else chance.choice(computing[1:]))
        ready = [number for number in held if limit.may_apply(number)]
        assert ready or computing, "all wait for one another"
        for number in ready[:1]:
            held.remove(number)
            staleness.append(limit.updates - reading.pop(number))
            limit.apply(number)
    return staleness


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_no_step_is_staler_than_the_bound_and_nobody_waits_for_ever(bound):
    found = [simulate(bound, workers=4, seed=seed) for seed in range(20)]
    assert max(map(max, found)) <= bound
    # It is reached: a smaller bound would be another rule.
    assert max(map(max, found)) == bound


def test_without_a_bound_any_step_may_be_applied():
    limit = StalenessBound(None)
    for number in range(5):
        limit.begin(number)
    assert all(limit.may_apply(number) for number in range(5)) and limit.limit is None


def test_the_summary_of_staleness():
    summary = summarize_staleness([0] * 19 + [10])
    assert (summary["staleness_mean"], summary["staleness_max"]) == (0.5, 10)
    assert summary["staleness_p95"] == pytest.approx(np.percentile([0] * 19 + [10], 95))


def test_gradients_of_parts_are_weighted_by_their_rows():
    def answer(rows, dense, ids):
        sparse = (np.full((len(ids), 2), dense, "float32"), np.array(ids))
        return Answer(0, 0, 0, rows, [np.float32([dense]), sparse, None], [np.float32([dense])], [])

    gradients, changes = add_gradients([answer(3, 1.0, [0, 1]), answer(1, 5.0, [1])])
    assert gradients[0] == changes[0] == 0.75 * 1 + 0.25 * 5
    np.testing.assert_allclose(gradients[1][0][:, 0], [0.75, 0.75, 1.25])
    assert gradients[1][1].tolist() == [0, 1, 1] and gradients[2] is None


@pytest.mark.parametrize("cuts", [(10,), (4, 6), (1, 5, 4)])
def test_rows_are_looked_up_in_the_parts_of_a_table(cuts):
    table = np.random.RandomState(0).rand(10, 3).astype("float32")
    edges = np.cumsum([0, *cuts])
    parts = [tf.Variable(table[a:b]) for a, b in zip(edges, edges[1:])]
    ids = tf.constant([[3, 9, 0], [3, 4, 5]])
    with tf.GradientTape() as tape:
        found = partitioned.look_up(parts, ids)
        loss = tf.reduce_sum(found)
    np.testing.assert_array_equal(found, table[ids.numpy()])
    counts = [tf.convert_to_tensor(g).numpy()[:, 0] for g in tape.gradient(loss, parts)]
    np.testing.assert_array_equal(np.concatenate(counts), [1, 0, 0, 2, 1, 1, 0, 0, 0, 1])


@pytest.mark.parametrize("sparse", [False, True])
def test_the_norm_of_a_table_is_that_of_all_its_parts(sparse):
    values, gradient = np.arange(12.0).reshape(6, 2), np.arange(12.0, 24.0).reshape(6, 2)

    def slices(rows):
        return tf.IndexedSlices(tf.constant(rows), tf.range(len(rows)), tf.constant(rows.shape))

    other = np.ones(3)

    def train(*cuts):
        variables = [keras.Variable(each) for each in (*np.split(values, cuts), other)]
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5, clipnorm=0.5)
        if cuts:
            clipping.clip_together(optimizer, [variables[:-1]])
        gradients = [slices(each) if sparse else each for each in np.split(gradient, cuts)]
        for _ in range(2):
            optimizer.apply([*gradients, tf.constant(other)], variables)
        return np.concatenate([np.ravel(each) for each in variables])

    np.testing.assert_allclose(train(1, 4), train(), rtol=1e-6)


def test_code_computes_with_the_whole_of_a_table_that_is_cut():
    parts = [keras.Variable(np.full((rows, 2), rows, "float32")) for rows in (3, 1)]
    table = partitioned.PartitionedTable(parts)
    with tf.GradientTape() as tape:
        found = keras.ops.matmul(np.ones((1, 2), "float32"), keras.ops.transpose(table))
    np.testing.assert_array_equal(found, [[6, 6, 6, 2]])
    for gradient in tape.gradient(found, [part.value for part in parts]):
        np.testing.assert_array_equal(gradient, np.ones(gradient.shape))


@pytest.mark.parametrize("seed", [None, 7, "generator"])
def test_a_part_is_drawn_in_pieces_that_differ(monkeypatch, seed):
    monkeypatch.setattr(partitioned, "_PIECE_BYTES", 4 * 8 * 30)

    def draw(part):
        given = keras.random.SeedGenerator(7) if seed == "generator" else seed
        initializer = keras.initializers.RandomNormal(stddev=2.0, seed=given)
        pieces = partitioned.Pieces()
        variable = tf.Variable(pieces.initializer(initializer, part)((1000, 8), "float32"))
        pieces.fill(variable)
        # Only a variable that waits for its values gets them.
        plain = tf.Variable(tf.ones((2, 2)))
        pieces.fill(plain)
        assert (plain.numpy() == 1).all()
        return variable.numpy()

    one, other = draw(0), draw(1)
    assert len(np.unique(one)) > 7900 and len(np.intersect1d(one, other)) < 100
    assert abs(one.mean()) < 0.1 and abs(one.std() - 2) < 0.1
    assert (one == draw(0)).all() == (seed is not None)


def test_a_row_beyond_the_table_is_an_error():
    parts = [tf.zeros([2, 1]), tf.zeros([2, 1])]
    for tables in (parts, parts[:1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="input_dim"):
            partitioned.look_up(tables, tf.constant([1, 4]))


class Here:
    """Computes in this process, at once, what a worker is sent."""

    @staticmethod
    def schedule(function, args):
        args = tf.nest.map_structure(tf.convert_to_tensor, args)
        fetched = tf.nest.map_structure(lambda tensor: tensor.numpy(), function(*args))
        return types.SimpleNamespace(fetch=lambda: fetched)


X = np.random.RandomState(0).randn(12, 3).astype("float32")
BATCH = (X, X[:, :1] + 2)


def steps_of(model, batch=BATCH, spec=None):
    """A compiled model's steps, as workers compute them."""
    batch = tf.nest.map_structure(tf.constant, batch)
    if spec is None:
        spec = tf.nest.map_structure(lambda x: tf.TensorSpec([None, *x.shape[1:]], x.dtype), batch)
    rows = int(rows_lib.num_rows(batch))
    remote_build.build(model, spec, lambda: batch, num_rows=rows, test_spec=spec)
    return RemoteStep(model, spec, spec, lambda: tf.zeros([2], tf.int64))


def train(step, *batches, first=0):
    """Takes some steps, as the chief does; returns the answers."""
    answers = []
    for number, batch in enumerate(batches, first):
        answers.append(step.schedule(Here, batch, number)())
        step.apply(*add_gradients(answers[-1:]))
    return answers


class Own(keras.Model):
    """A model with steps of its own, which call a function of the model and the inputs."""

    def __init__(self, within):
        super().__init__()
        self.dense, self.within = keras.layers.Dense(1), within
        self.state = self.add_weight(name="state", initializer="zeros", trainable=False)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            logs = self.test_step(data)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(logs["loss"], variables), variables)
        return logs

    def test_step(self, data):
        x, y = data
        return {"loss": keras.ops.mean((self(x) - y) ** 2), **(self.within(self, x) or {})}


def own(within, **settings):
    model = Own(within)
    model.compile(keras.optimizers.SGD(0.1), "mse", **settings)
    return model


@pytest.mark.slow
def test_numbers_without_a_seed_differ_from_step_to_step_and_not_where_one_is_repeated():
    step = steps_of(own(lambda model, x: {"drawn": keras.random.normal(())}))
    for schedule in (
        lambda number: step.schedule(Here, BATCH, number)().logs,
        lambda number: step.schedule_test(Here, BATCH, number)()[1],
    ):
        first, second, again = (float(schedule(number)["drawn"]) for number in (0, 1, 1))
        assert first != second == again
    parts = [step.schedule(Here, BATCH, 0, part)().logs["drawn"] for part in (0, 1)]
    assert parts[0] != parts[1]


LOST = {
    "learning_rate": lambda model, x: model.optimizer.learning_rate.assign(0.5),
    "outside": lambda model, x: model.held[0].assign_add(1.0),
    "seed_generator_state": lambda model, x: keras.random.normal((), seed=model.held[1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOST)
def test_a_step_is_refused_that_assigns_what_the_chief_would_not_see(name):
    model = own(lambda model, x: (LOST[name](model, x), None)[1])
    # Keras finds no variables in it.
    held = (keras.Variable(0.0, name="outside"), keras.random.SeedGenerator(1))
    object.__setattr__(model, "held", held)
    step = steps_of(model)
    with pytest.raises(ValueError, match=f"`train_step` .*a step that assigns .*{name}"):
        step.check_train()
    with pytest.raises(ValueError, match=f"`test_step` .*a step that assigns .*{name}"):
        step.check_test("validation_data")


class Clipped(Own):
    """A step that changes a weight after the update."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.dense.bias.assign(keras.ops.clip(self.dense.bias, -1.0, 1.0))
        return logs


def test_a_step_is_refused_that_assigns_a_trainable_weight():
    model = Clipped(lambda model, x: None)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a step that assigns .*dense.*/bias"):
        steps_of(model).check_train()


def write_of(kind):
    """Returns a function that changes something, and one that tells whether it has changed."""
    if kind == "queue":
        queue = tf.queue.FIFOQueue(9, [tf.float32])
        return lambda: queue.enqueue(1.0), queue.size
    if kind == "table":
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
        one = tf.constant([1], tf.int64)
        return lambda: table.insert(one, one), table.size
    counter = tf.Variable(0.0)
    if kind == "function":
        return tf.function(lambda: counter.assign_add(1.0)), counter.numpy
    return lambda: counter.assign_add(1.0), counter.numpy


WRITES = {
    "variable": r"AssignAddVariableOp at .*test_parameter_servers.py:\d+",
    "function": r"AssignAddVariableOp\.",
    "table": r"LookupTableInsertV2 at .*test_parameter_servers.py:\d+",
    "queue": r"QueueEnqueueV2 at .*test_parameter_servers.py:\d+",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
def test_a_step_is_refused_before_it_runs_if_a_worker_would_change_something_itself(kind):
    write, changes = write_of(kind)
    step = steps_of(own(lambda model, x: (write(), None)[1]))
    with pytest.raises(ValueError, match=f"variables of Keras only.*Received: {WRITES[kind]}"):
        step.check_train()
    assert int(changes()) == 0


class Centered(keras.layers.Layer):
    """Subtracts a moving mean that it has just updated."""

    def build(self, shape):
        self.mean = self.add_weight(name="mean", shape=shape[1:], trainable=False)

    def call(self, inputs):
        self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(inputs, axis=0))
        return inputs - self.mean


def test_a_state_that_is_assigned_and_read_has_no_gradient_as_on_one_device():
    def build():
        keras.utils.set_random_seed(0)
        layers = [keras.Input((3,)), keras.layers.Dense(2), Centered(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    mine, alone = build(), build()
    train(steps_of(mine), BATCH, BATCH)
    for _ in range(2):
        alone.train_on_batch(*BATCH)
    for one, other in zip(mine.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


STATES = {
    "sum": lambda x: keras.ops.sum(x**2),
    "rows": lambda x: keras.ops.cast(keras.ops.shape(x)[0], "float32"),
    "mean": lambda x: keras.ops.mean(x**2),
    "steps": lambda x: 1.0,
}


def check_split(step, splits=True):
    split_check.check(step, tf.nest.map_structure(tf.constant, BATCH), splits)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_adds_up_rows_is_refused_where_batches_are_split(kind):
    step = steps_of(own(lambda model, x: (model.state.assign_add(STATES[kind](x)), None)[1]))
    check_split(step, splits=False)
    if kind in ("sum", "rows"):
        with pytest.raises(ValueError, match="state changes by"):
            check_split(step)
    else:
        check_split(step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", ["mse", "sum"])
def test_the_rounding_of_bfloat16_is_no_other_loss(loss):
    def total(y, predicted):
        return keras.ops.sum((keras.ops.cast(y, predicted.dtype) - predicted) ** 2)

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(48, 16)).astype("float32"), rng.random((48, 1), "float32")
    layers = [keras.layers.Dense(units, dtype="bfloat16") for units in (32, 1)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile("adam", "mse" if loss == "mse" else total)
    refuses = loss != "mse"
    with pytest.raises(ValueError, match="mean over") if refuses else contextlib.nullcontext():
        split_check.check(steps_of(model, batch), tf.nest.map_structure(tf.constant, batch), True)


def sequences(layer, loss, batch):
    """Checks a model of sequences that is trained from batches that are split."""
    layers = [keras.Input(batch[0].shape[1:], dtype=batch[0].dtype), *layer, keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("sgd", loss)
    split_check.check(steps_of(model, batch), tf.nest.map_structure(tf.constant, batch), True)


FLOATS = np.random.RandomState(0).rand(6, 4, 2).astype("float32") + 0.1
LABELS = np.random.RandomState(0).randint(0, 3, (6, 4))
CLASSES = keras.losses.SparseCategoricalCrossentropy


def ignoring(y, logits):
    """A loss of one's own, in which -1 is no class."""
    valid = keras.ops.cast(y >= 0, logits.dtype)
    losses = keras.losses.sparse_categorical_crossentropy(keras.ops.maximum(y, 0), logits, True)
    return keras.ops.sum(losses * valid) / keras.ops.sum(valid)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layers, loss, weights, told",
    [
        ([keras.layers.Masking(0.0)], CLASSES(True), (), "the values that a mask leaves"),
        ([], CLASSES(True, ignore_class=-1), (), "the values that a mask leaves"),
        (
            [],
            CLASSES(True, reduction="mean_with_sample_weight"),
            (np.ones((6, 4)),),
            "the sum of sample weights",
        ),
        ([], ignoring, (), "the gradient of"),
        ([], CLASSES(True), (np.ones((6, 4)),), None),
        ([], CLASSES(True, reduction="mean_with_sample_weight"), (), None),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_refused_though_the_first_rows_do_not_show_it(
    layers, loss, weights, told
):
    batch = (FLOATS, LABELS, *weights)
    if told is None:
        sequences(layers, loss, batch)
    else:
        with pytest.raises(ValueError, match=f"must be a mean over rows.*Received: .*{told}"):
            sequences(layers, loss, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("trainable", [True, False])
def test_a_model_within_the_model_may_have_been_compiled(trainable):
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inner.compile("adam", "mse")
    inner.trainable = trainable
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = inner.get_weights()[0]
    step = steps_of(model)
    step.check_train()
    train(step, BATCH)
    assert int(model.optimizer.iterations) == 1 and int(inner.optimizer.iterations) == 0
    assert (inner.get_weights()[0] != before).all() == trainable


APPLIED = {
    r"`apply` of adam\d*, `apply` of sgd": lambda model: [model.other, model.optimizer],
    r"`apply` of sgd, `apply` of sgd": lambda model: [model.optimizer] * 2,
    r"`apply` of adam": lambda model: [model.other],
    "no call": lambda model: [],
}


@pytest.mark.parametrize("told", APPLIED)
def test_a_step_is_refused_that_does_not_apply_the_optimizer_of_compile_once(told):
    class Applying(Own):
        def train_step(self, data):
            variables = self.trainable_variables
            for optimizer in APPLIED[told](self):
                optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
            return {}

    model = Applying(None)
    model.other = keras.optimizers.Adam()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=f"must call `apply` of .*sgd, once.*Received: {told}"):
        steps_of(model).check_train()


class Bounded(Own):
    """Clips gradients that the first rows do not have, by hand."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.test_step(data)["loss"]
        variables = self.trainable_variables
        grads, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1000.0)
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


def test_a_step_that_clips_larger_gradients_than_those_of_the_first_rows_is_refused():
    model = Bounded(lambda model, x: None)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="clip by the optimizer and not in the step"):
        check_split(steps_of(model))


def test_a_step_whose_random_numbers_cannot_be_repeated_is_told_not_to_be_verified():
    def within(model, x):
        sampled = tf.random.uniform_candidate_sampler([[0]], 1, 1, True, 9)
        return {"drawn": sampled.sampled_candidates[0]}

    step = steps_of(own(within))
    with pytest.warns(UserWarning, match="`train_step` was not verified"):
        check_split(step)


def of_groups(y, predicted):
    """A loss of one's own, for groups of five rows."""
    groups = keras.ops.reshape(predicted, (-1, 5))
    return keras.ops.mean(keras.ops.abs(groups[:, 0] - groups[:, 4]))


def of_whole(y, predicted):
    """A loss of one's own, for a batch of sixty rows."""
    return keras.ops.mean(tf.gather(predicted, tf.range(60)) ** 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss, splits, told",
    [
        (of_whole, False, None),
        (of_whole, True, "parts of 30 and 30 rows"),
        (of_groups, False, None),
        # The halves of a batch are whole groups, though those of the first rows are not.
        (of_groups, True, None),
    ],
)
def test_a_loss_of_groups_gets_whole_batches_and_is_refused_only_if_these_are_split(
    loss, splits, told
):
    x = np.random.RandomState(0).randn(60, 3).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, metrics=["mae"])
    step = steps_of(model, (x, x[:, :1]))
    told = f"must be able to compute parts of a batch. Received: {told}.*Use" if told else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=told) if told else contextlib.nullcontext():
            split_check.check(step, (tf.constant(x), tf.constant(x[:, :1])), splits)


def test_a_step_that_the_chief_cannot_compute_is_told_not_to_be_verified():
    def within(model, x):
        # As on a chief without the device of its workers.
        return {"absent": tf.gather([1.0], tf.shape(x)[0])}

    for splits in (True, False):
        with pytest.warns(UserWarning, match="not verified.*Received: InvalidArgumentError"):
            check_split(steps_of(own(within)), splits)


def test_metrics_that_do_not_add_up_are_refused_where_nothing_is_split():
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_true)))

        def result(self):
            return self.largest

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest()])
    with pytest.raises(ValueError, match="state of a metric must be a sum.*largest"):
        check_split(steps_of(model), splits=False)


def normalized(reduction, trainable=True):
    normalize = keras.layers.BatchNormalization(trainable=trainable)
    layers = [keras.Input((3,)), keras.layers.Dense(2), normalize, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    return steps_of(model)


@pytest.mark.slow
def test_batch_normalization_does_not_hide_a_loss_that_is_a_sum():
    with pytest.warns(UserWarning, match="Batch normalization uses the statistics of each worker"):
        with pytest.raises(ValueError, match="must be a mean over rows"):
            check_split(normalized("sum"))


@pytest.mark.slow
def test_frozen_batch_normalization_uses_no_statistics_of_rows():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_split(normalized("sum_over_batch_size", trainable=False))


def two_outputs():
    """A model with a running mean of the loss of each output."""
    given = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, name=name)(given) for name in "ab"}
    model = keras.Model(given, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    return model, (X, {"a": X[:, :1], "b": X[:, 1:2]})


class Tracking(Own):
    """A step that keeps a running mean of its loss."""

    def __init__(self):
        super().__init__(lambda model, x: None)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        self.tracker.update_state(super().train_step(data)["loss"])
        return {"loss": self.tracker.result()}


def tracking():
    model = Tracking()
    model.compile("sgd")
    return model, BATCH


def errors(y, predicted):
    return keras.ops.mean((y - predicted) ** 2)


def by_function():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[errors])
    return model, BATCH


@pytest.mark.sampled(1)
@pytest.mark.parametrize("build", [tracking, two_outputs, by_function])
def test_a_step_counts_once_in_a_running_mean_if_its_batch_is_split(build):
    model, batch = build()
    step = steps_of(model, batch)
    tensors = tf.nest.map_structure(tf.constant, batch)
    for splits in (True, False):
        split_check.check(step, tensors, splits)
    states = step.first_metrics
    for start, stop, share in ((0, 5, 5 / 12), (5, 12, 7 / 12)):
        answer = step.schedule(Here, rows_lib.some_rows(tensors, start, stop), 0, 0, share)()
        states = [old + new for old, new in zip(states, answer.metrics)]
    [whole] = train(step, batch)
    assert step.results(states) == pytest.approx(step.results(whole.metrics))


def test_synchronized_normalization_is_refused_where_batches_are_split():
    model = normalized("sum_over_batch_size").model
    split_check.refuse_synchronized(model)
    tfmulti.synchronize_batch_normalization(model)
    with pytest.raises(ValueError, match="cannot span .*batch_normalization.*synchronized=False"):
        split_check.refuse_synchronized(model)


@pytest.mark.slow
def test_batch_normalization_trains_after_the_check_as_before():
    step = normalized("sum_over_batch_size")
    step.check_train()
    with pytest.warns(UserWarning, match="Batch normalization"):
        check_split(step)
    [answer] = train(step, BATCH)
    moving_mean = step.model.layers[1].moving_mean.numpy()
    np.testing.assert_allclose(answer.changes[0], moving_mean)
    assert np.all(moving_mean)


def test_nothing_is_sent_of_states_that_no_step_changes_so_that_a_mask_stays():
    def within(model, x):
        return {"least": keras.ops.min(model.hidden)}

    model = Own(within)
    model.hidden = model.add_weight(shape=(2,), initializer="zeros", trainable=False, name="hidden")
    model.hidden.assign([0.0, -np.inf])
    model.compile("sgd", "mse")
    step = steps_of(model)
    step.check_train()
    answers = train(step, BATCH, BATCH)
    assert [answer.changes for answer in answers] == [[], []]
    assert answers[1].logs["least"] == model.hidden.numpy()[1] == -np.inf


def test_a_state_that_is_not_finite_is_refused_if_a_step_changes_it():
    def largest(model, x):
        model.state.assign(keras.ops.maximum(model.state, keras.ops.max(x)))

    model = own(largest)
    model.state.assign(-np.inf)
    with pytest.raises(ValueError, match="Received: .*state, which holds -inf"):
        steps_of(model).check_train()


class Renaming(keras.Model):
    """Logs its metric by the name of another, as Keras's examples do."""

    def __init__(self):
        super().__init__()
        self.dense, self.total = keras.layers.Dense(1), keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.total]

    def call(self, x):
        return self.dense(x)

    def loss_of(self, data):
        loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        self.total.update_state(loss)
        return loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": self.total.result()}

    def test_step(self, data):
        self.loss_of(data)
        return {"loss": self.total.result()}


def test_a_metric_that_is_logged_by_another_name_is_that_of_all_steps():
    model = Renaming()
    model.compile(keras.optimizers.SGD(0.0))
    step = steps_of(model)
    halves = [tuple(part[rows] for part in BATCH) for rows in (slice(6), slice(6, 12))]
    expected = model.evaluate(*BATCH, batch_size=6, verbose=0, return_dict=True)
    trained = [answer.metrics for answer in train(step, *halves)]
    tested, others = zip(*(step.schedule_test(Here, half, 0)() for half in halves))
    assert others == ({}, {})
    for kind, states in (("train", trained), ("test", tested)):
        added = [np.sum(each, axis=0) for each in zip(*states)]
        assert step.results(added, kind) == pytest.approx(expected)


class Spread(keras.metrics.Metric):
    """A metric with two results."""

    def __init__(self):
        super().__init__(name="spread")
        self.least, self.most = keras.metrics.Mean(), keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.least.update_state(keras.ops.min(y_pred))
        self.most.update_state(keras.ops.max(y_pred))

    def result(self):
        return {"least": self.least.result(), "most": self.most.result()}


class Encoding(keras.Model):
    """Has no `call`: its step calls layers, which are not built, and another one in validation."""

    def __init__(self):
        super().__init__()
        self.encode, self.test = keras.layers.Dense(2), keras.layers.Dense(1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(self.encode(data[0]) ** 2)
        variables = self.encode.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def test_step(self, data):
        return {"loss": keras.ops.mean(self.test(self.encode(data[0])))}


class Views(keras.Model):
    """Its step compares two views, and calls a layer that `call` does not know."""

    def __init__(self):
        super().__init__()
        self.encode, self.project = keras.layers.Dense(2), keras.layers.Dense(2)

    def call(self, x):
        return self.encode(x)

    def train_step(self, data):
        one, other = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(one["view"]) - self.project(other["view"])) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


VIEWS = ({"view": X}, {"view": X + 1})


def views(**settings):
    model = Views()
    model.compile(keras.optimizers.SGD(0.1), **settings)
    return model, VIEWS


def called_before():
    model, batch = views(loss="mse", metrics=["mae"])
    model(X)
    return model, batch


def without_call():
    model = Encoding()
    model.compile(keras.optimizers.SGD(0.1))
    return model, BATCH


def called_by_step_only():
    model = own(lambda model, x: {"more": keras.ops.sum(model.more(x))})
    model.more = keras.layers.Dense(4)
    return model, BATCH


BUILT_BY_STEP = {
    "no call": without_call,
    "views": views,
    "views and a loss": lambda: views(loss="mse", metrics=["mae"]),
    "called before": called_before,
    "a further layer": called_by_step_only,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BUILT_BY_STEP)
def test_a_model_is_built_by_its_own_step(name):
    model, batch = BUILT_BY_STEP[name]()
    step = steps_of(model, batch)
    step.check_train()
    assert len(model.trainable_variables) == 4 and int(model.optimizer.iterations) == 0
    answers = train(step, batch, batch)
    losses = [(step.results(each.metrics) | each.logs)["loss"] for each in answers]
    assert losses[1] < losses[0] and int(model.optimizer.iterations) == 2


def test_layers_of_the_evaluation_alone_are_built():
    model, batch = without_call()
    step = steps_of(model, batch)
    step.check_test("validation_data")
    _, logs = step.schedule_test(Here, batch, 0)()
    np.testing.assert_allclose(
        logs["loss"], np.mean(model.test(model.encode(batch[0]))), rtol=1e-5, atol=1e-6
    )


def test_the_error_of_a_step_is_told_if_the_model_cannot_be_built():
    class Failing(Encoding):
        def train_step(self, data):
            raise ZeroDivisionError("in the step")

    model = Failing()
    model.compile("sgd")
    with pytest.raises(ZeroDivisionError, match="in the step"):
        steps_of(model)


def images(*given):
    layers = [keras.layers.Conv2D(2, 3), keras.layers.Flatten()]
    return [*given, *layers], np.ones((6, 9, 9, 1), "float32"), (None, None, None, 1)


def words():
    layers = [keras.layers.Conv1D(2, 3), keras.layers.GlobalMaxPooling1D()]
    return layers, np.ones((6, 5, 2), "float32"), (None, None, 2)


class Grouped(keras.layers.Layer):
    """Adds up the rows of each group of three."""

    def call(self, x):
        return keras.ops.repeat(keras.ops.sum(keras.ops.reshape(x, (-1, 3, 3)), 1), 3, axis=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "create_layers, inputs",
    [
        (lambda: images(keras.Input((9, 9, 1))), 98),
        (images, 98),
        (words, 2),
        (lambda: ([Grouped()], X, (None, 3)), 3),
        (lambda: ([keras.Input((3,), batch_size=12)], X, (None, 3)), 3),
    ],
)
def test_a_model_is_built_from_the_sizes_of_a_batch(create_layers, inputs):
    layers, x, shape = create_layers()
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = x, np.ones((len(x), 1), "float32")
    step = steps_of(model, batch, (tf.TensorSpec(shape), tf.TensorSpec((None, 1))))
    step.check_train()
    train(step, batch)
    assert model.layers[-1].kernel.shape == (inputs, 1)


@pytest.mark.parametrize("channels, groups", [(4, 2), (None, 1)])
def test_no_convolution_reads_a_server_in_what_is_compiled_with_xla(channels, groups):
    convolve = keras.layers.Conv2D(2, 3, groups=groups)
    layers = [keras.Input((5, 5, 4)), convolve, keras.layers.GlobalMaxPooling2D()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = np.ones((6, 5, 5, 4), "float32"), np.ones((6, 1), "float32")
    spec = tf.TensorSpec((None, 5, 5, channels)), tf.TensorSpec((None, 1))
    step = steps_of(model, batch, spec)
    step.check_train()
    step.check_test("validation_data")
    for function in (step._train, step._test):
        operations = function.get_concrete_function().graph.get_operations()
        compiled = [each for each in operations if "_XlaMustCompile" in each.node_def.attr]
        assert compiled
        assert not [x for each in compiled for x in each.inputs if x.dtype == tf.resource]


class AllMetrics(keras.Model):
    """Logs the results of all metrics of `compile` as one, as Keras's guide does."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.test_step(data)

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(self.compute_loss(y=y, y_pred=predicted))
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def test_the_results_of_all_metrics_may_be_logged_together():
    given = keras.Input((3,))
    model = AllMetrics(given, keras.layers.Dense(1)(given))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae", Spread()])
    step = steps_of(model)
    halves = [tuple(part[rows] for part in BATCH) for rows in (slice(6), slice(6, 12))]
    trained = train(step, *halves)
    tested, others = zip(*(step.schedule_test(Here, half, 0)() for half in halves))
    assert [answer.logs for answer in trained] == [{}, {}] and others == ({}, {})
    expected = model.evaluate(*BATCH, batch_size=6, verbose=0, return_dict=True)
    assert set(expected) == {"loss", "mae", "least", "most"}
    for kind, states in (("train", [answer.metrics for answer in trained]), ("test", tested)):
        added = [np.sum(each, axis=0) for each in zip(*states)]
        assert step.results(added, kind) == pytest.approx(expected)


class Wrapped(Renaming):
    train_step, test_step = tf.function(Renaming.train_step), tf.function(Renaming.test_step)


def test_steps_may_be_wrapped_in_a_tf_function(monkeypatch):
    factories._repair_keras()
    strategy, found = tf.distribute.get_strategy(), []
    monkeypatch.setattr(strategy, "has_parameter_servers", True, raising=False)
    for kind in (Renaming, Wrapped):
        keras.utils.set_random_seed(0)
        model = kind()
        model.compile(keras.optimizers.SGD(0.1))
        step = steps_of(model)
        step.check_train()
        train(step, BATCH)
        states, _ = step.schedule_test(Here, BATCH, 0)()
        found.append(step.results(states, "test")["loss"])
    assert found[0] == pytest.approx(found[1])


@pytest.fixture(name="on_servers")
def on_servers_fixture(monkeypatch):
    """Embeddings are built as under some servers, in this process."""

    def have(num_servers):
        strategy, original = tf.distribute.get_strategy(), keras.layers.Embedding.build
        monkeypatch.setattr(partitioned, "SMALLEST_PART_BYTES", 8)
        monkeypatch.setattr(strategy, "num_servers", num_servers, raising=False)
        monkeypatch.setattr(strategy, "pieces", partitioned.Pieces(), raising=False)

        def build(layer, input_shape=None):
            partitioned.build(original, layer, input_shape)

        monkeypatch.setattr(keras.layers.Embedding, "build", build)

    return have


IDS = (np.int32([[1], [5], [5], [30]]), np.ones((4, 1), "float32"))


def embedding(**settings):
    table = keras.layers.Embedding(40, 3, **settings)
    layers = [keras.Input((1,), dtype="int32"), table, keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, table


@pytest.mark.slow
def test_a_frozen_table_is_looked_up_by_rows(on_servers):
    on_servers(1)
    model, table = embedding(trainable=False)
    step = steps_of(model, IDS)
    step.check_train()
    operations = step._train.get_concrete_function().graph.get_operations()
    whole = [x for x in operations if x.type == "ReadVariableOp" and x.outputs[0].shape == (40, 3)]
    assert not whole and "ResourceGather" in {each.type for each in operations}
    before = table.embeddings.numpy()
    assert train(step, IDS)[0].changes == []
    np.testing.assert_array_equal(table.embeddings.numpy(), before)


@pytest.mark.slow
def test_lora_trains_a_table_that_is_whole(on_servers):
    on_servers(1)
    model, table = embedding()
    table.enable_lora(2, b_initializer="ones")
    step = steps_of(model, IDS)
    before = [variable.numpy() for variable in table.trainable_variables]
    train(step, IDS)
    for variable, old in zip(table.trainable_variables, before, strict=True):
        assert "lora" in variable.name and np.any(variable.numpy() != old)
    rows = table(IDS[0]).numpy()
    np.testing.assert_allclose(rows, table.embeddings.numpy()[IDS[0]], rtol=1e-6)


def test_lora_is_refused_for_a_table_that_is_cut(on_servers):
    on_servers(2)
    _, table = embedding()
    with pytest.raises(ValueError, match="`enable_lora` .* Received: .* partitioned into 2 parts"):
        table.enable_lora(2)


@pytest.mark.parametrize("as_list", [False, True])
def test_a_table_that_is_cut_takes_and_returns_the_values_of_the_whole(on_servers, as_list):
    on_servers(2)
    values = np.random.RandomState(0).rand(40, 3).astype("float32")
    _, table = embedding(weights=[values] if as_list else values)
    assert len(table.embeddings.parts) == 2
    np.testing.assert_array_equal(table.embeddings.numpy(), values)
    [found] = table.get_weights()
    np.testing.assert_array_equal(found, values)
    for other in (np.ones((50, 3)), np.ones((40, 2))):
        with pytest.raises(
            ValueError, match=r"of \(40, 3\). Received: values of \((50, 3|40, 2)\)"
        ):
            table.embeddings.assign(other)
    table.set_weights([values[:20] + 1, values[20:] + 1])
    np.testing.assert_array_equal(table.embeddings.numpy(), values + 1)
    with pytest.raises(ValueError, match="expecting 2 weights"):
        table.set_weights([values[:3]])


@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_with_a_table_that_is_cut_resumes_on_as_many_servers_only(
    on_servers, monkeypatch, servers, tmp_path
):
    def train_on(servers):
        monkeypatch.setattr(tf.distribute.get_strategy(), "num_servers", servers)
        model, _ = embedding()
        checkpoint = tfmulti.callbacks.Checkpoint(tmp_path)
        model.fit(*IDS, batch_size=2, verbose=0, callbacks=[checkpoint])

    on_servers(2)
    train_on(2)
    told = f"same number of parameter servers. Received: {servers} servers, and 2 in .*--num_ps 2"
    with pytest.raises(CheckpointError, match=told):
        train_on(servers)


@pytest.mark.parametrize("servers", [1, 2])
def test_negative_numbers_of_rows_count_from_the_end_as_in_keras(on_servers, servers):
    ids = tf.constant([[-1, 0], [3, -9]])
    plain = keras.layers.Embedding(9, 4)
    expected = plain(ids)
    on_servers(servers)
    mine = keras.layers.Embedding(9, 4)
    mine.build()
    mine.set_weights(plain.get_weights())
    np.testing.assert_array_equal(mine(ids), expected)


@pytest.mark.parametrize(
    "penalty, parts",
    [("l2", 2), (keras.regularizers.L1L2(0.1, 0.1), 2), (None, 2)]
    + [(lambda w: 0.01 * keras.ops.mean(w**2), 1), (keras.regularizers.OrthogonalRegularizer(), 1)],
)
def test_a_table_is_whole_for_a_penalty_that_is_no_sum_over_its_elements(
    on_servers, penalty, parts
):
    on_servers(2)
    layer = keras.layers.Embedding(40, 3, embeddings_regularizer=penalty)
    layer.build()
    assert len(layer.weights) == parts


def test_a_table_that_is_cut_is_excluded_from_weight_decay_as_a_whole(on_servers):
    on_servers(2)
    model, table = embedding()
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_list=[table.embeddings])
    model.compile(optimizer, "mse")
    partitioned.prepare_optimizer(model)
    before = table.embeddings.numpy()
    optimizer.apply(
        [keras.ops.zeros_like(v) for v in model.trainable_variables], model.trainable_variables
    )
    np.testing.assert_array_equal(table.embeddings.numpy(), before)


def test_a_step_of_ones_own_is_told_that_it_gets_the_gradients_of_parts(on_servers):
    on_servers(2)
    model, table = embedding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partitioned.prepare_optimizer(model)

    class Stepping(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    own = Stepping(model.inputs, model.outputs)
    own.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="a gradient for each partition.*embeddings_0"):
        partitioned.prepare_optimizer(own)


def test_a_table_that_is_cut_can_be_frozen(on_servers):
    on_servers(2)
    _, table = embedding()
    assert table.embeddings.trainable and len(table.trainable_variables) == 2
    table.embeddings.trainable = False
    assert not table.embeddings.trainable and not table.trainable_variables


def test_gradients_are_divided_by_the_scale_that_they_were_computed_with():
    keras.utils.set_random_seed(0)
    model, table = embedding()
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.train_on_batch(*IDS)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    model.compile(optimizer, "mse")
    step = steps_of(model, IDS)
    answer = step.schedule(Here, IDS, 0)()
    # Another step has changed it meanwhile.
    optimizer.dynamic_scale.assign(4.0)
    step.apply(*add_gradients([answer]))
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_gradient_that_overflows_skips_the_update_and_halves_the_scale():
    model, _ = embedding()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    model.compile(optimizer, "mse")
    before = model.get_weights()
    train(steps_of(model, IDS), (IDS[0], np.full((4, 1), np.inf, "float32")))
    assert optimizer.dynamic_scale.numpy() == 32
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def loss_of(model):
    return float(np.mean((model.predict_on_batch(BATCH[0]) - BATCH[1]) ** 2))


def test_what_a_step_returns_by_the_name_of_a_metric_that_it_leaves_alone_is_logged():
    model = own(lambda model, x: {"twice": 2.0})
    step = steps_of(model)
    answer = step.schedule(Here, BATCH, 0)()
    logs = step.results(answer.metrics) | mean_logs([answer])
    assert logs == pytest.approx({"loss": loss_of(model), "twice": 2.0})


def test_what_an_evaluation_returns_is_logged_as_of_the_last_step(cluster):
    timeouts = {"start_timeout_s": 10.0, "heartbeat_timeout_s": 10.0}
    strategy = types.SimpleNamespace(cluster=cluster, num_workers=2, coordinator=Here, **timeouts)
    model = own(lambda model, x: {"largest": keras.ops.max(x)})
    step = steps_of(model)
    batches = [(BATCH[0] + number, BATCH[1]) for number in (3.0, 5.0, 0.0)]
    metrics, logs = RemoteRuns(strategy, step, None, print).evaluate(batches)
    expected = {"loss": loss_of(model), "largest": X.max()}
    assert step.results(metrics, "test") | logs == pytest.approx(expected)


class RunsHere:
    """Stands for the runs of one training: takes each step at once, in this process."""

    under_way, logs = False, {}

    def __init__(self, step):
        self.step = step

    def train(self, batches, first, may_go_on, around):
        for batch in batches:
            with around():
                [answer] = train(self.step, batch, first=first)
                self.logs, self.metrics = mean_logs([answer]), answer.metrics


def epochs_of(model, **callbacks):
    """Two epochs of one step, with a callback."""
    plan = types.SimpleNamespace(steps_per_epoch=1)
    data = types.SimpleNamespace(plan=plan, steps_left=lambda: 1, train_pass=lambda: [BATCH])
    step = steps_of(model)
    chosen = keras.callbacks.CallbackList(
        [keras.callbacks.LambdaCallback(**callbacks)], add_history=True, model=model
    )
    runs, requests = RunsHere(step), types.SimpleNamespace(is_asked=False)
    asynchronous._Epochs(model, data, None, chosen, step, runs, requests).run(2)
    return model.history.history


def staged():
    model = own(lambda model, x: {"stage": float(model.stage)})
    model.stage = 1
    return model


@pytest.mark.slow
def test_a_callback_that_has_the_step_traced_again_changes_it():
    model = staged()

    def begin(epoch, logs):
        if epoch:
            model.stage = 2
            model.make_train_function(force=True)

    assert epochs_of(model, on_epoch_begin=begin)["stage"] == [1, 2]
    assert model.train_function is None


@pytest.mark.slow
def test_a_layer_that_a_callback_unfreezes_learns():
    layers = [keras.layers.Dense(2, trainable=False), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.weights)
    kernels = []

    def begin(epoch, logs):
        kernels.append(layers[0].kernel.numpy())
        if epoch:
            layers[0].trainable = True
            model.make_train_function(force=True)

    epochs_of(model, on_epoch_begin=begin)
    assert (kernels[0] == kernels[1]).all() and (kernels[1] != layers[0].kernel.numpy()).all()


@pytest.mark.slow
def test_another_call_draws_other_numbers():
    model = own(lambda model, x: {"drawn": keras.random.normal((), seed=model.generator)})
    model.generator = keras.random.SeedGenerator(1)
    drawn = [*epochs_of(model)["drawn"], *epochs_of(model)["drawn"]]
    assert len(set(drawn)) == 4


def test_a_model_that_is_compiled_during_training_is_told():
    model = staged()
    with pytest.raises(ValueError, match="`compile` must not be called during training"):
        epochs_of(model, on_epoch_end=lambda epoch, logs: model.compile("sgd", "mse"))


def test_callbacks_are_given_as_to_fit(monkeypatch):
    def check(model, callbacks, *settings):
        raise ValueError([type(each).__name__ for each in callbacks])

    monkeypatch.setattr(asynchronous, "_check", check)
    stop = keras.callbacks.TerminateOnNaN()
    for given, found in ((None, r"\[\]"), (stop, r"\['Term\w+'\]"), ([stop], r"\['Term\w+'\]")):
        with pytest.raises(ValueError, match=found):
            tfmulti.train_async(None, BATCH, callbacks=given)


def test_eager_steps_are_refused_with_servers(monkeypatch):
    monkeypatch.setattr(asynchronous.keras_compat, "has_servers", lambda strategy: True)
    model = own(lambda model, x: None, run_eagerly=True)
    with pytest.raises(ValueError, match="as graphs.*Compile it without run_eagerly=True"):
        tfmulti.train_async(model, BATCH, batch_size=2)


def test_layers_that_keep_a_state_of_rows_are_refused_with_servers(monkeypatch):
    monkeypatch.setattr(asynchronous.keras_compat, "has_servers", lambda strategy: True)
    layers = [keras.Input((4, 2), batch_size=2), keras.layers.LSTM(3, stateful=True)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Received: lstm.*, stateful=True"):
        tfmulti.train_async(model, (np.ones((4, 4, 2)), np.ones((4, 3))), batch_size=2)


def test_metrics_that_a_step_updates_are_those_of_all_rows():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    step = steps_of(model)
    [answer] = train(step, BATCH)
    assert not answer.logs
    assert step.results(answer.metrics) == pytest.approx(
        model.evaluate(*BATCH, verbose=0, return_dict=True)
    )


def spec(*kinds):
    return {kind: [f"127.0.0.1:{port}"] for port, kind in enumerate(kinds, 20000)}


def test_servers_are_part_of_the_cluster_where_they_are_allowed():
    config = {"cluster": spec("chief", "worker", "ps"), "task": {"type": "ps", "index": 0}}
    cluster = resolve_cluster(config, servers=True, check_network=False)
    assert cluster.has_servers and cluster.task_type == "ps" and not cluster.is_chief
    with pytest.raises(ClusterError, match="parameter_server"):
        resolve_cluster(config, check_network=False)


@pytest.mark.parametrize(
    ("kinds", "kind", "words"),
    [
        (("chief", "worker"), "ps", "must be a type that `TF_CONFIG"),
        (("chief", "ps", "evaluator"), "evaluator", 'must be "chief", "worker" or "ps": Param'),
        (
            ("worker", "pss"),
            "worker",
            '"chief", "worker", "evaluator" and "ps".*Did you mean.*"ps"',
        ),
    ],
)
def test_mistakes_in_a_cluster_of_servers_are_told_with_its_types(kinds, kind, words):
    config = {"cluster": spec(*kinds), "task": {"type": kind, "index": 0}}
    with pytest.raises(ClusterError, match=words) as caught:
        resolve_cluster(config, servers=True, check_network=False)
    assert "MultiWorkerMirrored" not in str(caught.value)


def test_a_folder_has_files_of_servers_too(tmp_path):
    for kind in ("chief", "worker", "ps"):
        config = {"cluster": spec("chief", "worker", "ps"), "task": {"type": kind, "index": 0}}
        (tmp_path / f"{kind}_0.json").write_text(json.dumps(config))
    settings = {"environ": {"TASK_TYPE": "ps", "TASK_INDEX": "0"}, "check_network": False}
    assert resolve_cluster(tmp_path, servers=True, **settings).task_type == "ps"
    with pytest.raises(ClusterError, match='`TASK_TYPE` must be "chief" or "worker", to choose'):
        resolve_cluster(tmp_path, **settings)


def test_the_network_of_servers_is_checked_too():
    hosts = {kind: [f"{kind}.invalid:1"] for kind in ("chief", "worker", "ps")}
    asked = []
    network.check_hosts(Cluster(hosts, "chief", 0), source="TF_CONFIG", resolve=asked.append)
    assert sorted(asked) == ["chief.invalid", "ps.invalid", "worker.invalid"]
    addresses = {"chief": ["10.0.0.1:1"], "worker": ["10.0.0.2:1"], "ps": ["8.8.8.8:1"]}
    assert network.public_addresses(Cluster(addresses, "chief", 0)) == ["8.8.8.8:1"]


def test_the_variable_that_kubeflow_writes_is_read():
    hosts = {kind: [f"job-{kind}-0.default.svc:2222"] for kind in ("chief", "worker", "ps")}
    task = {"type": "ps", "index": 0}
    config = {"cluster": hosts, "task": task, "environment": "cloud"}
    assert resolve_cluster(config, servers=True, check_network=False).names_come_late


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_a_cluster_without_one_of_the_roles_is_refused(missing):
    kinds = [kind for kind in ("chief", "worker", "ps") if kind != missing]
    config = {"cluster": spec(*kinds), "task": {"type": kinds[0], "index": 0}}
    with pytest.raises(ValueError, match=f"and no {missing}"):
        tfmulti.create_strategy("parameter_server", tf_config=config)


def test_no_cluster_is_refused(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="--num_ps"):
        tfmulti.create_strategy("parameter_server")


def test_tasks_that_do_not_start_are_named(monkeypatch):
    config = json.loads(processes.tf_configs(1, 1)[0])
    with pytest.raises(RuntimeError, match="nothing from worker 0 .*, ps 0 "):
        tfmulti.create_strategy("parameter_server", tf_config=config, start_timeout=0.2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_staleness": 1}, "parameter_server only"),
        ({"strategy": "parameter_server", "shard": "state"}, "`shard` cannot be used"),
        ({"strategy": "parameter_server", "remainder": "pad"}, "`remainder` cannot be used"),
        ({"strategy": "parameter_server", "per_replica_batch_size": 4}, "`per_replica_batch_size`"),
        ({"strategy": "parameter_server", "max_staleness": -1}, "`max_staleness` must be at least"),
    ],
)
def test_settings_that_servers_do_not_know_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TrainConfig(**settings)


@pytest.mark.parametrize("setting", ["--shard=state", "--logical_cpus=2", "--bucket_bytes=8"])
def test_what_servers_do_not_know_is_refused_where_auto_chooses_them(setting, monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", processes.tf_configs(1, 1)[0])
    assert command.main(["train", setting]) == command_line.ERROR
    name = setting.split("=")[0][2:]
    assert f"`{name}` cannot be used with parameter_server, which auto" in capsys.readouterr().err


def test_activations_can_be_checkpointed_with_servers():
    TrainConfig(checkpoint_activations=True).check_with_servers()


def test_the_launcher_starts_servers_on_this_machine_only():
    with pytest.raises(ValueError, match="`num_ps`"):
        LaunchConfig(hosts="hosts.txt", num_ps=1)


def test_a_model_of_another_strategy_is_trained_by_fit():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="model.fit"):
        tfmulti.train_async(model, (np.zeros((4, 1)), np.zeros(4)), batch_size=2)


@pytest.fixture(name="cluster")
def cluster_fixture():
    config = {**spec("chief", "worker", "ps"), "worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    config = {"cluster": config, "task": {"type": "chief", "index": 0}}
    return resolve_cluster(config, servers=True, check_network=False)


@pytest.fixture(name="monitor")
def monitor_fixture(cluster):
    return TaskMonitor(cluster, start_timeout_s=0.001, heartbeat_timeout_s=0.0)


def test_a_lost_server_is_named_in_whatever_reads_a_variable(cluster):
    """As a callback that reads the optimizer's iterations."""
    timeouts = {"start_timeout_s": 0.001, "heartbeat_timeout_s": 10.0}
    strategy = types.SimpleNamespace(cluster=cluster, num_workers=2, **timeouts)
    with pytest.raises(ServerLost, match=r"ps 0 \(127.0.0.1:20002\) is lost"):
        with RemoteRuns(strategy, None, None, print):
            raise tf.errors.UnavailableError(None, None, "failed to connect to all addresses")
    with pytest.raises(ZeroDivisionError), RemoteRuns(strategy, None, None, print):
        raise ZeroDivisionError


class Coordinator:
    """Keeps the error of a step until it is asked for anything, as TensorFlow's does."""

    def __init__(self):
        self.error = None

    def schedule(self, error):
        self.done()
        self.error = error

        def wait():
            raise error

        return wait

    def done(self):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return True


def test_the_error_of_a_step_is_not_raised_again_by_the_next_training(cluster):
    timeouts = {"start_timeout_s": 10.0, "heartbeat_timeout_s": 10.0}
    coordinator = Coordinator()
    strategy = types.SimpleNamespace(
        cluster=cluster, num_workers=2, coordinator=coordinator, **timeouts
    )
    step = types.SimpleNamespace(schedule=lambda coordinator, *args: coordinator.schedule(args[0]))

    def train(error):
        with RemoteRuns(strategy, step, None, print) as runs:
            runs.train([error], 0, lambda sent: True, lambda apply: apply())

    for message in ("first", "second"):
        with pytest.raises(ZeroDivisionError, match=message):
            train(ZeroDivisionError(message))
    assert coordinator.error is None


def test_a_failed_training_does_not_wait_for_a_lost_worker(cluster, monkeypatch):
    timeouts = {"start_timeout_s": 10.0, "heartbeat_timeout_s": 10.0}
    never = threading.Event()
    coordinator = types.SimpleNamespace(done=never.wait)
    strategy = types.SimpleNamespace(
        cluster=cluster, num_workers=2, coordinator=coordinator, **timeouts
    )
    monkeypatch.setattr(remote_runs, "_FORGET_S", 0.01)
    step = types.SimpleNamespace(schedule=lambda *args: never.wait)
    with pytest.raises(ZeroDivisionError), RemoteRuns(strategy, step, None, print) as runs:
        runs._send(0, step.schedule)
        raise ZeroDivisionError
    with pytest.raises(WorkersLost), RemoteRuns(strategy, step, None, print) as runs:
        runs._send(0, step.schedule)
        monkeypatch.setattr(runs, "_forget_steps", mock.Mock(side_effect=AssertionError))
        raise WorkersLost
    never.set()


def test_a_lost_server_is_named(monitor):
    monitor.note("ps 0", GONE)
    monitor.check()
    for _ in range(3):
        monitor.note("ps 0", GONE)
    with pytest.raises(ServerLost, match="ps 0 .127.0.0.1:20002: nothing listens there. is lost"):
        monitor.check()


def test_a_frozen_worker_is_named(monitor):
    monitor.note("worker 1", SILENT)
    with pytest.raises(WorkersLost, match="worker 1 .127.0.0.1:2: it does not answer"):
        monitor.check()
    monitor.note("worker 1", THERE)
    monitor.check()


def test_timeouts_are_those_of_the_strategy(cluster, monkeypatch):
    create = mock.Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(factories, "create_parameter_server", create)
    monkeypatch.setattr(factories, "_find_cluster", lambda *_: cluster)
    with pytest.raises(ZeroDivisionError):
        tfmulti.create_strategy("parameter_server", start_timeout=7, heartbeat_timeout=3)
    create.assert_called_once_with(cluster, 7, 3)
    timeouts = {"start_timeout_s": 7, "heartbeat_timeout_s": 0.0}
    strategy = types.SimpleNamespace(cluster=cluster, num_workers=2, **timeouts)
    runs = RemoteRuns(strategy, None, None, print)
    runs._monitor.note("worker 1", SILENT)
    with pytest.raises(WorkersLost, match="worker 1"):
        runs._monitor.check()


def test_training_ends_once_no_worker_is_left(monitor):
    for _ in range(3):
        monitor.note("worker 0", GONE)
    monitor.check()
    assert ["worker 0" in line for line in monitor.news()] == [True]
    for _ in range(3):
        monitor.note("worker 1", GONE)
    monitor.check()
    with pytest.raises(WorkersLost, match="no worker for"):
        while True:
            monitor.check()


def test_a_task_is_lost_that_is_silent_for_long_and_is_back_once_it_answers():
    seconds = iter([0, 5, 11, 12, 13, 14, 30])
    presence = Presence("127.0.0.1:1", 10.0, clock=lambda: next(seconds))
    assert [presence.note(seen) for seen in (SILENT, SILENT)] == [None, None]
    assert presence.note(SILENT) == "it does not answer (frozen or cut off)"
    assert not presence.has_been_there
    assert [presence.note(seen) for seen in (THERE, GONE, SILENT, GONE)] == [None] * 4
    assert presence.has_been_there


def test_what_listens_without_an_answer_is_silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert probe(address, timeout_s=0.1) == SILENT
    assert probe(address, timeout_s=0.1) == GONE


PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
task = json.loads(os.environ["TF_CONFIG"])["task"]
kind, index, again = task["type"], task["index"], os.environ["TFMULTI_RESTARTS"] != "0"
here = Path(sys.argv[1])
(here / f"{kind}_{index}_{again}").touch()
def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def run_job(tmp_path):
    """Runs a program without TensorFlow on a chief, two workers and a server."""

    def run(code, *options):
        command = [sys.executable, "-m", "tfmulti.launch", "--num_workers=2", "--num_ps=1"]
        program = PRELUDE + textwrap.dedent(code)
        command += [*options, "--", sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=100, env={**os.environ}
        )

    return run


def test_a_killed_worker_is_restarted_alone(run_job, tmp_path):
    code = """
        if kind == "worker" and index == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("worker_1_True")
    """
    done = run_job(code, "--max_restarts=1")
    assert done.returncode == 0, done.stderr
    assert "Restart 1 (of 1) of worker 1" in done.stderr
    assert [path.name for path in tmp_path.glob("*_True")] == ["worker_1_True"]


def test_a_job_goes_on_without_a_worker(run_job):
    code = """
        if kind == "worker" and index == 1:
            (here / "pid").write_text(str(os.getpid()))
            (here / "goes").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("goes")
        killed = (here / "pid").read_text()
        # Until the launcher has noticed it: else the job may end before.
        while os.path.exists(f"/proc/{killed}"):
            time.sleep(0.01)
    """
    done = run_job(code)
    assert done.returncode == 0 and "worker 1 was ended by SIGKILL" in done.stderr
    assert "the job continues with" in done.stderr


@pytest.mark.parametrize(("role", "code"), [("ps", 137), ("chief", 3)])
def test_a_job_ends_with_its_server_or_chief(run_job, role, code):
    ends = "os.kill(os.getpid(), signal.SIGKILL)" if role == "ps" else "sys.exit(3)"
    done = run_job(f"""
        if kind == "{role}":
            {ends}
        time.sleep(100)
    """)
    assert done.returncode == code
    assert ("ps 0 was ended by SIGKILL" if role == "ps" else "chief failed with") in done.stderr
