"""What the doctor says of GPUs, on output that others have published (nvidia_samples/README.md)."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tfmulti.doctor import cuda, gpus, links, nvidia
from tfmulti.doctor.nvidia import Driver, Gpu
from tfmulti.doctor.tensorflow_process import Output, Report

SAMPLES = Path(__file__).parent / "nvidia_samples"
WHEELS = [
    Requirement("nvidia-cuda-runtime-cu12<13.0,>=12.5.82"),
    Requirement("nvidia-cudnn-cu12<10.0,>=9.3.0.75"),
    Requirement("nvidia-nccl-cu12<3.0,>=2.27.7"),
]
BUILD = {"cuda_version": "12.5.1", "cudnn_version": "9", "is_cuda_build": "True"}
T4, A100 = "Tesla T4", "NVIDIA A100-SXM4-80GB"


@pytest.fixture(autouse=True)
def fresh_keras():
    """Instead of the one for tests with Keras: nothing here imports it."""


def sample(name):
    return (SAMPLES / name).read_text()


def report(num_gpus, words="", **build):
    seen = [{"name": f"/physical_device:GPU:{i}", "fault": ""} for i in range(num_gpus)]
    return Report({"gpus": seen, "build": {**BUILD, **build}}, words=words)


def driver(*devices, **facts):
    return Driver(tuple(devices), **{"version": "580.95.05", "cuda": "13.0", **facts})


def pair(**facts):
    return [Gpu(index, T4, memory_mib=15360, used_mib=3, **facts) for index in range(2)]


def test_every_sample_is_read_and_has_its_source():
    files = {path.name for path in SAMPLES.iterdir()} - {"README.md"}
    lines = [line for line in sample("README.md").splitlines() if "https://" in line]
    assert files == {line.split("`")[1] for line in lines}


@pytest.mark.parametrize(
    ("name", "versions"),
    [
        ("summary_rtx_3060.txt", ("580.95.05", "13.0")),
        ("summary_rtx_5090.txt", ("610.57.04", "13.3")),
    ],
)
def test_the_driver_and_its_cuda(name, versions):
    assert nvidia.parse_header(sample(name)) == versions


def test_a_query_of_all_fields():
    assert nvidia.parse_gpus(sample("query_rtx_2080_super.csv")) == [
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
            mig=None,
        )
    ]


def test_a_query_of_some_fields():
    found = nvidia.parse_gpus(sample("query_pcie_rtx_5060_ti.csv"))
    assert [(gpu.index, gpu.gen, gpu.gen_max, gpu.width, gpu.width_max) for gpu in found] == [
        (0, 1, 3, 4, 16),
        (1, 1, 3, 4, 16),
    ]
    assert [gpu.memory_mib for gpu in found] == [None, None]
    assert [gpu.mig for gpu in nvidia.parse_gpus(sample("query_mig_a100.csv"))] == ["Disabled"] * 2
    check = gpus.check_pcie(found)
    assert check.status == "warning"
    assert "GPU 1: generation 1 of 3, 4 of 16 lanes" in check.detail


def test_a_generation_that_is_low_while_idle_is_no_fault():
    check = gpus.check_pcie([Gpu(0, T4, gen=1, gen_max=4, width=16, width_max=16)])
    assert check.status == "ok"
    assert "idle" in check.detail


def test_the_driver_is_asked_for_less_where_it_does_not_know_a_field(tmp_path):
    asked = []

    def ask(command):
        asked.append(command)
        if len(command) == 1:
            return Output(sample("summary_rtx_3060.txt"), "", 0)
        if "mig.mode.current" in command[1]:
            fault = 'Field "mig.mode.current" is not a valid field to query.'
            return Output(fault, "", 2, fault)
        return Output(sample("query_rtx_2080_super.csv"), "", 0)

    found = nvidia.read_driver(ask, tmp_path)
    assert (len(found.gpus), found.cuda, found.fault, len(asked)) == (1, "13.0", "", 3)


def test_no_driver_and_no_gpu_is_unknown_and_a_gpu_without_a_driver_is_not(tmp_path):
    def ask(command):
        return Output(fault=f"there is no program {command[0]}")

    assert gpus.check_driver(nvidia.read_driver(ask, tmp_path)).status == "unknown"
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    check = gpus.check_driver(nvidia.read_driver(ask, tmp_path))
    assert check.status == "warning"
    assert "1 NVIDIA GPU on the PCI bus" in check.detail


def test_a_driver_that_does_not_answer_says_so(tmp_path):
    # https://github.com/lyulyul/shine-cluster/issues/30
    fault = "Failed to initialize NVML: Driver/library version mismatch"
    found = nvidia.read_driver(lambda command: Output("", "", 18, fault), tmp_path)
    check = gpus.check_driver(found)
    assert check.status == "warning"
    assert fault in check.detail
    assert "restart" in check.hint


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
    assert gpus.check_alike(pair(), {}).detail == "2 x Tesla T4 (15360 MiB)"
    mixed = [*pair(), Gpu(2, A100, memory_mib=81920)]
    check = gpus.check_alike(mixed, {})
    assert check.status == "warning"
    assert "CUDA_DEVICE_ORDER" in check.hint
    check = gpus.check_alike(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert "CUDA_DEVICE_ORDER" not in check.hint
    smaller = [Gpu(0, T4, memory_mib=16384), Gpu(1, T4, memory_mib=8192)]
    assert gpus.check_alike(smaller, {}).status == "warning"
    assert gpus.check_alike([], {}).status == "unknown"


def test_gpus_in_use_divided_or_for_one_process_warn():
    assert gpus.check_free(pair()).detail == "at least 15357 MiB free on each"
    used = [Gpu(0, T4, memory_mib=15360, used_mib=14000)]
    assert gpus.check_free(used).detail == "GPU 0: 14000 of 15360 MiB used"
    assert gpus.check_free([Gpu(0, T4)]).status == "unknown"
    assert gpus.check_modes(pair(compute_mode="Default", mig="Disabled")).status == "ok"
    for facts in ({"compute_mode": "Exclusive_Process"}, {"mig": "Enabled"}):
        assert gpus.check_modes(pair(**{"compute_mode": "Default", **facts})).status == "warning"
    assert gpus.check_modes(pair()).status == gpus.check_modes([]).status == "unknown"


def test_nvlink():
    text = sample("nvlink_a100.txt")
    assert links.parse_nvlink(text) == {0: [25.0] * 12, 1: [25.0] * 12}
    check = links.check_nvlink(Output(text, "", 0), 2)
    assert check.status == "ok"
    assert "GPU 1: 12 of 12 links, 300 GB/s" in check.detail
    lame = sample("nvlink_v100.txt")
    assert links.parse_nvlink(lame) == {3: [25.781, 25.781, 25.781, None, 25.781, None]}
    check = links.check_nvlink(Output(text + lame, "", 0), 3)
    assert check.status == "warning"
    assert "GPU 3: 4 of 6 links" in check.detail
    assert links.check_nvlink(Output("", "", 0), 2).status == "unknown"
    assert links.check_nvlink(None, 0).status == "unknown"


@pytest.mark.parametrize(
    ("name", "num_gpus", "paths", "status"),
    [
        ("topology_titan_x.txt", 4, {(0, 1): "PHB", (0, 2): "SYS", (2, 3): "PHB"}, "warning"),
        ("topology_two_nvlink.txt", 2, {(0, 1): "NV3"}, "ok"),
        ("topology_h100.txt", 8, {(0, 7): "NV18", (3, 4): "NV18"}, "ok"),
    ],
)
def test_topology(name, num_gpus, paths, status):
    # On a terminal nvidia-smi underlines the first line.
    for text in (sample(name), f"\x1b[4m{sample(name)}".replace("\n", "\x1b[0m\n", 1)):
        found = links.parse_topology(text)
        assert len(found) == num_gpus * (num_gpus - 1) // 2
        assert paths.items() <= found.items()
        check = links.check_topology(Output(text, "", 0), num_gpus)
        assert check.status == status
    if status == "warning":
        assert "CUDA_VISIBLE_DEVICES=0,1" in check.hint


@pytest.mark.parametrize(
    ("theirs", "status"), [("13.0", "ok"), ("12.5", "ok"), ("12.2", "warning"), ("11.8", "failure")]
)
def test_the_driver_must_know_the_cuda_of_tensorflow(theirs, status):
    check = cuda.check_driver_cuda(driver(*pair(), cuda=theirs), BUILD)
    assert (check.status, check.detail) == (
        status,
        f"{theirs}, TensorFlow is built for 12.5.1",
    )


def statuses(installed, library=lambda name: None, devices=()):
    found = cuda.check_cuda(driver(*devices), report(0), installed.get, WHEELS, library)
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
    asked = []
    found = statuses({}, lambda name: asked.append(name) or f"/usr/lib/{name}", pair())
    assert [found[name] for name in names[:3]] == ["ok"] * 3
    assert asked == ["libcudart.so.12", "libcudnn.so.9", "libnccl.so.2"]


def test_libraries_of_the_system_are_found_where_they_would_be_loaded_from(tmp_path):
    listed = Output("\tlibnccl.so.2 (libc6,x86-64) => /usr/lib/libnccl.so.2\n", "", 0)
    assert cuda.find_library("libnccl.so.2", {}, lambda _: listed) == "/usr/lib/libnccl.so.2"
    assert cuda.find_library("libnccl.so.3", {}, lambda _: listed) is None
    (tmp_path / "libnccl.so.2").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    found = cuda.find_library("libnccl.so.2", environ, lambda _: listed)
    assert found == str(tmp_path / "libnccl.so.2")
