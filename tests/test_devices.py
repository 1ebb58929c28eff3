"""Devices in training: what is told and written of them, and no reduction for it in the step."""

import csv
import threading

import numpy as np
import pytest
import tensorflow as tf
from monitored import Broken, Reader, create_data, create_model
from replicas import create_strategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tfmulti import hardware
from tfmulti.callbacks import Devices, Throughput
from tfmulti.train.config import TrainConfig
from tfmulti.train.loop import train_and_evaluate


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="`interval_s` must be above 0"):
        Devices(interval_s=0.0)


def test_no_thread_is_left_and_no_step_reduces_more(all_reduces):
    strategy, counts = create_strategy(2), []
    for monitored in (False, True):
        all_reduces.clear()
        data = create_data(strategy)
        callbacks = [Throughput(data), Devices(print_fn=lambda line: None)] if monitored else []
        create_model(strategy).fit(data, epochs=2, verbose=0, callbacks=callbacks)
        counts.append(len(all_reduces))
    assert counts[0] == counts[1] > 0
    assert hardware.Sampler.THREAD not in {thread.name for thread in threading.enumerate()}


WORKER = """
import sys
import keras, numpy as np
import tfmulti
from tfmulti.callbacks import Devices
from tfmulti import topology

strategy = tfmulti.create_strategy("multi_worker")
chief = topology.is_chief(strategy)

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
    chief, other = (text.splitlines() for text in run_workers(2, [script, tmp_path]))
    both, alone = chief[: chief.index("alone")], chief[chief.index("alone") :]
    assert both[0] == "worker 0, epoch 1: GPU 0 95%"
    assert both[1].startswith("unequal work: worker 1 GPU 0 at 50%, worker 0 GPU 0 at 95%")
    assert both[2:] == ["worker 0, epoch 2: GPU 0 95%"]
    assert alone.count("no readings from worker 1: pass `Devices` to `fit` on every worker") == 1
    assert alone[-1] == "done"
    told = [f"worker 1, epoch {epoch}: GPU 0 50%" for epoch in (1, 2)]
    assert other == [*told, "alone", "done"]
    for index, percent in enumerate(("95.0", "50.0")):
        with open(tmp_path / f"devices_worker_{index}.csv") as file:
            assert [row["gpu_0_percent"] for row in csv.DictReader(file)] == [percent] * 2
