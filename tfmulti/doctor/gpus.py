"""Checks the GPUs of this host: visible to driver and TensorFlow, equal, free, well connected.

Judged on what `nvidia` reads; see there for what that was tried on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tfmulti.doctor.nvidia import Driver, Gpu
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check, plural
from tfmulti.doctor.tensorflow_process import Report

VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_GPU = "no NVIDIA GPU here"
_BUSY = 0.1
_MEMORY_DIFFERENCE = 0.02


def check_gpus(driver: Driver, report: Report, environ: Mapping[str, str]) -> list[Check]:
    """Checks the GPUs of this host."""
    indices, words = explain_visible(environ.get(VISIBLE), driver.gpus)
    return [
        check_driver(driver),
        check_visible(environ.get(VISIBLE), indices, words, len(driver.gpus)),
        check_tensorflow(driver, None if "MIG" in words else len(indices), report),
        check_computing(report),
        check_alike(driver.gpus, environ),
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
        hint = "Load the driver that fits nvidia-smi: restart the host after an update of it."
        fault = driver.fault or "it sees no GPU"
        return Check(name, FAILURE if driver.on_bus else WARNING, f"nvidia-smi: {fault}", hint)
    if driver.on_bus:
        text = f"{plural(driver.on_bus, 'NVIDIA GPU')} on the PCI bus, and {driver.fault}"
        hint = "Install NVIDIA's driver; in a container, start it with --gpus all."
        return Check(name, WARNING, text, hint)
    return Check(name, UNKNOWN, f"{NO_GPU}: {driver.fault}, and none is on the PCI bus")


def explain_visible(value: str | None, gpus: Sequence[Gpu]) -> tuple[list[int], str]:
    """Returns which GPUs a program gets, and what is wrong with the list of them.

    CUDA reads the list up to the first entry that names no GPU, and silently ignores the rest;
    see https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables

    Args:
        value: `CUDA_VISIBLE_DEVICES`, or None where it is not set.
        gpus: The GPUs of the driver.

    >>> pair = [Gpu(0, "A"), Gpu(1, "A")]
    >>> explain_visible(None, pair), explain_visible("1,2", pair)
    (([0, 1], ''), ([1], '"2" names no GPU, so it and all after it are ignored'))
    """
    if value is None:
        return [gpu.index for gpu in gpus], ""
    chosen: list[int] = []
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    for entry in entries:
        found = [gpu.index for gpu in gpus if _names(entry, gpu)]
        if entry.startswith("MIG-"):
            return chosen, "parts of a GPU (MIG) are not followed here"
        if len(found) != 1:
            return chosen, f'"{entry}" names no GPU, so it and all after it are ignored'
        if found[0] in chosen:
            return [], f'"{entry}" comes twice, so CUDA gives no GPU at all'
        chosen += found
    return chosen, ""


def _names(entry, gpu) -> bool:
    if entry.startswith("GPU-"):
        return bool(gpu.uuid and gpu.uuid.startswith(entry))
    return entry.isdecimal() and int(entry) == gpu.index


def check_visible(value: str | None, indices: list[int], fault: str, count: int) -> Check:
    """Explains `CUDA_VISIBLE_DEVICES`."""
    if value is None:
        return Check(VISIBLE, OK, "not set: programs get every GPU of this host")
    text = f'"{value}": programs get {len(indices)} of {plural(count, "GPU")}'
    if not count:
        return Check(VISIBLE, UNKNOWN, f'"{value}", and {NO_GPU}')
    if fault:
        hint = f"Write numbers from 0 to {count - 1}, or unset {VISIBLE}."
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
    """Checks that each GPU of TensorFlow has multiplied two matrices."""
    name = "sum on each GPU"
    gpus = report.facts["gpus"] if report.facts else []
    if not gpus:
        return Check(name, UNKNOWN, "TensorFlow has no GPU to try")
    faults = [f"{gpu['name']}: {gpu['fault']}" for gpu in gpus if gpu["fault"]]
    if faults:
        hint = "Compare the GPU's compute capability with those that TensorFlow is built for."
        built = report.facts["build"].get("cuda_compute_capabilities", "unknown")
        return Check(name, FAILURE, f"{'; '.join(faults)} (built for {built})", hint)
    return Check(name, OK, f"{plural(len(gpus), 'GPU')} computed the right result")


def check_alike(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Check:
    """Checks that all GPUs are of one model with the same memory."""
    name = "GPUs alike"
    if not gpus:
        return Check(name, UNKNOWN, NO_GPU)
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
        return Check(name, UNKNOWN, NO_GPU if not gpus else "the driver does not tell")
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
        return Check(name, UNKNOWN, NO_GPU if not gpus else "the driver does not tell")
    odd = [
        f"GPU {gpu.index}: {gpu.compute_mode}"
        for gpu in gpus
        if gpu.compute_mode not in (None, "Default")
    ]
    odd += [f"GPU {gpu.index} is divided (MIG)" for gpu in gpus if gpu.mig == "Enabled"]
    if odd:
        hint = "One process for each GPU, or `nvidia-smi -c DEFAULT`; NCCL needs whole GPUs."
        return Check(name, WARNING, ", ".join(odd), hint)
    return Check(name, OK, "shared and whole")


def check_pcie(gpus: Sequence[Gpu]) -> Check:
    """Compares each GPU's PCIe link with the best that it and its slot can have.

    An idle GPU lowers the generation to save power, and not the lanes.
    """
    name = "PCIe"
    known = [gpu for gpu in gpus if gpu.width and gpu.width_max]
    if not known:
        return Check(name, UNKNOWN, NO_GPU if not gpus else "the driver does not tell")
    links = [
        f"GPU {gpu.index}: generation {gpu.gen} of {gpu.gen_max}, {gpu.width} of "
        f"{gpu.width_max} lanes"
        for gpu in known
    ]
    text = "; ".join(links)
    if any(gpu.width < gpu.width_max for gpu in known):
        hint = "Put the GPU into a slot with all lanes, or seat it anew; see the host's BIOS."
        return Check(name, WARNING, text, hint)
    slow = any(gpu.gen and gpu.gen_max and gpu.gen < gpu.gen_max for gpu in known)
    note = "; a lower generation is usual while idle: look again while training" if slow else ""
    return Check(name, OK, f"{text}{note}")
