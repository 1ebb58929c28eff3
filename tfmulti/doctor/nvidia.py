"""Reads GPUs from nvidia-smi; its output is documented in `man nvidia-smi` and --help-query-gpu.

Tried on output that users have published; see the tests for where. Not tried on a GPU.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tfmulti.doctor.tensorflow_process import Output, run

_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "compute_mode",
    "mig.mode.current",
)
# Fields of all drivers of the last ten years, for a driver that lacks some of the others.
_FEWER = _FIELDS[: _FIELDS.index("mig.mode.current")]
_CUDA = re.compile(r"CUDA (?:UMD )?Version: *(\d+\.\d+)")
_DRIVER = re.compile(r"(?:Driver|KMD) Version: *([\d.]+)")
_NUMBER = re.compile(r"\d+")
_NVIDIA, _DISPLAY = "0x10de", "0x03"

Run = Callable[[Sequence[str]], Output]


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
        mig: Whether it is divided, `"Enabled"` or `"Disabled"`.
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
    mig: str | None = None


@dataclasses.dataclass(frozen=True)
class Driver:
    """The driver and its GPUs.

    Attributes:
        gpus: The GPUs, in the order of the bus.
        version: The driver's version, or None.
        cuda: The highest CUDA version that it can run, or None.
        fault: Why nvidia-smi gave no answer; empty where it did.
        is_absent: Whether there is no nvidia-smi at all.
        on_bus: NVIDIA GPUs on the PCI bus, with or without a driver.
    """

    gpus: tuple[Gpu, ...] = ()
    version: str | None = None
    cuda: str | None = None
    fault: str = ""
    is_absent: bool = False
    on_bus: int = 0


def read_driver(ask: Run = run, root: Path = Path("/")) -> Driver:
    """Queries nvidia-smi for the driver and its GPUs.

    Args:
        ask: Runs a command.
        root: The root of the file system.
    """
    on_bus = count_on_bus(root)
    head = ask(["nvidia-smi"])
    if head.returncode is None and head.fault.startswith("there is no program"):
        return Driver(fault=head.fault, is_absent=True, on_bus=on_bus)
    if head.fault:
        return Driver(fault=head.fault, on_bus=on_bus)
    version, cuda = parse_header(head.text)
    for fields in (_FIELDS, _FEWER):
        answer = ask(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"])
        if not answer.fault:
            return Driver(tuple(parse_gpus(answer.text)), version, cuda, "", False, on_bus)
    return Driver((), version, cuda, answer.fault, False, on_bus)


def parse_header(text: str) -> tuple[str | None, str | None]:
    """Returns the driver's version and the highest CUDA version that it can run.

    >>> parse_header("| NVIDIA-SMI 580.95  Driver Version: 580.95  CUDA Version: 13.0  |")
    ('580.95', '13.0')
    """
    driver, cuda = _DRIVER.search(text), _CUDA.search(text)
    return driver[1] if driver else None, cuda[1] if cuda else None


def parse_rows(text: str) -> list[dict[str, str]]:
    """Returns the rows of `--format=csv`: field -> value, without units in the field's name."""
    rows = [row for row in csv.reader(io.StringIO(text), skipinitialspace=True) if row]
    if not rows:
        return []
    names = [name.split(" [")[0].strip() for name in rows[0]]
    return [dict(zip(names, map(str.strip, row))) for row in rows[1:] if len(row) == len(names)]


def parse_gpus(text: str) -> list[Gpu]:
    """Returns the GPUs of a query with `--format=csv`; fields that were not queried are None."""
    return [
        Gpu(
            index=_number(row.get("index")) if "index" in row else place,
            name=row.get("name", "GPU"),
            uuid=_text(row.get("uuid")),
            memory_mib=_number(row.get("memory.total")),
            used_mib=_number(row.get("memory.used")),
            gen=_number(row.get("pcie.link.gen.current")),
            gen_max=_number(row.get("pcie.link.gen.max")),
            width=_number(row.get("pcie.link.width.current")),
            width_max=_number(row.get("pcie.link.width.max")),
            compute_mode=_text(row.get("compute_mode")),
            mig=_text(row.get("mig.mode.current")),
        )
        for place, row in enumerate(parse_rows(text))
    ]


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


def _text(value) -> str | None:
    # "[N/A]", "[Not Supported]", "[Unknown Error]".
    return None if not value or value.startswith("[") or value == "N/A" else value


def _number(value) -> int | None:
    text = _text(value)
    found = _NUMBER.match(text) if text else None
    return int(found[0]) if found else None
