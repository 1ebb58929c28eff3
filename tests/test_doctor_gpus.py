"""What the doctor says of GPUs, of those that others have published (nvml_stand_in.py)."""

import dataclasses
import sys
import threading

import pytest
from nvml_stand_in import A100, RTX_5060_TI, V100, Nvml, a100
from packaging.requirements import Requirement

from tfmulti.doctor import gpus
from tfmulti.doctor.tensorflow_process import Report
from tfmulti.hardware.gpus import Driver, Gpu, read_driver

WHEELS = [
    Requirement("nvidia-cuda-runtime-cu12<13.0,>=12.5.82"),
    Requirement("nvidia-cudnn-cu12<10.0,>=9.3.0.75"),
    Requirement("nvidia-nccl-cu12<3.0,>=2.27.7"),
]
BUILD = {"cuda_version": "12.5.1", "cudnn_version": "9", "is_cuda_build": "True"}
T4 = "Tesla T4"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


def report(num_gpus, words="", **build):
    seen = [{"name": f"/physical_device:GPU:{i}", "fault": ""} for i in range(num_gpus)]
    return Report({"gpus": seen, "build": {**BUILD, **build}}, words=words)


def driver(*devices, **facts):
    return Driver(tuple(devices), **{"version": "580.95.05", "cuda": "13.0", **facts})


def pair(**facts):
    return [Gpu(index, T4, memory_mib=15360, used_mib=3, **facts) for index in range(2)]


def test_few_lanes_warn():
    check = gpus.check_pcie(read_driver(Nvml(RTX_5060_TI, RTX_5060_TI)).gpus)
    assert check.status == "warning"
    assert "GPU 1: generation 1 of 3, 4 of 16 lanes" in check.detail


def test_a_generation_that_is_low_while_idle_is_no_fault():
    check = gpus.check_pcie([Gpu(0, T4, gen=1, gen_max=4, width=16, width_max=16)])
    assert check.status == "ok"
    assert "idle" in check.detail


def test_no_driver_and_no_gpu_is_unknown_and_a_gpu_without_a_driver_is_not():
    absent = Driver(fault="NVML Shared Library Not Found", is_absent=True)
    assert gpus.check_driver(absent).status == "unknown"
    check = gpus.check_driver(dataclasses.replace(absent, on_bus=1))
    assert check.status == "warning"
    assert "1 NVIDIA GPU on the PCI bus" in check.detail


def test_a_driver_that_does_not_answer_says_so():
    # https://github.com/lyulyul/shine-cluster/issues/30
    check = gpus.check_driver(Driver(fault="Driver/library version mismatch"))
    assert check.status == "warning"
    assert "the driver: Driver/library version mismatch" in check.detail
    assert "restart" in check.hint
    never = threading.Event()
    found = gpus.query_driver(never.wait, 0.1)
    never.set()
    assert (found.gpus, found.fault) == ((), "no answer in 0.1 s")


def test_an_environment_without_nvidias_module_is_examined_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = gpus.query_driver()
    assert (found.gpus, "pynvml" in found.fault) == ((), True)


@pytest.mark.parametrize(
    ("value", "indices", "words"),
    [
        (None, [0, 1, 2], ""),
        ("", [], ""),
        ("0,2", [0, 2], ""),
        ("GPU-aa", [1], ""),
        ("-1", [], '"-1" names no GPU'),
        ("1,7,0", [1], '"7" names no GPU'),
        ("1,1", [], "comes twice"),
        ("GPU-bb,0", [2], '"0" is a number among names'),
        ("+0", [0], ""),
        ("0 2", [0], 'of "0 2" CUDA reads the first number only'),
        ("0,GPU-bb", [0], '"GPU-bb" is a name among numbers'),
        ("MIG-1", [], "MIG"),
    ],
)
def test_cuda_visible_devices_is_explained(value, indices, words):
    devices = [Gpu(0, T4, uuid="GPU-99"), Gpu(1, T4, uuid="GPU-aa11"), Gpu(2, T4, uuid="GPU-bb")]
    chosen, fault = gpus.explain_visible(value, devices)
    assert chosen == indices
    assert words in fault
    check = gpus.check_visible(value, chosen, fault, 3)
    assert bool(check.hint) == (check.status != "ok") == (bool(fault) or not indices)


def test_gpus_that_tensorflow_does_not_see_are_a_failure_with_its_own_words():
    words = "gpu_device.cc:2343] Cannot dlopen some GPU libraries."
    check = gpus.check_tensorflow(driver(*pair()), 2, report(0, words))
    assert (check.status, check.detail) == (
        "failure",
        f"TensorFlow sees 0, the driver offers 2; it says: {words}",
    )
    assert "tfmulti[gpu]" in check.hint
    check = gpus.check_tensorflow(driver(*pair()), 2, report(0, is_cuda_build="False"))
    assert "tensorflow[and-cuda]" in check.hint
    assert gpus.check_tensorflow(driver(*pair()), 2, report(2)).status == "ok"
    divided = gpus.check_gpus(driver(*pair()), report(1), {gpus.VISIBLE: "MIG-1"})
    assert {check.name: check.status for check in divided}["GPUs of TensorFlow"] == "ok"
    assert gpus.check_tensorflow(driver(*pair()), 2, Report(None, "died")).status == "unknown"


def test_a_gpu_that_computes_nothing_is_a_failure():
    found = report(2, cuda_compute_capabilities="['sm_60', 'compute_90']")
    assert gpus.check_computing(found).status == "ok"
    found.facts["gpus"][1]["fault"] = "InvalidArgumentError: no kernel image is available"
    check = gpus.check_computing(found)
    assert check.status == "failure"
    assert "GPU:1: InvalidArgumentError" in check.detail
    assert "sm_60" in check.detail
    assert gpus.check_computing(report(0)).status == "unknown"


def test_unlike_gpus_warn():
    assert gpus.check_equal(pair(), {}).detail == "2 x Tesla T4 (15360 MiB)"
    mixed = [*pair(), Gpu(2, A100, memory_mib=81920)]
    check = gpus.check_equal(mixed, {})
    assert check.status == "warning"
    assert "CUDA_DEVICE_ORDER" in check.hint
    check = gpus.check_equal(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert "CUDA_DEVICE_ORDER" not in check.hint
    smaller = [Gpu(0, T4, memory_mib=16384), Gpu(1, T4, memory_mib=8192)]
    assert gpus.check_equal(smaller, {}).status == "warning"
    assert gpus.check_equal([], {}).status == "unknown"


def test_gpus_in_use_divided_or_for_one_process_warn():
    assert gpus.check_free(pair()).detail == "at least 15357 MiB free on each"
    used = [Gpu(0, T4, memory_mib=15360, used_mib=14000)]
    assert gpus.check_free(used).detail == "GPU 0: 14000 of 15360 MiB used"
    assert gpus.check_free([Gpu(0, T4)]).status == "unknown"
    assert gpus.check_modes(pair(compute_mode="Default", is_divided=False)).status == "ok"
    for facts in ({"compute_mode": "Exclusive_Process"}, {"is_divided": True}):
        assert gpus.check_modes(pair(**{"compute_mode": "Default", **facts})).status == "warning"
    assert gpus.check_modes(pair()).status == gpus.check_modes([]).status == "unknown"


def test_nvlinks_are_counted_and_compared():
    check = gpus.check_nvlink(read_driver(Nvml(a100(1), a100(0))).gpus)
    assert check.status == "ok"
    assert "GPU 1: 12 of 12 links, 300 GB/s" in check.detail
    check = gpus.check_nvlink(read_driver(Nvml(a100(1), a100(0), V100)).gpus)
    assert check.status == "warning"
    assert "GPU 2: 4 of 6 links, 103.124 GB/s" in check.detail
    unknown = gpus.check_nvlink([Gpu(0, T4, nvlinks=(None, 0.0))])
    assert (unknown.status, unknown.detail) == ("ok", "GPU 0: 1 of 2 links")
    assert "over PCIe" in gpus.check_nvlink(pair()).detail
    assert gpus.check_nvlink([]).status == "unknown"


def test_pairs_of_gpus_over_the_processors_link_warn():
    far = {(i, j): "SYS" for i in (0, 1) for j in (2, 3)} | {(0, 1): "PHB", (2, 3): "PHB"}
    check = gpus.check_topology(driver(*pair(), *pair(), paths=far))
    assert check.status == "warning"
    assert "4 pairs over the link between processors (SYS)" in check.detail
    assert "CUDA_VISIBLE_DEVICES=0,1" in check.hint
    near = gpus.check_topology(driver(*pair(), paths={(0, 1): "NV18"}))
    assert (near.status, near.detail) == ("ok", "1 pair over 18 NVLinks")
    assert gpus.check_topology(driver(*pair())).status == "unknown"
    assert gpus.check_topology(driver(pair()[0])).detail == "one GPU"
    assert gpus.check_topology(driver()).status == "unknown"


@pytest.mark.parametrize(
    ("theirs", "status"), [("13.0", "ok"), ("12.5", "ok"), ("12.2", "warning"), ("11.8", "failure")]
)
def test_the_driver_must_know_the_cuda_of_tensorflow(theirs, status):
    check = gpus.check_driver_cuda(driver(*pair(), cuda=theirs), BUILD)
    assert (check.status, check.detail) == (
        status,
        f"{theirs}, TensorFlow is built for 12.5.1",
    )


def statuses(installed, library=lambda name: None, devices=(), said=None):
    said = said or report(0)
    found = gpus.check_cuda(driver(*devices), said, installed.get, WHEELS, library)
    return {check.name: check.status for check in found}


def test_cuda_cudnn_and_nccl_must_be_those_that_tensorflow_wants():
    good = {
        "nvidia-cuda-runtime-cu12": "12.9.79",
        "nvidia-cudnn-cu12": "9.10.2.21",
        "nvidia-nccl-cu12": "2.27.7",
    }
    names = ("CUDA", "cuDNN", "NCCL", "CUDA's packages")
    assert all(statuses(good)[name] == "ok" for name in names)
    old = {**good, "nvidia-cudnn-cu12": "8.9.7.29"}
    assert statuses(old)["cuDNN"] == statuses(old)["CUDA's packages"] == "failure"
    assert [statuses({})[name] for name in names[:3]] == ["unknown"] * 3
    assert [statuses({}, devices=pair())[name] for name in names[:3]] == ["failure"] * 3
    found = statuses({}, devices=pair(), said=report(2))
    assert [found[name] for name in names[:3]] == ["ok", "ok", "unknown"]
    faulty = report(2)
    faulty.facts["gpus"][1]["fault"] = "no kernel image"
    assert statuses({}, devices=pair(), said=faulty)["CUDA"] == "failure"
    asked = []
    found = statuses({}, lambda name: asked.append(name) or f"/usr/lib/{name}", pair())
    assert [found[name] for name in names[:3]] == ["ok"] * 3
    assert asked == ["libcudart.so.12", "libcudnn.so.9", "libnccl.so.2"]


def test_libraries_of_the_system_are_found_where_they_would_be_loaded_from(tmp_path):
    listed = "\tlibnccl.so.2 (libc6,x86-64) => /usr/lib/libnccl.so.2\n"
    assert gpus.find_library("libnccl.so.2", {}, lambda: listed) == "/usr/lib/libnccl.so.2"
    assert gpus.find_library("libnccl.so.3", {}, lambda: listed) is None
    (tmp_path / "libnccl.so.2").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    found = gpus.find_library("libnccl.so.2", environ, lambda: listed)
    assert found == str(tmp_path / "libnccl.so.2")
