"""How the GPUs of this host reach one another: NVLink and the topology.

Tried on output that users have published; see the tests for where. Not tried on a GPU.
"""

from __future__ import annotations

import re
from collections import Counter

from tfmulti.doctor.gpus import NO_GPU
from tfmulti.doctor.report import OK, UNKNOWN, WARNING, Check, plural
from tfmulti.doctor.tensorflow_process import Output

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU_LINE = re.compile(r"GPU (\d+):")
_LINK_LINE = re.compile(r"Link (\d+): *(?:<(\w+)>|([\d.]+) GB/s)")
_GPU = re.compile(r"GPU(\d+)")
_PATHS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "the processor's PCIe host bridge",
    "NODE": "several host bridges of one processor",
    "SYS": "the link between processors",
}


def parse_nvlink(text: str) -> dict[int, list[float | None]]:
    """Returns for each GPU the GB/s of its links, None for an inactive one.

    Args:
        text: The output of `nvidia-smi nvlink --status`.
    """
    links: dict[int, list[float | None]] = {}
    current: list[float | None] = []
    for line in text.splitlines():
        gpu, link = _GPU_LINE.match(line.strip()), _LINK_LINE.match(line.strip())
        if gpu:
            current = links.setdefault(int(gpu[1]), [])
        elif link:
            speed = float(link[3]) if link[3] else 0.0
            current.append(speed or None)
    return links


def check_nvlink(answer: Output, num_gpus: int) -> Check:
    """Checks the links of all GPUs."""
    name = "NVLink"
    if num_gpus == 0:
        return Check(name, UNKNOWN, NO_GPU)
    links = parse_nvlink(answer.text)
    active = {gpu: [speed for speed in each if speed] for gpu, each in links.items()}
    if answer.fault or not links:
        return Check(name, UNKNOWN, f"nvidia-smi reports nothing: {answer.fault or 'no links'}")
    if not any(active.values()):
        text = "no GPU has an active link: they speak over PCIe"
        return Check(name, OK, text)
    text = "; ".join(
        f"GPU {gpu}: {len(active[gpu])} of {len(links[gpu])} links, {sum(active[gpu]):g} GB/s"
        for gpu in links
    )
    # GPUs of one model may have unused links, the same on all of them.
    if len(Counter((len(each), sum(each)) for each in active.values())) > 1:
        hint = "All GPUs should have the same links: seat the bridge anew, or have it repaired."
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Returns how each two GPUs reach one another, such as `{(0, 1): "NV12"}`.

    Args:
        text: The output of `nvidia-smi topo -m`.
    """
    rows = [line.split() for line in _ANSI.sub("", text).splitlines() if line.strip()]
    heads = [row for row in rows if _GPU.fullmatch(row[0]) and row[1:2] and _is_head(row)]
    if not heads:
        return {}
    columns = heads[0]
    paths = {}
    for row in rows:
        gpu = _GPU.fullmatch(row[0])
        if not gpu or row is columns:
            continue
        for column, path in zip(columns, row[1:]):
            other = _GPU.fullmatch(column)
            if other and int(gpu[1]) < int(other[1]):
                paths[int(gpu[1]), int(other[1])] = path
    return paths


def _is_head(row) -> bool:
    return _GPU.fullmatch(row[1]) is not None or row[1:3] == ["CPU", "Affinity"]


def check_topology(answer: Output, num_gpus: int) -> Check:
    """Checks the paths between all GPUs."""
    name = "topology of the GPUs"
    if num_gpus == 0:
        return Check(name, UNKNOWN, NO_GPU)
    if num_gpus == 1:
        return Check(name, OK, "one GPU")
    paths = parse_topology(answer.text)
    if answer.fault or not paths:
        return Check(name, UNKNOWN, f"nvidia-smi reports nothing: {answer.fault or 'no matrix'}")
    counts = Counter(paths.values())
    text = ", ".join(
        f"{plural(count, 'pair')} over {_describe(path)}" for path, count in counts.items()
    )
    if "SYS" in counts:
        near = near_gpus(paths, num_gpus)
        hint = "Gradients cross between processors."
        if len(near) > 1:
            hint += f" With fewer GPUs use near ones: CUDA_VISIBLE_DEVICES={','.join(near)}"
        return Check(name, WARNING, text, hint)
    return Check(name, OK, text)


def near_gpus(paths: dict[tuple[int, int], str], num_gpus: int) -> list[str]:
    """Returns the GPUs that the first one reaches without crossing between processors.

    >>> near_gpus({(0, 1): "PHB", (0, 2): "SYS", (1, 2): "SYS"}, 3)
    ['0', '1']
    """
    return [str(index) for index in range(num_gpus) if paths.get((0, index)) != "SYS"]


def _describe(path) -> str:
    if path.startswith("NV"):
        return f"{path.removeprefix('NV')} NVLinks"
    return f"{_PATHS.get(path, 'a path unknown here')} ({path})"
