"""The processor, the memory and the GPUs: how they are read, and what is told of them."""

import collections
import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import weakref

import psutil
import pytest
from monitored import Broken, Reader
from nvml_stand_in import (
    A100,
    LIBRARY,
    RTX_2080_SUPER,
    RTX_5060_TI,
    V100,
    Device,
    Nvml,
    NVMLError,
    NVMLError_LibraryNotFound,
    a100,
)

from tfmulti import hardware
from tfmulti.hardware.gpus import Driver, Gpu, read_driver


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
    broken, reader = Broken({}), Reader({"a": 1.0})
    sampler = hardware.Sampler([broken, reader], 1.0)
    assert sampler.take() == sampler.take() == {"a": 1.0}
    assert sampler.failures == ["Broken: OSError: the device has gone"]
    assert broken.closed and not reader.closed


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


# What NVML is asked of GPUs.


def two():
    return Nvml(
        Device(uuid="GPU-aaaa-1", memory_mib=10_000, used_mib=1000, percent=50),
        Device(uuid="GPU-bbbb-2", memory_mib=10_000, used_mib=2000, percent=51),
    )


@pytest.mark.parametrize(
    ("visible", "percents"),
    [
        (None, [50, 51]),
        ("1,0", [51, 50]),
        ("GPU-bbbb", [51]),
        ("1, GPU-aa,MIG-cccc-3", [51]),
        ("GPU-bb, GPU-AA,MIG-cccc-3", [51, 50, None]),
        ("GPU-bbbb-2,GPU-cc,0", [51]),
        ("GPU-bbbb-2,0", [51]),
        ("MIG-cccc-3,0", [None]),
        ("GPU-", []),
        ("gpu-aa", []),
        ("1;0", [51]),
        ("+1,0 1", [51, 50]),
        ("0,-1,1", [50]),
        ("0,0", []),
        ("5", []),
        ("", []),
        ("MIG-cccc-3", [None]),
        ("MIG-dddd-4", []),
    ],
)
def test_the_gpus_that_cuda_shows_are_read(visible, percents):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    gpus = hardware.Gpus(two(), environ)
    readings = gpus.read()
    assert len(gpus) == len(percents)
    assert [readings.get(f"gpu_{i}_percent") for i in range(len(percents))] == percents


def test_gpus_are_listed_by_their_names_for_all_time():
    shown = {"CUDA_VISIBLE_DEVICES": "GPU-bb,MIG-cccc-3"}
    assert hardware.list_uuids(two(), shown) == ["GPU-bbbb-2", "MIG-cccc-3"]
    assert hardware.list_uuids(two(), {}) == ["GPU-aaaa-1", "GPU-bbbb-2"]
    broken = Nvml(fault=NVMLError_LibraryNotFound("NVML Shared Library Not Found"))
    assert hardware.list_uuids(broken, {}) == []


def test_what_a_gpu_cannot_tell_is_left_out():
    readings = hardware.Gpus(two(), {"CUDA_VISIBLE_DEVICES": "GPU-aa,MIG-cccc-3"}).read()
    assert readings == {
        "gpu_0_percent": 50.0,
        "gpu_0_memory_gb": pytest.approx(1.048576),
        "gpu_0_memory_percent": 10.0,
        "gpu_0_watts": pytest.approx(100.0),
        "gpu_1_memory_gb": pytest.approx(8.388608),
        "gpu_1_memory_percent": 80.0,
    }


def test_all_that_a_gpu_tells(tmp_path):
    nvml = Nvml(RTX_2080_SUPER)
    assert read_driver(nvml, tmp_path) == Driver(
        gpus=(
            Gpu(
                index=0,
                name="NVIDIA GeForce RTX 2080 SUPER",
                uuid="GPU-df6e7a7c-7314-46f8-abc4-b88b36dcf3aa",
                memory_mib=8192,
                used_mib=876,
                gen=3,
                gen_max=3,
                width=16,
                width_max=16,
                compute_mode="Default",
            ),
        ),
        version="580.95.05",
        cuda="13.0",
    )
    assert not nvml.is_open


def test_links_of_gpus_and_of_their_slots():
    found = read_driver(Nvml(RTX_5060_TI, a100(0), V100, dataclasses.replace(V100, mode=3)))
    slot, links, lame, exclusive = found.gpus
    assert (slot.gen, slot.gen_max, slot.width, slot.width_max) == (1, 3, 4, 16)
    assert (slot.nvlinks, slot.is_divided, slot.compute_mode) == ((), None, "Default")
    assert (links.name, links.nvlinks, links.is_divided) == (A100, (25.0,) * 12, False)
    assert lame.nvlinks == (25.781, 25.781, 25.781, 0.0, 25.781, 0.0)
    assert exclusive.compute_mode == "Exclusive_Process"


# https://github.com/horovod/horovod/issues/969, https://github.com/NVIDIA/nccl/issues/557 and 1453
TITAN_X = [Device("TITAN X")] * 4
TITAN_LEVELS = {(i, j): 50 for i in (0, 1) for j in (2, 3)}
TWO_LINKED = [Device("Quadro", links=(1, 1, 1)), Device("Quadro", links=(0, 0, 0))]
H100 = [Device("H100", links=("switch",) * 18)] * 8


@pytest.mark.parametrize(
    ("devices", "levels", "paths"),
    [
        (TITAN_X, TITAN_LEVELS, {(0, 1): "PHB", (0, 2): "SYS", (2, 3): "PHB"}),
        (TWO_LINKED, {(0, 1): 50}, {(0, 1): "NV3"}),
        (H100, {}, {(0, 7): "NV18", (3, 4): "NV18"}),
        ([Device()] * 2, {(0, 1): 10}, {(0, 1): "PIX"}),
    ],
)
def test_the_paths_between_gpus(devices, levels, paths):
    found = read_driver(Nvml(*devices, levels=levels)).paths
    assert len(found) == len(devices) * (len(devices) - 1) // 2
    assert paths.items() <= found.items()


def test_without_a_driver_the_bus_is_asked(tmp_path):
    absent = Nvml(fault=NVMLError_LibraryNotFound("NVML Shared Library Not Found"))
    found = read_driver(absent, tmp_path)
    assert found == Driver(fault="NVML Shared Library Not Found", is_absent=True)
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert read_driver(absent, tmp_path).on_bus == 1
    # https://github.com/lyulyul/shine-cluster/issues/30
    fault = "Driver/library version mismatch"
    found = read_driver(Nvml(fault=NVMLError(fault)), tmp_path)
    assert (found.fault, found.is_absent, found.on_bus) == (fault, False, 1)


def ask_over_library(tmp_path, code, visible=None):
    """Runs code in a process in which the stand-in of the library takes the place of NVIDIA's."""
    (tmp_path / "nvml.c").write_text(LIBRARY)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    env |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", f"import json\nfrom tfmulti import hardware\n{code}"],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    return json.loads(done.stdout)


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@needs_compiler
@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("GPU-b,GPU-a", 2), ("1", 1)])
def test_nvidias_python_module_over_a_library_in_place_of_nvml(tmp_path, visible, count):
    code = """
readers, missing, no_gpu = hardware.find_readers()
print(json.dumps([readers[-1].read(), missing, no_gpu]))
readers[-1].close()
"""
    readings, missing, no_gpu = ask_over_library(tmp_path, code, visible)
    assert (missing, no_gpu) == (None, None)
    assert [readings[f"gpu_{i}_percent"] for i in range(count)] == [97.0] * count
    assert (readings["gpu_0_memory_gb"], readings["gpu_0_memory_percent"]) == (19.6, 24.5)
    with_power = [name for name in readings if name.endswith("watts")]
    assert with_power == {None: ["gpu_0_watts"], "GPU-b,GPU-a": ["gpu_1_watts"], "1": []}[visible]


@needs_compiler
def test_the_driver_is_read_over_a_library_in_place_of_nvml(tmp_path):
    code = """
import dataclasses
driver = hardware.read_driver()
paths = {f"{i} {j}": path for (i, j), path in driver.paths.items()}
print(json.dumps(dataclasses.asdict(dataclasses.replace(driver, paths=paths))))
"""
    found = ask_over_library(tmp_path, code)
    assert (found["version"], found["cuda"], found["fault"]) == ("610.57.04", "13.3", "")
    assert found["paths"] == {"0 1": "NV2"}
    assert found["gpus"][1] == {
        "index": 1,
        "name": "Tesla T4",
        "uuid": "GPU-bbbb",
        "memory_mib": 76293,
        "used_mib": 18692,
        "gen": 1,
        "gen_max": 4,
        "width": 8,
        "width_max": 16,
        "compute_mode": "Exclusive_Process",
        "is_divided": True,
        "nvlinks": [25.781, 25.781, 0.0],
    }


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a host without NVIDIA's driver")
def test_nvidias_python_module_without_a_driver():
    readers, missing, no_gpu = hardware.find_readers()
    assert [type(reader) for reader in readers] == [hardware.Processor]
    assert (missing, no_gpu) == (None, "NVML does not start: NVML Shared Library Not Found")
    assert hardware.read_driver().is_absent


def test_what_is_missing_is_said_and_the_rest_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    found, missing, no_gpu = hardware.find_readers(two(), {})
    assert [type(reader) for reader in found] == [hardware.Gpus]
    assert all(word in missing for word in ["no module named psutil", "tfmulti[monitor]"])
    assert no_gpu is None


def test_gpus_that_cannot_be_read_have_a_reason():
    broken = Nvml(fault=NVMLError("Driver Not Loaded"))
    found, _, no_gpu = hardware.find_readers(broken, {})
    assert [type(reader) for reader in found] == [hardware.Processor]
    assert no_gpu == "NVML does not start: Driver Not Loaded"
    hidden = hardware.find_readers(two(), {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden[2] == "NVML shows this process no GPU"
