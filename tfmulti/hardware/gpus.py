"""NVIDIA's GPUs, by NVML."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
