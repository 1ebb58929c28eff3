"""Checks the GPUs of this host (visible, equal, free, well connected), CUDA, cuDNN and NCCL.

`hardware.gpus` reads what is checked here, and says on what it was tested.

Rules: a driver runs programs of its own CUDA major version and of earlier ones, see
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html; TensorFlow's
extra `and-cuda` names the libraries that it was tested with.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tfmulti.doctor.packages import VersionOf, requirements_of, unmet, version_of
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.doctor.tensorflow_process import TIMEOUT_S, Report
from tfmulti.hardware.gpus import Driver, Gpu, count_on_bus, find_visible, read_driver
from tfmulti.runtime import console, processes

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NONE_HERE = "no NVIDIA GPU here"
_WHEELS = "tensorflow[and-cuda]"
_BUSY = 0.1
_MEMORY_DIFFERENCE = 0.02
_PATHS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the processor's PCIe host bridge",
    "NODE": "several host bridges of one processor",
    "SYS": "the link between processors",
}


def query_driver(read=read_driver, timeout_s: float = TIMEOUT_S) -> Driver:
    """Returns the driver and its GPUs; its `fault` says why it could not be queried."""
    try:
        return processes.in_thread(read, timeout_s)
    except (TimeoutError, ImportError) as error:
        return Driver(fault=str(error), on_bus=count_on_bus())


def check_gpus(driver: Driver, report: Report, environ: Mapping[str, str]) -> list[Check]:
    """Checks the GPUs of this host."""
    indices, words = explain_visible(environ.get(VISIBLE), driver.gpus)
    return [
        check_driver(driver),
        check_visible(environ.get(VISIBLE), indices, words, len(driver.gpus)),
        check_tensorflow(driver, None if "MIG" in words else len(indices), report),
        check_computing(report),
        check_equal(driver.gpus, environ),
        check_free(driver.gpus),
        check_modes(driver.gpus),
        check_pcie(driver.gpus),
    ]


def check_driver(driver: Driver) -> Check:
    """Checks that the driver answers, and which GPUs it sees."""
    name = "GPUs of the driver"
    if driver.gpus:
        models = Counter(gpu.name for gpu in driver.gpus)
        text = ", ".join(f"{count} x {model}" for model, count in models.items())
        if driver.on_bus > len(driver.gpus):
            hint = "See `dmesg | grep -i nvrm`: a GPU has fallen off the bus, or is given away."
            return Check(name, WARNING, f"{text}; {driver.on_bus} are on the PCI bus", hint)
        return Check(name, OK, f"{text}, driver {driver.version}")
    if not driver.is_absent:
        hint = "Load the driver that fits its libraries: restart the host after an update of it."
        fault = driver.fault or "it sees no GPU"
        return Check(name, FAILURE if driver.on_bus else WARNING, f"the driver: {fault}", hint)
    if driver.on_bus:
        text = f"{console.count(driver.on_bus, 'NVIDIA GPU')} on the PCI bus, and {driver.fault}"
        hint = "Install NVIDIA's driver; in a container, start it with --gpus all."
        return Check(name, WARNING, text, hint)
    return Check(name, UNKNOWN, f"{_NONE_HERE}: {driver.fault}, and none is on the PCI bus")


def explain_visible(value: str | None, gpus: Sequence[Gpu]) -> tuple[list[int], str]:
    """Returns which GPUs a program gets, and an error in their list.

    Args:
        value: `CUDA_VISIBLE_DEVICES`, or None where it is not set.
        gpus: The GPUs of the driver.

    >>> pair = [Gpu(0, "A"), Gpu(1, "A")]
    >>> explain_visible(None, pair), explain_visible("MIG-1", pair)
    (([0, 1], ''), ([], 'parts of a GPU (MIG) are not followed here'))
    """
    chosen, fault = find_visible(value, [gpu.uuid for gpu in gpus])
    indices = list(itertools.takewhile(lambda each: isinstance(each, int), chosen))
    if len(indices) < len(chosen):
        return indices, "parts of a GPU (MIG) are not followed here"
    return indices, fault


def check_visible(value: str | None, indices: list[int], fault: str, count: int) -> Check:
    """Explains `CUDA_VISIBLE_DEVICES`."""
    if value is None:
        return Check(VISIBLE, OK, "not set: programs get every GPU of this host")
    text = f'"{value}": programs get {len(indices)} of {console.count(count, "GPU")}'
    if not count:
        return Check(VISIBLE, UNKNOWN, f'"{value}", and {_NONE_HERE}')
    if fault:
        numbers = f"numbers from 0 to {count - 1}, separated by commas" if count > 1 else "0"
        hint = f"Write {numbers}, or unset {VISIBLE}."
        return Check(VISIBLE, WARNING if indices or "MIG" in fault else FAILURE, fault, hint)
    if not indices:
        hint = f"Unset {VISIBLE} to train on GPUs."
        return Check(VISIBLE, WARNING, f"{text}: all are hidden", hint)
    return Check(VISIBLE, OK, f"{text}: {', '.join(map(str, indices))}")


def check_tensorflow(driver: Driver, expected: int | None, report: Report) -> Check:
    """Compares the GPUs that TensorFlow sees with those that it should see, if known."""
    name = "GPUs of TensorFlow"
    if report.facts is None:
        return Check(name, UNKNOWN, "TensorFlow could not be asked")
    seen = len(report.facts["gpus"])
    if expected is None:
        return Check(name, OK if seen else UNKNOWN, f"TensorFlow sees {seen}")
    text = f"TensorFlow sees {seen}, the driver offers {expected}"
    if not seen and not expected:
        return Check(name, OK, f"none, and {driver.fault or 'none is offered'}")
    if seen >= expected:
        return Check(name, OK, text)
    words = f"; it says: {report.words}" if report.words else ""
    if report.facts["build"].get("is_cuda_build") != "True":
        hint = "This TensorFlow is built without CUDA: pip install 'tensorflow[and-cuda]'."
    else:
        hint = "pip install 'tfmulti[gpu]' brings CUDA's libraries; see CUDA, cuDNN, NCCL below."
    return Check(name, FAILURE, f"{text}{words}", hint)


def check_computing(report: Report) -> Check:
    """Checks that TensorFlow has multiplied two matrices on each GPU."""
    name = "sum on each GPU"
    gpus = report.facts["gpus"] if report.facts else []
    if not gpus:
        return Check(name, UNKNOWN, "TensorFlow has no GPU to try")
    faults = [f"{gpu['name']}: {gpu['fault']}" for gpu in gpus if gpu["fault"]]
    if faults:
        hint = "Compare the GPU's compute capability with those that TensorFlow is built for."
        built = report.facts["build"].get("cuda_compute_capabilities", "unknown")
        return Check(name, FAILURE, f"{'; '.join(faults)} (built for {built})", hint)
    return Check(name, OK, f"{console.count(len(gpus), 'GPU')} computed the right result")


def check_equal(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Check:
    """Checks that all GPUs are of one model with the same memory."""
    name = "GPUs alike"
    if not gpus:
        return Check(name, UNKNOWN, _NONE_HERE)
    models = {gpu.name for gpu in gpus}
    sizes = [gpu.memory_mib for gpu in gpus if gpu.memory_mib]
    text = ", ".join(f"{gpu.index}: {gpu.name}{_memory(gpu)}" for gpu in gpus)
    unequal = sizes and max(sizes) - min(sizes) > _MEMORY_DIFFERENCE * max(sizes)
    if len(models) == 1 and not unequal:
        return Check(name, OK, f"{len(gpus)} x {gpus[0].name}{_memory(gpus[0])}")
    hint = f"The slowest sets the pace, the smallest the batch size: choose with {VISIBLE}."
    if len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        hint += " Set CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA else counts the fastest first."
    return Check(name, WARNING, text, hint)


def _memory(gpu) -> str:
    return f" ({gpu.memory_mib} MiB)" if gpu.memory_mib else ""


def check_free(gpus: Sequence[Gpu]) -> Check:
    """Checks whether other processes use the GPUs' memory."""
    name = "memory of the GPUs"
    known = [gpu for gpu in gpus if gpu.memory_mib and gpu.used_mib is not None]
    if not known:
        return Check(name, UNKNOWN, _NONE_HERE if not gpus else "the driver does not tell")
    used = [gpu for gpu in known if gpu.used_mib > _BUSY * gpu.memory_mib]
    if used:
        text = ", ".join(f"GPU {g.index}: {g.used_mib} of {g.memory_mib} MiB used" for g in used)
        return Check(name, WARNING, text, "See who uses it with nvidia-smi; end it, or wait.")
    least = min(gpu.memory_mib - gpu.used_mib for gpu in known)
    return Check(name, OK, f"at least {least} MiB free on each")


def check_modes(gpus: Sequence[Gpu]) -> Check:
    """Looks for GPUs in exclusive mode, or partitioned GPUs."""
    name = "modes of the GPUs"
    if not any(gpu.compute_mode for gpu in gpus):
        return Check(name, UNKNOWN, _NONE_HERE if not gpus else "the driver does not tell")
    odd = [
        f"GPU {gpu.index}: {gpu.compute_mode}"
        for gpu in gpus
        if gpu.compute_mode not in (None, "Default")
    ]
    odd += [f"GPU {gpu.index} is divided (MIG)" for gpu in gpus if gpu.is_divided]
    if odd:
        hint = "One process for each GPU, or `nvidia-smi -c DEFAULT`; NCCL needs whole GPUs."
        return Check(name, WARNING, ", ".join(odd), hint)
    return Check(name, OK, "shared and whole")


def check_pcie(gpus: Sequence[Gpu]) -> Check:
    """Compares each GPU's PCIe link with the best that it and its slot can have.

    An idle GPU lowers the generation to save power, but not the lanes.
    """
    name = "PCIe"
    known = [gpu for gpu in gpus if gpu.width and gpu.width_max]
    if not known:
        return Check(name, UNKNOWN, _NONE_HERE if not gpus else "the driver does not tell")
    links = [
        f"GPU {gpu.index}: generation {gpu.gen} of {gpu.gen_max}, {gpu.width} of "
        f"{gpu.width_max} lanes"
        for gpu in known
    ]
    text = "; ".join(links)
    if any(gpu.width < gpu.width_max for gpu in known):
        hint = "Put the GPU into a slot with all lanes, or reseat it; see the host's BIOS."
        return Check(name, WARNING, text, hint)
    slow = any(gpu.gen and gpu.gen_max and gpu.gen < gpu.gen_max for gpu in known)
    note = "; a lower generation is usual while idle: look again while training" if slow else ""
    return Check(name, OK, f"{text}{note}")


def check_nvlink(gpus: Sequence[Gpu]) -> Check:
    """Checks the NVLinks of all GPUs."""
    name = "NVLink"
    if not gpus:
        return Check(name, UNKNOWN, _NONE_HERE)
    # Of an unknown speed is not 0.0.
    active = [[speed for speed in gpu.nvlinks if speed != 0.0] for gpu in gpus]
    if not any(active):
        return Check(name, OK, "no GPU has an active link: they communicate over PCIe")
    text = "; ".join(
        f"GPU {gpu.index}: {len(speeds)} of {len(gpu.nvlinks)} links"
        + (f", {sum(speeds):g} GB/s" if None not in speeds else "")
        for gpu, speeds in zip(gpus, active)
    )
    # GPUs of one model may have unused links, the same on all of them.
    if len(set(map(tuple, active))) > 1:
        hint = "All GPUs should have the same links: reseat the bridge, or have it repaired."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def check_topology(driver: Driver) -> Check:
    """Checks the paths between all GPUs."""
    name, count = "topology of the GPUs", len(driver.gpus)
    if count < 2:
        return Check(name, OK, "one GPU") if count else Check(name, UNKNOWN, _NONE_HERE)
    if not driver.paths:
        return Check(name, UNKNOWN, "the driver does not tell")
    pairs = Counter(driver.paths.values())
    text = ", ".join(
        f"{console.count(n, 'pair')} over {_describe(path)}" for path, n in pairs.items()
    )
    if "SYS" in pairs:
        near = [str(index) for index in range(count) if driver.paths.get((0, index)) != "SYS"]
        hint = "Gradients cross between processors."
        if len(near) > 1:
            hint += f" With fewer GPUs use near ones: {VISIBLE}={','.join(near)}"
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def _describe(path) -> str:
    if path.startswith("NV"):
        return f"{path.removeprefix('NV')} NVLinks"
    return f"{_PATHS.get(path, 'a path unknown here')} ({path})"


def check_cuda(
    driver: Driver,
    report: Report,
    installed: VersionOf = version_of,
    wanted: Sequence[Requirement] | None = None,
    library: Callable[[str], str | None] | None = None,
) -> list[Check]:
    """Checks CUDA, cuDNN and NCCL.

    Args:
        driver: The driver.
        report: What TensorFlow said.
        installed: Returns the version of a package, or None.
        wanted: What TensorFlow's extra `and-cuda` needs; None asks TensorFlow.
        library: Returns where the system has a shared library of this file name, or None.
    """
    wanted = requirements_of("tensorflow", "and-cuda") if wanted is None else wanted
    library = find_library if library is None else library
    build = report.facts["build"] if report.facts else {}
    checks = [check_driver_cuda(driver, build)]
    for title, package, built, name in (
        ("CUDA", "nvidia-cuda-runtime", build.get("cuda_version", ""), "libcudart.so"),
        ("cuDNN", "nvidia-cudnn", build.get("cudnn_version", ""), "libcudnn.so"),
        ("NCCL", "nvidia-nccl", "", "libnccl.so"),
    ):
        mine = [each for each in wanted if each.name.startswith(package)]
        # The file name contains the major version.
        path = library(f"{name}.{built.split('.')[0] or 2}")
        checks.append(_check_library(title, mine, built, installed, driver, path, report))
    rest = [each for each in wanted if each.name.startswith("nvidia-")]
    if any(installed(each.name) for each in rest):
        faults = unmet(rest, installed)
        hint = f"pip install '{_WHEELS}' in an environment without other packages for CUDA."
        text = "; ".join(faults) or f"all {len(rest)} that {_WHEELS} wants"
        checks.append(
            Check("CUDA's packages", FAILURE if faults else OK, text, hint * bool(faults))
        )
    return checks


def check_driver_cuda(driver: Driver, build: dict) -> Check:
    """Compares the CUDA version that the driver can run with TensorFlow's."""
    name = "CUDA of the driver"
    built = build.get("cuda_version")
    if not driver.cuda:
        text = f"TensorFlow is built for CUDA {built}; " if built else ""
        return Check(name, UNKNOWN, f"{text}{driver.fault or 'the driver does not tell its own'}")
    if not built:
        return Check(name, UNKNOWN, f"{driver.cuda}; TensorFlow does not tell what it is built for")
    text = f"{driver.cuda}, TensorFlow is built for {built}"
    mine, needed = Version(driver.cuda), Version(built)
    if mine.major < needed.major:
        return Check(name, FAILURE, text, f"Install a driver for CUDA {needed.major} or newer.")
    if (mine.major, mine.minor) < (needed.major, needed.minor):
        hint = "A newer driver is better: with this one, GPUs that TensorFlow has no machine code "
        return Check(name, WARNING, text, f"{hint}for cannot be used.")
    return Check(name, OK, text)


def _check_library(title, wanted, built, installed, driver, path, report) -> Check:
    versions = {each.name: installed(each.name) for each in wanted}
    found = {name: version for name, version in versions.items() if version}
    text = f"TensorFlow is built for {built}; " if built else ""
    if found:
        words = ", ".join(f"{name} {version}" for name, version in found.items())
        faults = unmet(wanted, installed)
        if faults:
            hint = f"pip install '{_WHEELS}'"
            return Check(title, FAILURE, f"{text}{words} here, wanted {'; '.join(faults)}", hint)
        if path:
            words += f"; also {path}"
        return Check(title, OK, f"{text}{words} is installed")
    if path:
        return Check(title, OK if driver.gpus else UNKNOWN, f"{text}this system has {path}")
    if driver.gpus and check_computing(report).status == OK:
        # In a folder that is not searched here, such as conda's. The sums need no NCCL.
        where = "TensorFlow has found it elsewhere" if built else "not found here"
        return Check(title, OK if built else UNKNOWN, f"{text}{where}, and computes on each GPU")
    if driver.gpus:
        hint = f"pip install '{_WHEELS}'"
        return Check(title, FAILURE, f"{text}neither a package nor a library of the system", hint)
    return Check(title, UNKNOWN, f"{text}not installed, and no NVIDIA GPU here")


def list_libraries() -> str:
    """Returns the system's list of shared libraries; empty where it has none."""
    try:
        done = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def find_library(
    name: str,
    environ: Mapping[str, str] = os.environ,
    list_all: Callable[[], str] = list_libraries,
) -> str | None:
    """Returns where the system would load a shared library from, or None.

    Args:
        name: Its file name, such as `"libcudart.so.12"`.
        environ: The environment: folders in LD_LIBRARY_PATH come first.
        list_all: Returns the system's list.
    """
    for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(folder) / name).exists():
            return str(Path(folder) / name)
    for line in list_all().splitlines():
        if line.split()[:1] == [name] and "=>" in line:
            return line.rpartition("=>")[2].strip()
    return None
