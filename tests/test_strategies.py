"""Strategies: stock Keras under each of them, how one is chosen, and what is refused."""

import contextlib
import itertools
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy

import tfmulti
from tfmulti.cluster import environment
from tfmulti.strategies import fit_callbacks

TESTS = Path(__file__).parent
sys.path.append(str(TESTS / "multi_worker"))

import behaviour_cases as behaviour

# Uses TensorFlow, then asks for what must come before that.
TOO_LATE = """
import json, sys
import tfmulti
mirrored = tfmulti.create_strategy("mirrored", logical_cpus=3)
messages = [mirrored.num_replicas_in_sync]
for name, logical_cpus in (("mirrored", 5), ("multi_worker", 0)):
    try:
        tfmulti.create_strategy(name, logical_cpus=logical_cpus)
    except RuntimeError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


# The others are in the slow tests.
IN_EVERY_RUN = [
    ("sequential", "distributed"),
    ("functional", "distributed"),
    ("subclassed", "arrays"),
    ("string_lookup", "distributed"),
    ("hashing", "arrays"),
]
CASES = [
    pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.slow)
    for case in itertools.product(behaviour.CASES, behaviour.PATHS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), CASES)
def test_two_replicas_do_as_one_device(name, path):
    result = behaviour.run_case(name, create_strategy(2), path)
    behaviour.assert_same(result, behaviour.on_one_device(name, path))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "path"), [("hashing", "arrays"), ("subclassed", "distributed")])
def test_three_replicas_do_as_one_device(name, path):
    result = behaviour.run_case(name, create_strategy(3), path)
    behaviour.assert_same(result, behaviour.on_one_device(name, path))


def test_predict_keeps_the_order_of_the_data():
    strategy = create_strategy(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Rescaling(2.0)])
    model.compile()
    rows = np.arange(43, dtype="float32")[:, np.newaxis]
    np.testing.assert_array_equal(model.predict(rows, batch_size=8, verbose=0), 2 * rows)
    data = tfmulti.distribute_eval((rows,), strategy, 8)
    np.testing.assert_array_equal(model.predict(data, verbose=0), 2 * rows)


@pytest.mark.slow
def test_strategies_of_different_sizes_live_in_one_process():
    x, y = behaviour.plain(12)
    models = []
    for strategy in (create_strategy(2), create_strategy(3)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1))
            models.append(behaviour.sequential(optimizer))
    for _ in range(2):
        for model in models:
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    for two, three in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(two, three, rtol=0, atol=1e-6)


def test_a_dataset_for_another_strategy_is_refused():
    x, y = behaviour.plain(12)
    strategy = create_strategy(2)
    with strategy.scope():
        model = behaviour.sequential(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    data = tfmulti.distribute_train((x, y), create_strategy(1), 6)
    with pytest.raises(ValueError, match="Received: a dataset for 1 replicas, a model on 2"):
        model.fit(data, verbose=0)


def test_logical_cpus_are_replicas():
    assert tfmulti.create_strategy("mirrored", logical_cpus=3).num_replicas_in_sync == 3
    assert tfmulti.create_strategy("auto", logical_cpus=2).num_replicas_in_sync == 2


def test_logical_cpus_that_come_too_late_are_told_in_three_parts():
    words = (
        "`logical_cpus` must be set before TensorFlow is used.* Received: logical_cpus=5, with 4 in"
        r" use. .* restart the process \(in a notebook: the kernel\).$"
    )
    # Whatever ran in this process before.
    tf.constant(1) + 1
    with pytest.raises(RuntimeError, match=words):
        tfmulti.create_strategy("mirrored", logical_cpus=5)


@pytest.mark.slow
def test_too_late_is_said(free_ports):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}
    config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
    environment = {"PYTHONPATH": str(TESTS.parent), "TF_CONFIG": json.dumps(config)}
    done = subprocess.run(
        [sys.executable, "-c", TOO_LATE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    num_replicas, late_cpus, late_workers = json.loads(done.stdout.splitlines()[-1])
    assert num_replicas == 3
    for rule, message in (
        ("`logical_cpus` must be set before TensorFlow is used", late_cpus),
        ("`multi_worker` must be created before TensorFlow is used", late_workers),
    ):
        assert message.startswith(rule)
        assert " Received: " in message
        assert message.endswith("or restart the process (in a notebook: the kernel).")
    assert "logical_cpus=5, with 3 in use" in late_cpus


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mirror"}, r"`name` must be one of .* Received: name='mirror'\. Use"),
        ({"communication": "gloo"}, r"`communication` must be .* Received: communication='gloo'\."),
        (
            {"name": "multi_worker", "devices": ["CPU:0"]},
            r"`devices` can be used with .* Leave it out",
        ),
        ({"name": "tpu", "devices": ["CPU:0"]}, r"`devices` can be used with .* name='tpu'"),
        ({"name": "mirrored", "tf_config": "folder"}, r"`tf_config` can be .* use 'multi_worker'"),
        ({"bucket_bytes": 0.5}, r"`bucket_bytes` must be None or a whole number from 1. .*=0.5"),
        ({"name": "mirrored", "bucket_bytes": 8}, r"multi_worker and auto only.*=8, name='mirr"),
        ({"name": "one_device", "communication": "mpi"}, r"`communication` can be used with"),
        ({"name": "tpu", "start_timeout": 3}, r"`start_timeout` can be used with .*=3, name"),
        ({"name": "mirrored", "heartbeat_timeout": 3.0}, r"`heartbeat_timeout` can be used with"),
        ({"name": "parameter_server", "communication": "ring"}, r"`communication` can be used"),
        ({"name": "parameter_server", "bucket_bytes": 8}, r"`bucket_bytes` can be used with"),
        ({"name": "parameter_server", "on_difference": "error"}, r"`on_difference` can be used"),
        ({"name": "parameter_server", "distribute_optimizers": False}, r"`distribute_optimizers`"),
        ({"name": "parameter_server", "logical_cpus": 2}, r"`logical_cpus` can be used with"),
        ({"logical_cpus": -1}, r"`logical_cpus` must be a whole.* Received: .*-1\. Use 0"),
        ({"logical_cpus": "2"}, r"`logical_cpus` must be a whole.* Received: .*'2'\. Use 0"),
        ({"bucket_bytes": 0.5}, r"`bucket_bytes` must be None or a whole number"),
        ({"heartbeat_timeout": "10"}, r"`heartbeat_timeout` must be .* Received: .*='10'\. "),
        (
            {"heartbeat_timeout": 0.5},
            r"`heartbeat_timeout` must be .* Received: .*=0\.5\. Leave it out for 10\.",
        ),
        ({"devices": ["CPU:9"]}, r"`devices` must name .*\['CPU:9'\]. Known here: CPU:0, CPU:1"),
        ({"devices": ["CPU:0", "CPU:0"]}, r"each once\. Received: devices=\['CPU:0', 'CPU:0'\]"),
        ({"devices": []}, r"`devices` must be a list of names"),
        ({"devices": "CPU:0"}, r"Received: devices='CPU:0'\. Write devices=\['CPU:0'\]"),
        ({"name": "one_device", "devices": ["CPU:0", "CPU:1"]}, r"Use 'mirrored' for several"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfmulti.create_strategy(**arguments)


def test_auto_accepts_what_the_chosen_strategy_does_not_use(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    settings = {"communication": "ring", "bucket_bytes": 8, "start_timeout": 3}
    strategy = tfmulti.create_strategy("auto", logical_cpus=2, **settings)
    assert type(strategy).__name__ == "MirroredStrategy"


def test_multi_worker_needs_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="needs a cluster in TF_CONFIG. Received: no TF_CONFIG"):
        tfmulti.create_strategy("multi_worker")


@pytest.mark.slow
def test_tpu_says_what_it_needs():
    with pytest.raises(RuntimeError, match="Received: .* pip install tensorflow-tpu"):
        tfmulti.create_strategy("tpu")


@pytest.mark.parametrize(
    ("arguments", "kind", "why"),
    [
        ({}, "OneDeviceStrategy", "no TPU, no TF_CONFIG, 0 GPUs"),
        ({"logical_cpus": 2}, "MirroredStrategy", "logical_cpus=2"),
        ({"devices": ["CPU:0", "CPU:1"]}, "MirroredStrategy", "devices=['CPU:0', 'CPU:1']"),
        ({"devices": ["/device:cpu:1"]}, "OneDeviceStrategy", "devices=['/device:cpu:1']"),
    ],
)
def test_auto_says_what_it_chose_and_why(monkeypatch, caplog, arguments, kind, why):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with caplog.at_level(logging.INFO, logger="absl"):
        strategy = tfmulti.create_strategy("auto", **arguments)
    assert type(strategy).__name__ == kind
    assert "chosen because " in strategy.why and why in strategy.why
    assert strategy.why in caplog.text


def fitted(compile_within, compile_again, kind, optimizer):
    """Trains a model of one replica that is compiled again, within the scope or outside."""
    keras.utils.set_random_seed(1)
    strategy = tfmulti.create_strategy(kind, devices=["CPU:0"])
    with strategy.scope():
        hidden = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *hidden])
        model.compile("adam", "mse")
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.ones((8, 1))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with strategy.scope() if compile_within else contextlib.nullcontext():
        model.compile(optimizer(), "mse", metrics=["mae"])
    compile_again(model, x, y)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one_device", "mirrored"])
@pytest.mark.parametrize("by_batch", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        lambda: tfmulti.DistributedOptimizer(keras.optimizers.Adam()),
    ],
)
def test_a_model_of_one_replica_is_compiled_again_outside_of_the_scope(kind, by_batch, optimizer):
    def train(model, x, y):
        if by_batch:
            return model.train_on_batch(x, y)
        return model.fit(x, y, batch_size=4, shuffle=False, verbose=0)

    within, outside = (fitted(each, train, kind, optimizer) for each in (True, False))
    for one, other in zip(within, outside, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_that_was_compiled_in_another_scope_is_told():
    with tfmulti.create_strategy("one_device", devices=["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match="in the strategy's scope. Received: the variable"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_several_replicas_are_compiled_within_their_scope(optimizer):
    with tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="Received: the variable .*, created outside it"):
        model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)


def test_metrics_from_outside_the_scope_are_told_before_anything_is_verified():
    metrics = [Largest(), keras.metrics.SparseTopKCategoricalAccuracy(2)]
    with tfmulti.create_strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    x, y = np.ones((9, 3)), np.arange(9) % 3
    with warnings.catch_warnings(), pytest.raises(ValueError, match="created outside it"):
        warnings.simplefilter("error")
        model.fit(x, y, validation_data=(x, y), verbose=0)


class Largest(keras.metrics.Metric):
    """A metric of the user's own, whose state is a maximum."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(shape=(), initializer="zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y_pred)))

    def result(self):
        return self.largest


def test_files_that_only_the_chief_keeps_lie_in_the_launchers_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(environment.PROGRESS, str(tmp_path / "worker_1"))
    assert fit_callbacks._temporary_folder().parent == tmp_path
