"""What can be read on this host: processor and memory by psutil, NVIDIA's GPUs by NVML."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Mapping

_GB = 1e9
_MILLI = 1e-3


class Gpus:
    """Reads the GPUs that this process may use.

    NVML knows all GPUs of the host, and CUDA_VISIBLE_DEVICES chooses among them. NVML numbers
    them by PCI bus, CUDA by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID: with unlike GPUs set that.

    Tried with nvidia-ml-py 13 where there is no driver, and over a library written for the tests
    in place of NVIDIA's. Not tried on a real GPU.

    Args:
        nvml: The module `pynvml` of nvidia-ml-py, or something like it.
        environ: The variables of the environment.

    Raises:
        nvml.NVMLError: Where NVML does not start, as without a driver.
    """

    def __init__(self, nvml, environ: Mapping[str, str] = os.environ):
        self._nvml = nvml
        nvml.nvmlInit()
        self._handles = self._choose(environ.get("CUDA_VISIBLE_DEVICES"))

    def __len__(self):
        return len(self._handles)

    def read(self) -> dict[str, float]:
        """Returns what each GPU is doing; what one cannot tell is left out.

        Returns:
            For GPU 0, as TensorFlow numbers them: `gpu_0_percent`, of the time since NVML's last
            sample (a sixth of a second to a second) in which a kernel ran; `gpu_0_memory_gb` in
            1e9 bytes and `gpu_0_memory_percent`, of all processes; `gpu_0_watts`.
            Source: NVML API reference, nvmlUtilization_t, nvmlDeviceGetPowerUsage.
        """
        found: dict[str, float] = {}
        for number, handle in enumerate(self._handles):
            for name, value in self._read_one(handle).items():
                found[f"gpu_{number}_{name}"] = value
        return found

    def close(self) -> None:
        """Ends NVML."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            # It has ended already.
            return

    def _read_one(self, handle) -> dict[str, float]:
        nvml, found = self._nvml, {}
        utilization = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        if utilization is not None:
            found["percent"] = float(utilization.gpu)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is not None:
            found["memory_gb"] = memory.used / _GB
            found["memory_percent"] = 100.0 * memory.used / memory.total
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        if milliwatts is not None:
            found["watts"] = milliwatts * _MILLI
        return found

    def _ask(self, function, handle):
        try:
            return function(handle)
        except self._nvml.NVMLError:
            # Of a part of a GPU (MIG), or of an older one, not everything can be read.
            return None

    def _choose(self, visible: str | None) -> list:
        """Returns the handles of the GPUs that CUDA shows this process, in its order.

        Source: CUDA programming guide, environment variables: what follows a number or name that
        does not exist is not shown either.
        """
        handle_of = self._nvml.nvmlDeviceGetHandleByIndex
        handles = [handle_of(number) for number in range(self._nvml.nvmlDeviceGetCount())]
        if visible is None:
            return handles
        chosen = []
        for part in (part.strip() for part in visible.split(",")):
            handle = self._find(part, handles)
            if handle is None:
                break
            chosen.append(handle)
        return chosen

    def _find(self, part, handles):
        if part.isdecimal():
            return handles[int(part)] if int(part) < len(handles) else None
        if part.startswith("MIG-"):
            return self._ask(self._nvml.nvmlDeviceGetHandleByUUID, part)
        if part.startswith("GPU-"):
            # CUDA takes the beginning of a name, too.
            names = [self._ask(self._nvml.nvmlDeviceGetUUID, handle) or "" for handle in handles]
            return next((h for h, name in zip(handles, names) if name.startswith(part)), None)
        return None


class Processor:
    """Reads the host's processor and memory, and what this process takes of them.

    Args:
        psutil: The module, or something like it.
        clock: Returns seconds.
    """

    def __init__(self, psutil, clock: Callable[[], float] = time.monotonic):
        self._psutil, self._clock = psutil, clock
        self._process = psutil.Process()
        self._last = self._counters()

    def read(self) -> dict[str, float]:
        """Returns what was used since the last call, or since this object was made.

        Returns:
            `cpu_percent`, of all cores of the host, whoever uses them; `memory_percent`, of the
            host's memory; `process_cores`, the cores that this process kept busy (1.0 is one
            core); `process_memory_gb`, its resident memory in 1e9 bytes. A container's limits
            are not looked at.
        """
        before, self._last = self._last, self._counters()
        busy, total, own, seconds = (now - then for now, then in zip(self._last, before))
        found = {
            "memory_percent": float(self._psutil.virtual_memory().percent),
            "process_memory_gb": self._process.memory_info().rss / _GB,
        }
        if total > 0:
            found["cpu_percent"] = 100.0 * min(1.0, max(0.0, busy / total))
        if seconds > 0:
            found["process_cores"] = max(0.0, own / seconds)
        return found

    def close(self) -> None:
        """Has nothing to close."""

    def _counters(self) -> tuple[float, float, float, float]:
        """Seconds: of busy cores, of all cores, of this process, of the clock."""
        times, own = self._psutil.cpu_times(), self._process.cpu_times()
        # What guests use is in the user's time already.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return total - idle, total, own.user + own.system, self._clock()


_PACKAGES = {"psutil": "psutil", "pynvml": "nvidia-ml-py"}


def find_readers(
    load: Callable[[str], object] = importlib.import_module,
    environ: Mapping[str, str] = os.environ,
) -> tuple[list, str | None, str | None]:
    """Opens what reads this host's devices.

    Args:
        load: Imports a module by its name.
        environ: The variables of the environment.

    Returns:
        The readers, each with `read()` and `close()`; a message where packages are missing, or
        None; and why no GPU is read, or None.
    """
    modules, missing = {}, []
    for name in _PACKAGES:
        try:
            modules[name] = load(name)
        except ImportError:
            missing.append(name)
    readers, no_gpu = [], None
    if "psutil" in modules:
        readers.append(Processor(modules["psutil"]))
    if "pynvml" in modules:
        gpus, no_gpu = _open_gpus(modules["pynvml"], environ)
        readers += [] if gpus is None else [gpus]
    return readers, _describe_missing(missing), no_gpu


def _open_gpus(nvml, environ) -> tuple[Gpus | None, str | None]:
    try:
        gpus = Gpus(nvml, environ)
    except nvml.NVMLError as error:
        return None, f"NVML does not start: {error}"
    if len(gpus):
        return gpus, None
    gpus.close()
    return None, "NVML shows this process no GPU"


def _describe_missing(missing) -> str | None:
    if not missing:
        return None
    packages = " and ".join(_PACKAGES[name] for name in missing)
    return (
        "Processor and memory are read by psutil, and GPUs by nvidia-ml-py. "
        f"Received: no module named {' and '.join(missing)}, so without {packages}. "
        "pip install 'tfmulti[monitor]'"
    )
