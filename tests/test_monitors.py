"""What is read of devices, what is told of it, and what it costs the step: no reduction."""

import collections
import contextlib
import csv
import gc
import sys
import threading
import time
import types
import weakref

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from nvml_stand_in import Device, Nvml
from replicas import create_strategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfmulti
from tfmulti import hardware
from tfmulti.callbacks import Devices, MlflowLogs, Throughput, WandbLogs
from tfmulti.train.config import TrainConfig
from tfmulti.train.loop import train_and_evaluate


class Reader:
    """Tells what it was given; then the last of it for ever."""

    def __init__(self, *readings):
        self.readings, self.closed = list(readings), False

    def read(self):
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def close(self):
        self.closed = True


class Broken(Reader):
    def read(self):
        raise OSError("the device has gone")


def ticks(*times):
    return iter(times).__next__


# Processor and memory.

Times = collections.namedtuple("Times", "user idle iowait guest")
Own = collections.namedtuple("Own", "user system")


def psutil_of(times, own):
    process = types.SimpleNamespace(
        cpu_times=iter(own).__next__, memory_info=lambda: types.SimpleNamespace(rss=2e9)
    )
    return types.SimpleNamespace(
        cpu_times=iter(times).__next__,
        virtual_memory=lambda: types.SimpleNamespace(percent=40.0),
        Process=lambda: process,
    )


def test_the_processor_is_read_since_the_reading_before():
    times = [Times(10, 5, 5, 4), Times(14, 8, 6, 6)]
    reader = hardware.Processor(psutil_of(times, [Own(1, 0), Own(3, 1)]), ticks(0.0, 2.0))
    # Of eight seconds of all cores four were busy, the guests' among them.
    assert reader.read() == {
        "cpu_percent": 50.0,
        "memory_percent": 40.0,
        "process_cores": 1.5,
        "process_memory_gb": 2.0,
    }


def test_psutil_tells_what_the_reader_needs():
    readings = hardware.Processor(psutil).read()
    assert {"memory_percent", "process_memory_gb"} <= set(readings)
    assert 0 < readings["memory_percent"] <= 100
    assert 0.01 < readings["process_memory_gb"] < 100
    sum(range(10**6))
    reader = hardware.Processor(psutil)
    limit = time.monotonic() + 30
    readings = {}
    while "cpu_percent" not in readings or not readings["process_cores"]:
        assert time.monotonic() < limit
        readings = reader.read()
    assert 0 <= readings["cpu_percent"] <= 100


# The thread.


def test_means_are_weighed_by_time_and_begin_anew():
    reader = Reader({"a": 10.0}, {"a": 40.0, "b": 1.0}, {"a": 7.0})
    sampler = hardware.Sampler([reader], 1.0, ticks(0.0, 1.0, 3.0, 4.0))
    sampler.sample()
    assert sampler.take() == {"a": pytest.approx((10 * 1 + 40 * 2) / 3), "b": 1.0}
    assert sampler.take() == {"a": pytest.approx(7.0)}


def test_a_reader_that_fails_is_left_out():
    sampler = hardware.Sampler([Broken({}), Reader({"a": 1.0})], 1.0)
    assert sampler.take() == sampler.take() == {"a": 1.0}
    assert sampler.failures == ["Broken: OSError: the device has gone"]


class Waking(Reader):
    """Tells when a thread has read."""

    def __init__(self):
        super().__init__({"a": 1.0})
        self.threads, self.several = set(), threading.Event()

    def read(self):
        self.threads.add(threading.current_thread())
        if len(self.threads) > 1:
            self.several.set()
        return super().read()


def test_the_thread_reads_and_ends_when_it_is_told():
    reader = Waking()
    sampler = hardware.Sampler([reader], 0.001)
    sampler.start()
    assert reader.several.wait(30)
    sampler.stop()
    assert reader.closed
    assert [t for t in reader.threads if t.is_alive()] == [threading.current_thread()]


def test_the_thread_ends_with_its_owner():
    reader = Waking()
    sampler = hardware.Sampler([reader], 0.001)
    sampler.start()
    assert reader.several.wait(30)
    [thread] = reader.threads - {threading.current_thread()}
    gone = weakref.ref(sampler)
    del sampler
    gc.collect()
    thread.join(30)
    assert gone() is None and not thread.is_alive()


# What is told.


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ([{"gpu_0_percent": 98}, {"gpu_0_percent": 80}], None),
        ([{"gpu_0_percent": 98}, {"gpu_0_percent": 70}], "worker 1 GPU 0 at 70%, worker 0 GPU 0"),
        ([{"gpu_0_percent": 60, "gpu_1_percent": 99}], "worker 0 GPU 0 at 60%, worker 0 GPU 1"),
        # Where there are GPUs, the processors' work is theirs.
        ([{"gpu_0_percent": 90, "process_cores": 4}, {"gpu_0_percent": 90}], None),
        ([{"process_cores": 2.0}, {"process_cores": 1.5}], "worker 1 CPU at 150%, worker 0 CPU"),
        ([{"process_cores": 2.0}, {"process_cores": 1.7}], None),
        ([{"gpu_0_percent": 4}, {"gpu_0_percent": 0}], None),
        ([{"cpu_percent": 90}, {}], None),
    ],
)
def test_unequal_work_is_told_from_a_fifth(workers, told):
    named = {f"worker {index}": readings for index, readings in enumerate(workers)}
    line = hardware.describe_imbalance(named)
    assert line is None if told is None else told in line


def test_the_logs_get_few_numbers_however_many_gpus_there_are():
    gpus = [Device(percent=50 + i, milliwatts=100_000 + 1000 * i) for i in range(2)]
    readings = hardware.Gpus(Nvml(*gpus), {}).read() | {"cpu_percent": 50.04}
    assert hardware.summarize(readings) == {
        "cpu_percent": 50.0,
        "gpu_percent": 50.5,
        "gpu_memory_percent": 0.0,
        "gpu_watts": 201.0,
    }
    assert hardware.describe(readings) == (
        "CPU 50%; GPU 0 50%, 0.0 GB, 100 W; GPU 1 51%, 0.0 GB, 101 W"
    )


# In training.


def create_model(strategy, **settings):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        optimizer = tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, "mse", **settings)
    return model


def create_data(strategy, steps=4):
    data = np.zeros((4 * steps, 4), "float32"), np.zeros((4 * steps, 1), "float32")
    return tfmulti.distribute_train(data, strategy, 4, seed=0)


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_the_trainer_tells_and_writes_what_it_monitors(tmp_path):
    lines = []
    config = TrainConfig(
        strategy="mirrored", logical_cpus=2, epochs=2, workdir=str(tmp_path), monitor=True
    )
    result = train_and_evaluate(config, print_fn=lines.append)
    assert set(result["metrics"]) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    for epoch in (1, 2):
        [line] = [line for line in lines if line.startswith(f"worker 0, epoch {epoch}: CPU ")]
        assert "this process" in line
    speeds = [line for line in lines if "examples/s now" in line]
    assert len(speeds) == 2 and all("waiting for data" in line for line in speeds)
    assert speeds[-1].endswith("about 0:00:00 left")
    with open(tmp_path / "history.csv") as file:
        rows = list(csv.DictReader(file))
    known = {"cpu_percent", "memory_percent", "process_cores", "process_memory_gb"}
    names = known | {"examples_per_second", "examples_per_second_now", "input_share"}
    assert names <= set(rows[0]) and all(float(row[name]) >= 0 for row in rows for name in names)
    curves = scalars(tmp_path / "logs" / "train")
    for name in names:
        np.testing.assert_allclose(
            curves[f"epoch_{name}"], [float(row[name]) for row in rows], rtol=1e-6
        )
    with open(tmp_path / "logs" / "devices_worker_0.csv") as file:
        assert known < set(next(csv.DictReader(file)))
    own = scalars(tmp_path / "logs" / "devices_worker_0")
    assert {f"devices/{name}" for name in known} <= set(own)


def test_every_gpu_is_in_the_files_and_few_numbers_in_the_logs(tmp_path):
    strategy, lines = create_strategy(2), []
    readings = {"gpu_0_percent": 90.0, "gpu_1_percent": 60.0, "gpu_0_watts": 300.0}
    reader = Reader(readings)
    devices = Devices(tmp_path, lines.append, readers=[reader])
    model = create_model(strategy)
    history = model.fit(create_data(strategy), epochs=3, verbose=0, callbacks=[devices])
    assert history.history["gpu_percent"] == [75.0] * 3
    assert "gpu_0_percent" not in history.history
    own = scalars(tmp_path / "devices_worker_0")
    assert own["devices/gpu_1_percent"] == pytest.approx([60.0] * 3)
    with open(tmp_path / "devices_worker_0.csv") as file:
        assert [row["gpu_0_watts"] for row in csv.DictReader(file)] == ["300.0"] * 3
    # The imbalance once, for as long as it lasts.
    unequal = "unequal work: worker 0 GPU 1 at 60%, worker 0 GPU 0 at 90%"
    assert [line.startswith(unequal) for line in lines] == [False, True, False, False]
    assert lines[0] == "worker 0, epoch 1: GPU 0 90%, 300 W; GPU 1 60%"
    assert reader.closed and devices.readings == pytest.approx(readings)


def test_training_goes_on_without_a_reader_that_fails():
    strategy, lines = create_strategy(1), []
    devices = Devices(print_fn=lines.append, readers=[Broken({}), Reader({"cpu_percent": 3.0})])
    create_model(strategy).fit(create_data(strategy), epochs=2, verbose=0, callbacks=[devices])
    assert lines.count("worker 0: no longer read: Broken: OSError: the device has gone") == 1
    assert "worker 0, epoch 2: CPU 3%" in lines


def test_an_interval_must_be_above_0():
    with pytest.raises(ValueError, match="`interval_s` must be more than 0"):
        Devices(interval_s=0.0)


def test_no_thread_is_left_and_no_step_reduces_more(monkeypatch):
    seen = []
    original = tf.distribute.ReplicaContext.all_reduce

    def all_reduce(self, *args, **kwargs):
        seen.append(args)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", all_reduce)
    strategy, counts = create_strategy(2), []
    for monitored in (False, True):
        seen.clear()
        data = create_data(strategy)
        callbacks = [Throughput(data), Devices(print_fn=lambda line: None)] if monitored else []
        create_model(strategy).fit(data, epochs=2, verbose=0, callbacks=callbacks)
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0
    assert hardware.Sampler.THREAD not in {thread.name for thread in threading.enumerate()}


def test_the_share_of_the_input_is_known_with_one_step_a_call():
    for calls, known in ((1, True), (2, False)):
        strategy = create_strategy(2)
        data = create_data(strategy)
        throughput = Throughput(data)
        model = create_model(strategy, steps_per_execution=calls)
        history = model.fit(data, epochs=2, verbose=0, callbacks=[throughput]).history
        assert ("input_share" in history) == known
        assert history["examples_per_second_per_replica"][-1] == pytest.approx(
            history["examples_per_second"][-1] / 2, rel=1e-3
        )
    assert Throughput().input_share is None


def test_a_step_knows_how_long_it_waited():
    strategy, sleep = create_strategy(1), 0.1

    def wait(x):
        time.sleep(sleep)
        return x

    data = create_data(strategy).map(
        lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), [None, 4]), y)
    )
    data.measure_waiting()
    batches = iter(strategy.experimental_distribute_dataset(data))
    began, outside = time.perf_counter(), 0.0
    with contextlib.suppress(StopIteration):
        while True:
            left = time.perf_counter()
            next(batches)
            outside += max(0.0, time.perf_counter() - left - sleep)
    total = time.perf_counter() - began
    assert 4 * sleep - outside - 0.05 < data.seconds_waited <= total


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_the_time_left_counts_what_is_between_epochs():
    strategy = create_strategy(1)
    data = create_data(strategy)
    throughput, left = Throughput(data, clock=Clock()), []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            left.append(throughput.seconds_left)

    model = create_model(strategy)
    model.fit(data, epochs=3, verbose=0, callbacks=[throughput, Look()])
    # Each reading is a second later: a step takes one, and so does what follows an epoch.
    assert left == [8 + 2, 4 + 1, 0.0]


WORKER = """
import sys
import keras, numpy as np
import tfmulti
from tfmulti.callbacks import Devices
from tfmulti.strategies import collectives

strategy = tfmulti.create_strategy("multi_worker")
chief = collectives.is_chief(strategy)

class Reader:
    def read(self):
        return {"gpu_0_percent": 95.0 if chief else 50.0}
    def close(self):
        pass

data = np.zeros((16, 4), "float32"), np.zeros((16, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(tfmulti.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")

def fit(devices):
    train = tfmulti.distribute_train(data, strategy, 8, seed=0)
    return model.fit(train, epochs=2, verbose=0, callbacks=devices)

tell = lambda line: print(line, flush=True)
fit([Devices(sys.argv[1], tell, readers=[Reader()])])
tell("alone")
fit([Devices(None, tell, readers=[Reader()])] if chief else [])
tell("done")
"""


@pytest.mark.slow
def test_workers_compare_without_waiting_for_one_that_has_no_monitor(run_workers, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    chief, other = (done.stdout.splitlines() for done in run_workers(2, [script, tmp_path]))
    both, alone = chief[: chief.index("alone")], chief[chief.index("alone") :]
    assert both[0] == "worker 0, epoch 1: GPU 0 95%"
    assert both[1].startswith("unequal work: worker 1 GPU 0 at 50%, worker 0 GPU 0 at 95%")
    assert both[2:] == ["worker 0, epoch 2: GPU 0 95%"]
    assert alone.count("no readings of worker 1: give `Devices` to every worker") == 1
    assert alone[-1] == "done"
    told = [f"worker 1, epoch {epoch}: GPU 0 50%" for epoch in (1, 2)]
    assert other == [*told, "alone", "done"]
    for index, percent in enumerate(("95.0", "50.0")):
        with open(tmp_path / f"devices_worker_{index}.csv") as file:
            assert [row["gpu_0_percent"] for row in csv.DictReader(file)] == [percent] * 2


# Weights & Biases and MLflow.

TRACKERS = {"wandb": WandbLogs, "mlflow": MlflowLogs}


@pytest.mark.parametrize("package", TRACKERS)
def test_a_missing_extra_says_what_to_install(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=rf"needs the package {package}.*tfmulti\[{package}\]"):
        TRACKERS[package]()


@pytest.mark.parametrize("package", TRACKERS)
def test_other_workers_track_nothing(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    callback = TRACKERS[package]()
    extended = types.SimpleNamespace(should_checkpoint=False)
    strategy = types.SimpleNamespace(extended=extended)
    callback.set_model(types.SimpleNamespace(distribute_strategy=strategy))
    # Without the package, beginning a run would be an ImportError.
    monkeypatch.setitem(sys.modules, package, None)
    callback.on_train_begin()
    callback.on_epoch_end(0, {"loss": 1.0})
    callback.on_train_end()


def fit_tracked(callback):
    strategy = create_strategy(2)
    data = create_data(strategy)
    callbacks = [Throughput(data), callback]
    return create_model(strategy).fit(data, epochs=3, verbose=0, callbacks=callbacks).history


def test_wandb_gets_every_epoch(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb: pip install 'tfmulti[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="theirs", dir=tmp_path) as run:
        history = fit_tracked(WandbLogs())
        assert wandb.run is run
        summary = dict(run.summary)
    assert summary["epoch/epoch"] == 2
    for name in ("loss", "examples_per_second"):
        assert summary[f"epoch/{name}"] == pytest.approx(history[name][-1])
    fit_tracked(WandbLogs("own", tmp_path / "new", {"epochs": 3}))
    assert wandb.run is None
    [files] = (tmp_path / "new" / "wandb").glob("offline-run-*")
    assert list(files.glob("run-*.wandb"))


def test_mlflow_gets_every_epoch(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install 'tfmulti[mlflow]'")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    history = fit_tracked(MlflowLogs("digits", tmp_path / "runs", {"epochs": 3, "seed": None}))
    assert mlflow.active_run() is None and not mlflow.is_tracking_uri_set()
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.status == "FINISHED"
    assert (run.data.params["epochs"], run.data.params["seed"]) == ("3", "None")
    for name in ("loss", "examples_per_second"):
        values = [metric.value for metric in client.get_metric_history(run.info.run_id, name)]
        assert values == pytest.approx(history[name])
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
