"""Checks CUDA, cuDNN and NCCL: the versions of TensorFlow's build, the installation, the driver.

Rules: a driver runs programs of its own CUDA major version and of earlier ones, see
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html; TensorFlow's
extra `and-cuda` names the libraries that it was tested with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tfmulti.doctor.packages import VersionOf, requirements_of, unmet, version_of
from tfmulti.doctor.report import FAILURE, OK, UNKNOWN, WARNING, Check
from tfmulti.doctor.tensorflow_process import Report, run
from tfmulti.hardware.gpus import Driver

_WHEELS = "tensorflow[and-cuda]"


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
        checks.append(_check_library(title, mine, built, installed, driver, path))
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
    mine, theirs = Version(driver.cuda), Version(built)
    if mine.major < theirs.major:
        return Check(name, FAILURE, text, f"Install a driver for CUDA {theirs.major} or newer.")
    if (mine.major, mine.minor) < (theirs.major, theirs.minor):
        hint = "A newer driver is better: with this one, GPUs that TensorFlow has no machine code "
        return Check(name, WARNING, text, f"{hint}for cannot be used.")
    return Check(name, OK, text)


def _check_library(title, wanted, built, installed, driver, path) -> Check:
    here = {each.name: installed(each.name) for each in wanted}
    found = {name: version for name, version in here.items() if version}
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
    if driver.gpus:
        hint = f"pip install '{_WHEELS}'"
        return Check(title, FAILURE, f"{text}neither a package nor a library of the system", hint)
    return Check(title, UNKNOWN, f"{text}not installed, and no NVIDIA GPU here")


def find_library(
    name: str, environ: Mapping[str, str] = os.environ, ask: Callable = run
) -> str | None:
    """Returns where the system would load a shared library from, or None.

    Args:
        name: Its file name, such as `"libcudart.so.12"`.
        environ: The environment: folders in LD_LIBRARY_PATH come first.
        ask: Runs a command.
    """
    for folder in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        if (Path(folder) / name).exists():
            return str(Path(folder) / name)
    for line in ask(["ldconfig", "-p"]).text.splitlines():
        if line.split()[:1] == [name] and "=>" in line:
            return line.rpartition("=>")[2].strip()
    return None
