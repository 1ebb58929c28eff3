"""The processor and the memory, the thread that reads devices, and what is told of them."""

import collections
import gc
import threading
import time
import types
import weakref

import psutil
import pytest
from monitored import Broken, Reader
from nvml_stand_in import Device, Nvml

from tfmulti import hardware


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


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
