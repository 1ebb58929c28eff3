"""What is done where there are GPUs, with stand-ins for them; `test_real_gpu.py` needs one."""

import collections
import os
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import create_strategy
from tensorflow.python.eager import context

from tfmulti import devices, hardware, topology
from tfmulti.checkpoint import generations
from tfmulti.hardware.gpus import Driver, Gpu
from tfmulti.keras_compat import collectives
from tfmulti.parallel import layer_costs
from tfmulti.step import rows
from tfmulti.strategies import coordination, multi_worker, parameter_server
from tfmulti.train import batch_size
from tfmulti.verification.verdict import without_tf32


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of which the program has hidden the first."""
    every = ["/physical_device:GPU:0", "/physical_device:GPU:1"]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: every)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: every[1:])
    return every


def test_hidden_gpus_are_not_counted(gpus, monkeypatch):
    assert devices.count_gpus() == 1
    monkeypatch.setattr(hardware, "list_uuids", lambda: ["GPU-a", "GPU-b"])
    assert multi_worker._list_uuids() == ["GPU-b"]
    assert multi_worker.choose_communication("auto", 2)[0] == "nccl"
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [])
    assert not devices.has_gpu()
    assert multi_worker.choose_communication("auto", 2)[0] == "ring"


def test_memory_grows_unless_the_program_has_divided_the_gpu(gpus, monkeypatch):
    grown = []
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda gpu: gpu == gpus[0] and ["a limit"]
    )
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, grows: grown.append((gpu, grows))
    )
    devices.grow_gpu_memory()
    assert grown == [(gpus[1], True)]
    assert os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"


def worker_over(communication, monkeypatch, answer):
    monkeypatch.setattr(topology, "num_workers", lambda strategy: 2)
    monkeypatch.setattr(coordination, "min_and_max", answer)
    multi_worker.try_nccl(types.SimpleNamespace(communication=communication), timeout_s=0.2)


def test_workers_that_nccl_cannot_connect_are_told_how_to(monkeypatch):
    def forever(strategy, number):
        threading.Event().wait()

    worker_over("ring (as requested)", monkeypatch, forever)
    with pytest.raises(RuntimeError, match="Received: no answer in 0.2 s.*NCCL_SOCKET_IFNAME"):
        worker_over("nccl (there are GPUs)", monkeypatch, forever)
    worker_over("nccl (there are GPUs)", monkeypatch, lambda strategy, number: (0, 0))


@pytest.mark.parametrize(("kind", "given"), [("worker", "4"), ("ps", "-1")])
def test_a_worker_of_servers_takes_one_gpu(kind, given, monkeypatch):
    taken = []
    monkeypatch.setattr(devices, "see_gpus", taken.append)
    for visible in ("4,5", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        parameter_server._take_one_gpu(kind)
    assert taken == [given]


def test_a_dummy_row_of_ones_is_for_inputs_alone():
    empty = {"a": tf.zeros([0, 2]), "b": tf.zeros([0], tf.string)}, tf.zeros([0, 3], tf.int32), None
    inputs, labels, weights = rows.fill_if_empty(empty, of_ones=True)
    assert inputs["a"].numpy().tolist() == [[1.0, 1.0]] and inputs["b"].numpy().tolist() == [b""]
    assert labels.numpy().tolist() == [[0, 0, 0]] and weights is None
    assert rows.fill_if_empty(empty)[0]["a"].numpy().tolist() == [[0.0, 0.0]]
    named = collections.namedtuple("Named", "x y")(*empty[:2])
    assert rows.fill_if_empty(named, of_ones=True).x["a"].numpy().tolist() == [[1.0, 1.0]]
    full = tf.fill([2, 2], 5.0), tf.zeros([2])
    assert rows.fill_if_empty(full, of_ones=True)[0].numpy().tolist() == [[5.0, 5.0]] * 2


def hidden_rows(num_replicas):
    """A recurrent model, of which each batch of 8 leaves nothing to the last replica at the end."""
    random = np.random.RandomState(0)
    x, y = random.randint(1, 9, (17, 5)), random.randn(17, 1)
    # cuDNN takes masked steps at the end of a row alone, and not the whole row.
    x *= np.arange(5) < random.randint(1, 6, (17, 1))
    masks = []

    class Seen(keras.layers.Layer):
        supports_masking = True

        def call(self, inputs, mask=None):
            if not tf.executing_eagerly():
                tf.py_function(lambda part: masks.append(part.numpy()), [mask], [])
            return inputs

    keras.utils.set_random_seed(1)
    with create_strategy(num_replicas, verify="never").scope():
        layers = [keras.layers.Embedding(9, 4, mask_zero=True), Seen(), keras.layers.LSTM(3)]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), masks


@pytest.mark.slow
def test_no_mask_hides_a_dummy_row_from_cudnn(monkeypatch):
    monkeypatch.setattr(topology, "on_gpus", lambda strategy: True)
    one, _ = hidden_rows(1)
    many, masks = hidden_rows(3)
    assert masks and all(mask.any(axis=1).all() for mask in masks)
    for a, b in zip(one, many):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


class Deciding(keras.Model):
    """Its step decides by the mean loss of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
            loss = tf.where(loss > 0.1, loss, 0.0) ** 2
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.slow
def test_no_eager_step_is_replicated_on_several_gpus(monkeypatch):
    def fit():
        with create_strategy(2, on_difference="replicate").scope():
            model = Deciding()
            model.compile("sgd", run_eagerly=True)
        random = np.random.RandomState(0)
        model.fit(random.randn(16, 4), random.randn(16, 1), batch_size=8, verbose=0)

    with pytest.warns(UserWarning, match="Every replica computes `train_step`"):
        fit()
    monkeypatch.setattr(topology, "on_gpus", lambda strategy: True)
    with pytest.raises(ValueError, match="does not help: with run_eagerly=True.*compile"):
        fit()


def test_verification_computes_without_tf32():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    seen = []

    @without_tf32()
    def compute(case):
        seen.append(enabled())
        raise ValueError(case)

    before = enabled()
    for is_enabled in (True, False):
        tf.config.experimental.enable_tensor_float_32_execution(is_enabled)
        with pytest.raises(ValueError, match="a case"):
            compute("a case")
        assert enabled() == is_enabled
    tf.config.experimental.enable_tensor_float_32_execution(before)
    assert seen == [False, False]


def test_a_checkpoint_is_written_from_the_hosts_memory(tmp_path, monkeypatch):
    places, convert = [], tf.convert_to_tensor

    def noted(*args, **kwargs):
        places.append(context.context().device_name)
        return convert(*args, **kwargs)

    monkeypatch.setattr(tf, "convert_to_tensor", noted)
    generations.write(tmp_path, 1, {"a": np.ones(3, "float32")}, {})
    assert places and all(place.endswith("CPU:0") for place in places)


class Launcher:
    _device = "/device:GPU:0"

    def _next_instance_key(self):
        return 7


def test_the_size_of_a_tensor_is_taken_where_it_is():
    launcher = Launcher()
    gather = collectives.gather_by_shape(lambda self, value, options: value)
    add = collectives.reduce_by_size(lambda self, value, control, options: value)
    with tf.Graph().as_default() as graph:
        value = tf.compat.v1.placeholder(tf.float32, [None, 2])
        gather(launcher, value, None)
        add(launcher, value)
        device_of = {op.type: op.device for op in graph.get_operations()}
    assert device_of["Shape"] == device_of["Size"] == "" and "CPU:0" in device_of["FloorMod"]


def test_layers_are_timed_until_the_gpu_is_done(monkeypatch):
    waited = []
    monkeypatch.setattr(tf.test.experimental, "sync_devices", lambda: waited.append(True))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    part = keras.Model(model.inputs, model.outputs)
    assert layer_costs._time(part, 2) > 0 and len(waited) > 1


def test_a_batch_size_leaves_room_on_the_smallest_gpu(monkeypatch):
    def known(*sizes):
        gpus = tuple(Gpu(index, "A", memory_mib=size) for index, size in enumerate(sizes))
        monkeypatch.setattr(hardware, "read_driver", lambda: Driver(gpus=gpus))
        return batch_size._smallest_gpu()

    assert known(2048, 1024) == 1 << 30 and known() is None and known(None) is None
