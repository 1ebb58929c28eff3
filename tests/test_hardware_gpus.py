"""What NVML is asked of GPUs, and what is made of its answers."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest
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
from tfmulti.hardware.gpus import Driver, Gpu, find_visible, read_driver


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


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


def test_what_a_gpu_cannot_tell_is_left_out():
    readings = hardware.Gpus(two(), {"CUDA_VISIBLE_DEVICES": "0,MIG-cccc-3"}).read()
    assert readings == {
        "gpu_0_percent": 50.0,
        "gpu_0_memory_gb": pytest.approx(1.048576),
        "gpu_0_memory_percent": 10.0,
        "gpu_0_watts": pytest.approx(100.0),
        "gpu_1_memory_gb": pytest.approx(8.388608),
        "gpu_1_memory_percent": 80.0,
    }


def test_a_list_of_gpus_is_read_up_to_its_first_fault():
    uuids = ["GPU-99", "GPU-aa11", None]
    assert find_visible("2, GPU-aa,MIG-1", uuids) == ([2, 1, "MIG-1"], "")
    assert find_visible("GPU-99,GPU-cc,1", uuids)[0] == [0]
    assert find_visible("GPU-,1", ["GPU-99", "GPU-98"])[0] == []


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
@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("GPU-bbbb,0", 2), ("1", 1)])
def test_nvidias_python_module_over_a_library_in_place_of_nvml(tmp_path, visible, count):
    code = """
readers, missing, no_gpu = hardware.find_readers()
print(json.dumps([readers[-1].read(), missing, no_gpu]))
readers[-1].close()
"""
    readings, missing, no_gpu = ask_over_library(tmp_path, code, visible)
    assert (missing, no_gpu) == (None, None)
    assert [readings[f"gpu_{i}_percent"] for i in range(count)] == [97.0] * count
    assert (readings["gpu_0_memory_gb"], readings["gpu_0_memory_percent"]) == (20.0, 25.0)
    with_power = [name for name in readings if name.endswith("watts")]
    assert with_power == {None: ["gpu_0_watts"], "GPU-bbbb,0": ["gpu_1_watts"], "1": []}[visible]


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
        "used_mib": 19073,
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


def test_what_is_missing_is_said_and_the_rest_is_read():
    def load(name):
        raise ImportError(name)

    found, missing, no_gpu = hardware.find_readers(load, two(), {})
    assert [type(reader) for reader in found] == [hardware.Gpus]
    assert all(word in missing for word in ["no module named psutil", "tfmulti[monitor]"])
    assert no_gpu is None


def test_gpus_that_cannot_be_read_have_a_reason(monkeypatch):
    broken = Nvml(fault=NVMLError("Driver Not Loaded"))
    found, _, no_gpu = hardware.find_readers({"psutil": psutil}.__getitem__, broken, {})
    assert [type(reader) for reader in found] == [hardware.Processor]
    assert no_gpu == "NVML does not start: Driver Not Loaded"
    hidden = hardware.find_readers(lambda _: psutil, two(), {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden[2] == "NVML shows this process no GPU"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert hardware.find_readers()[2].endswith("pip install nvidia-ml-py")
