"""Finds out what can be read on this host."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping

from tfmulti.hardware.gpus import Gpus
from tfmulti.hardware.processor import Processor

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
