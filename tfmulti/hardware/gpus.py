"""Reads NVIDIA's GPUs by NVML (nvidia-ml-py): what they are, how they are joined, what they do.

Tried without a driver, over a library that takes the place of NVIDIA's in the tests, and on one
H200 (`tests/test_real_gpu.py`); not tried on a host with several GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmulti.cluster import gpus

_GB, _MIB, _MILLI = 1e9, 1 << 20, 1e-3
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
# As `nvidia-smi topo -m` names them, which the documentation of NCCL does too.
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_MOST_LINKS = 36


def load_nvml():
    """Imports NVIDIA's Python module for NVML."""
    import pynvml

    return pynvml


def find_visible(value: str | None, uuids: Sequence[str | None]) -> tuple[list[int | str], str]:
    """Returns which GPUs CUDA shows a program, in its order, and an error in the list.

    CUDA numbers by speed, and NVML by PCI bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID: with unlike
    GPUs set that.

    Args:
        value: `CUDA_VISIBLE_DEVICES`, or None where it is not set.
        uuids: The UUID of each GPU of the host, None where unknown.

    Returns:
        Positions in `uuids`, and the names of parts of GPUs (`MIG-...`) as they are written; and
        the fault, empty where there is none.

    >>> find_visible(None, ["GPU-a", "GPU-b"]), find_visible("GPU-b", ["GPU-a", "GPU-b"])
    (([0, 1], ''), ([1], ''))
    >>> find_visible("1,2", ["GPU-a", "GPU-b"])
    ([1], '"2" names no GPU, so it and all after it are ignored')
    """
    if value is None:
        return list(range(len(uuids))), ""
    return gpus.read_list(value, lambda entry: _find(entry, uuids))


def _find(entry, uuids) -> int | str | None:
    if entry.startswith("MIG-"):
        return entry
    if not gpus.is_name(entry):
        return int(entry) if int(entry) < len(uuids) else None
    # CUDA takes the beginning of a name, too, in capital letters or small ones.
    start = entry.removeprefix("GPU-").lower()
    ends = [(uuid or "").removeprefix("GPU-").lower() for uuid in uuids]
    found = [index for index, end in enumerate(ends) if start and end.startswith(start)]
    return found[0] if len(found) == 1 else None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it; None for unknown values.

    Attributes:
        index: Its number in the order of the bus.
        name: The model.
        uuid: Its name for all time, `GPU-...`.
        memory_mib: Memory, in MiB.
        used_mib: Memory in use, in MiB.
        gen: Generation of its PCIe link now.
        gen_max: The highest generation that the GPU and its slot can have.
        width: Lanes of its PCIe link now.
        width_max: The most lanes that the GPU and its slot can have.
        compute_mode: Who may use it, such as `"Default"` or `"Exclusive_Process"`.
        is_divided: Whether it is divided into parts (MIG).
        nvlinks: GB/s of each of its NVLinks, 0.0 for an inactive one, None for an unknown speed.
    """

    index: int
    name: str
    uuid: str | None = None
    memory_mib: int | None = None
    used_mib: int | None = None
    gen: int | None = None
    gen_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    compute_mode: str | None = None
    is_divided: bool | None = None
    nvlinks: tuple[float | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Driver:
    """The driver and its GPUs.

    Attributes:
        gpus: The GPUs, in the order of the bus.
        version: The driver's version, or None.
        cuda: The highest CUDA version that it can run, or None.
        fault: Why NVML gave no answer; empty where it did.
        is_absent: Whether there is no NVML at all.
        on_bus: NVIDIA GPUs on the PCI bus, with or without a driver.
        paths: How each two GPUs reach one another, such as `{(0, 1): "NV12"}`.
    """

    gpus: tuple[Gpu, ...] = ()
    version: str | None = None
    cuda: str | None = None
    fault: str = ""
    is_absent: bool = False
    on_bus: int = 0
    paths: Mapping[tuple[int, int], str] = dataclasses.field(default_factory=dict)


class _Nvml:
    """NVML, with None for values that it lacks, such as those of an old GPU."""

    def __init__(self, nvml):
        nvml.nvmlInit()
        self.module = nvml
        get = nvml.nvmlDeviceGetHandleByIndex
        self.handles = [get(number) for number in range(nvml.nvmlDeviceGetCount())]
        self.uuids = [self.query("nvmlDeviceGetUUID", handle) for handle in self.handles]

    def query(self, name, *arguments):
        try:
            return getattr(self.module, name)(*arguments)
        except self.module.NVMLError:
            return None

    def memory(self, handle):
        """Memory as nvidia-smi shows it: what the driver keeps is not used, where it tells that."""
        version = getattr(self.module, "nvmlMemory_v2", None)
        found = version and self.query("nvmlDeviceGetMemoryInfo", handle, version)
        return found or self.query("nvmlDeviceGetMemoryInfo", handle)

    def close(self) -> None:
        """Ends NVML, if it has not ended already."""
        self.query("nvmlShutdown")


def read_driver(nvml=None, root: Path = Path("/")) -> Driver:
    """Queries the driver about itself and its GPUs.

    Args:
        nvml: The module `pynvml`, or something like it.
        root: The root of the file system.
    """
    nvml, on_bus = nvml or load_nvml(), count_on_bus(root)
    try:
        host = _Nvml(nvml)
    except nvml.NVMLError as error:
        is_absent = isinstance(error, nvml.NVMLError_LibraryNotFound)
        return Driver(fault=str(error), is_absent=is_absent, on_bus=on_bus)
    with contextlib.closing(host):
        number = host.query("nvmlSystemGetCudaDriverVersion")
        return Driver(
            gpus=tuple(_describe(host, index) for index in range(len(host.handles))),
            version=host.query("nvmlSystemGetDriverVersion"),
            # 12050 is 12.5.
            cuda=f"{number // 1000}.{number % 1000 // 10}" if number else None,
            on_bus=on_bus,
            paths=_read_paths(host),
        )


def list_uuids(nvml=None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the UUIDs of the GPUs that this process may use; `[]` without NVML.

    Parts of one GPU (MIG) have UUIDs of their own.

    Args:
        nvml: The module `pynvml`, or something like it.
        environ: The variables of the environment.
    """
    nvml = nvml or load_nvml()
    try:
        host = _Nvml(nvml)
    except nvml.NVMLError:
        return []
    with contextlib.closing(host):
        visible, _ = find_visible(environ.get("CUDA_VISIBLE_DEVICES"), host.uuids)
        found = [each if isinstance(each, str) else host.uuids[each] for each in visible]
    return [uuid for uuid in found if uuid]


def count_on_bus(root: Path = Path("/")) -> int:
    """Returns the number of NVIDIA's display and compute controllers on the PCI bus."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count


def _describe(host, index) -> Gpu:
    def query(name):
        return host.query(f"nvmlDeviceGet{name}", host.handles[index])

    memory = host.memory(host.handles[index])
    mode, divided = query("ComputeMode"), query("MigMode")
    return Gpu(
        index=index,
        name=query("Name") or "GPU",
        uuid=host.uuids[index],
        memory_mib=None if memory is None else memory.total // _MIB,
        used_mib=None if memory is None else memory.used // _MIB,
        gen=query("CurrPcieLinkGeneration"),
        gen_max=query("MaxPcieLinkGeneration"),
        width=query("CurrPcieLinkWidth"),
        width_max=query("MaxPcieLinkWidth"),
        compute_mode=_MODES.get(mode),
        is_divided=None if divided is None else bool(divided[0]),
        nvlinks=tuple(_read_links(host, host.handles[index])),
    )


def _read_links(host, handle):
    field = getattr(host.module, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", None)
    found = None if field is None else host.query("nvmlDeviceGetFieldValues", handle, [field])
    speed = found[0].value.uiVal * _MILLI if found and found[0].nvmlReturn == 0 else None
    for link in range(_MOST_LINKS):
        active = host.query("nvmlDeviceGetNvLinkState", handle, link)
        if active is None:
            return
        yield speed if active else 0.0


def _read_paths(host) -> dict[tuple[int, int], str]:
    buses = [host.query("nvmlDeviceGetPciInfo", handle) for handle in host.handles]
    paths = {}
    for first in range(len(host.handles)):
        ends = _read_ends(host, host.handles[first])
        for second in range(first + 1, len(host.handles)):
            # Every GPU is behind a switch.
            bus = buses[second].busId if buses[second] is not None else None
            links = sum(end in (bus, "switch") for end in ends)
            pair = host.handles[first], host.handles[second]
            level = _PATHS.get(host.query("nvmlDeviceGetTopologyCommonAncestor", *pair))
            path = f"NV{links}" if links else level
            if path is not None:
                paths[first, second] = path
    return paths


def _read_ends(host, handle) -> list:
    """Returns where each active NVLink of a GPU ends: a PCI bus address, or `"switch"`."""
    ends = []
    for link in range(_MOST_LINKS):
        if not host.query("nvmlDeviceGetNvLinkState", handle, link):
            continue
        kind = host.query("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        remote = host.query("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        if kind == host.module.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends.append("switch")
        elif remote is not None:
            ends.append(remote.busId)
    return ends


class Gpus:
    """Reads what the GPUs that this process may use are doing.

    Args:
        nvml: The module `pynvml` of nvidia-ml-py, or something like it.
        environ: The variables of the environment.

    Raises:
        nvml.NVMLError: Where NVML does not start, as without a driver.
    """

    def __init__(self, nvml=None, environ: Mapping[str, str] = os.environ):
        self._host = _Nvml(nvml or load_nvml())
        self._handles = []
        for each in find_visible(environ.get("CUDA_VISIBLE_DEVICES"), self._host.uuids)[0]:
            if isinstance(each, str):
                handle = self._host.query("nvmlDeviceGetHandleByUUID", each)
            else:
                handle = self._host.handles[each]
            if handle is None:
                break
            self._handles.append(handle)

    def __len__(self):
        return len(self._handles)

    def read(self) -> dict[str, float]:
        """Returns the readings of each GPU, without unavailable ones.

        Returns:
            For GPU 0, as TensorFlow numbers them: `gpu_0_percent`, of the time since NVML's last
            sample (a sixth of a second to a second) in which a kernel ran; `gpu_0_memory_gb` in
            1e9 bytes and `gpu_0_memory_percent`, of all processes without the driver's own;
            `gpu_0_watts`.
            Source: NVML API reference, nvmlUtilization_t, nvmlDeviceGetPowerUsage.
        """
        found: dict[str, float] = {}
        for number, handle in enumerate(self._handles):
            utilization = self._host.query("nvmlDeviceGetUtilizationRates", handle)
            if utilization is not None:
                found[f"gpu_{number}_percent"] = float(utilization.gpu)
            memory = self._host.memory(handle)
            if memory is not None:
                found[f"gpu_{number}_memory_gb"] = memory.used / _GB
                found[f"gpu_{number}_memory_percent"] = 100.0 * memory.used / memory.total
            milliwatts = self._host.query("nvmlDeviceGetPowerUsage", handle)
            if milliwatts is not None:
                found[f"gpu_{number}_watts"] = milliwatts * _MILLI
        return found

    def close(self) -> None:
        """Ends NVML."""
        self._host.close()
